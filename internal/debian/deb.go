package debian

import (
	"archive/tar"
	"bufio"
	"bytes"
	"fmt"
	"io"
	"path"
	"strconv"
	"strings"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/ulikunitz/xz"
	"github.com/ulikunitz/xz/lzma"

	"github.com/opendsec/dsec"
)

// Limits bound what is read of a package. The zero value means the defaults.
type Limits struct {
	Total int64 // bytes of all files together, 0: 4 GiB
	File  int64 // bytes of one file that is wanted, 0: 512 MiB
	Files int   // files and directories, 0: 1 000 000
}

// largestDict bounds the memory that decompressing takes; dpkg-deb writes at
// most 64 MiB.
const largestDict = 128 << 20

// EachFile calls fn for each regular file of a .deb that is wanted, in the
// order of the archive, with its path as in "boot/vmlinuz-6.1". What is wanted
// and is no regular file, a path that leaves the root or is there twice, and
// everything else that dpkg-deb never writes is refused as corrupt, whether it
// is wanted or not.
func EachFile(r io.Reader, object string, lim Limits, want func(name string) bool, fn func(name string, size int64, r io.Reader) error) error {
	const op = "read package"
	if lim.Total == 0 {
		lim.Total = 4 << 30
	}
	if lim.File == 0 {
		lim.File = 512 << 20
	}
	if lim.Files == 0 {
		lim.Files = 1000000
	}
	data, suffix, err := openData(r)
	if err != nil {
		return dsec.E(dsec.Corrupt, op, object, err)
	}
	plain, done, err := decompress(data, suffix)
	if dsec.ClassOf(err) == dsec.Unsupported {
		return dsec.E(dsec.Unsupported, op, object, err)
	}
	if err != nil {
		return dsec.E(dsec.Corrupt, op, object, err)
	}
	defer done()
	limited := &capped{plain, lim.Total, fmt.Errorf("more than %d bytes of files", lim.Total)}
	w := walk{tar: tar.NewReader(limited), lim: lim, want: want, fn: fn, seen: map[string]bool{}}
	for {
		more, err := w.next()
		if err != nil && w.theirs == nil {
			return dsec.E(dsec.Corrupt, op, object, err)
		}
		if err != nil {
			return w.theirs
		}
		if !more {
			break
		}
	}
	// What follows the end of the tar is read to its end: a package that is cut off is damaged.
	if _, err := io.Copy(io.Discard, limited); err != nil {
		return dsec.E(dsec.Corrupt, op, object, err)
	}
	if _, err := io.Copy(io.Discard, data); err != nil {
		return dsec.E(dsec.Corrupt, op, object, err)
	}
	return nil
}

type walk struct {
	tar    *tar.Reader
	lim    Limits
	files  int
	seen   map[string]bool // paths that are wanted
	want   func(string) bool
	fn     func(string, int64, io.Reader) error
	theirs error // what fn said
}

func (w *walk) next() (more bool, err error) {
	h, err := w.tar.Next()
	if err == io.EOF {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("read tar: %w", err)
	}
	if w.files++; w.files > w.lim.Files {
		return false, fmt.Errorf("more than %d files", w.lim.Files)
	}
	name := strings.TrimSuffix(strings.TrimPrefix(h.Name, "./"), "/")
	if name == "" || name == "." {
		return true, nil
	}
	if name[0] == '/' || path.Clean(name) != name || name == ".." || strings.HasPrefix(name, "../") {
		return false, fmt.Errorf("path %s leaves the root, or is not in its shortest form", dsec.Quote(h.Name))
	}
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeDir, tar.TypeSymlink, tar.TypeLink:
	default:
		return false, fmt.Errorf("%s is of type %q", dsec.Quote(name), h.Typeflag)
	}
	if h.Typeflag == tar.TypeDir || !w.want(name) {
		return true, nil
	}
	switch {
	case h.Typeflag != tar.TypeReg:
		return false, fmt.Errorf("%s is no regular file", dsec.Quote(name))
	case w.seen[name]:
		return false, fmt.Errorf("%s is there twice", dsec.Quote(name))
	case h.Size > w.lim.File:
		return false, fmt.Errorf("%s has %d bytes, at most %d", dsec.Quote(name), h.Size, w.lim.File)
	}
	w.seen[name] = true
	body := &noting{r: w.tar}
	if err := w.fn(name, h.Size, body); err != nil {
		if body.err == nil { // else it is the archive that is wrong
			w.theirs = err
		}
		return false, err
	}
	return true, nil
}

// noting remembers why reading ended.
type noting struct {
	r   io.Reader
	err error
}

func (n *noting) Read(p []byte) (int, error) {
	k, err := n.r.Read(p)
	if err != nil && err != io.EOF {
		n.err = err
	}
	return k, err
}

// openData reads the ar members debian-binary and control, and returns the one
// with the files, and the suffix that says how it is compressed.
func openData(r io.Reader) (data io.Reader, suffix string, err error) {
	magic := make([]byte, 8)
	if _, err := io.ReadFull(r, magic); err != nil || string(magic) != "!<arch>\n" {
		return nil, "", fmt.Errorf("it is no ar archive")
	}
	for n := 0; n < 8; n++ {
		name, size, err := arHeader(r)
		if err != nil {
			return nil, "", err
		}
		base, rest, _ := strings.Cut(name, ".tar")
		switch {
		case n == 0 && name == "debian-binary" && size < 64:
			text := make([]byte, size)
			if _, err := io.ReadFull(r, text); err != nil {
				return nil, "", fmt.Errorf("member %s: %w", dsec.Quote(name), io.ErrUnexpectedEOF)
			}
			if !strings.HasPrefix(string(text), "2.") {
				return nil, "", fmt.Errorf("package format %s: only 2 is known", dsec.Quote(string(text)))
			}
		case n > 0 && base == "data":
			return &member{r: r, left: size}, rest, nil
		case n > 0 && (base == "control" || strings.HasPrefix(name, "_")):
			if _, err := io.CopyN(io.Discard, r, size); err != nil {
				return nil, "", fmt.Errorf("member %s: %w", dsec.Quote(name), io.ErrUnexpectedEOF)
			}
		default:
			return nil, "", fmt.Errorf("member %d is %s", n, dsec.Quote(name))
		}
		if size%2 == 1 {
			if _, err := io.CopyN(io.Discard, r, 1); err != nil {
				return nil, "", fmt.Errorf("member %s: %w", dsec.Quote(name), io.ErrUnexpectedEOF)
			}
		}
	}
	return nil, "", fmt.Errorf("no member data.tar")
}

// arHeader reads the 60 bytes before a member: name, date, ids, mode, size.
func arHeader(r io.Reader) (name string, size int64, err error) {
	var h [60]byte
	if _, err := io.ReadFull(r, h[:]); err != nil {
		return "", 0, fmt.Errorf("no member data.tar: %w", io.ErrUnexpectedEOF)
	}
	size, err = strconv.ParseInt(strings.TrimRight(string(h[48:58]), " "), 10, 64)
	if err != nil || size < 0 || h[58] != '`' || h[59] != '\n' {
		return "", 0, fmt.Errorf("a member's header is damaged")
	}
	return strings.TrimSuffix(strings.TrimRight(string(h[:16]), " "), "/"), size, nil
}

// member reads a member, and is not content with less of it.
type member struct {
	r    io.Reader
	left int64
}

func (m *member) Read(p []byte) (int, error) {
	if m.left == 0 {
		return 0, io.EOF
	}
	if int64(len(p)) > m.left {
		p = p[:m.left]
	}
	n, err := m.r.Read(p)
	m.left -= int64(n)
	if err == io.EOF && m.left > 0 {
		err = io.ErrUnexpectedEOF
	}
	return n, err
}

// decompress reads by the suffix of a file's name.
func decompress(r io.Reader, suffix string) (plain io.Reader, done func(), err error) {
	done = func() {}
	switch suffix {
	case "":
		return r, done, nil
	case ".gz":
		plain, err = gzip.NewReader(r)
		return plain, done, err
	case ".zst":
		d, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(largestDict))
		if err != nil {
			return nil, nil, err
		}
		return d, d.Close, nil
	case ".xz":
		plain, err = Unxz(r)
		return plain, done, err
	}
	return nil, nil, fmt.Errorf("compression %s is not known", dsec.Quote(suffix))
}

// Unxz decompresses xz, but no stream that would take more than 128 MiB of
// memory as its first block says: that is corrupt. unsupported if the block has
// another filter than LZMA2, as kernels for many machines have for their code.
func Unxz(r io.Reader) (io.Reader, error) {
	br := bufio.NewReaderSize(r, 1<<17)
	// The header of the stream has 12 bytes, that of a block begins with its size.
	head, _ := br.Peek(12 + 64)
	if len(head) > 18 && bytes.HasPrefix(head, []byte("\xfd7zXZ\x00")) && head[12] != 0 {
		// Filters follow two optional sizes of up to nine bytes; LZMA2 is 0x21, one byte of properties.
		at := 14
		for flag := byte(0x40); flag != 0; flag <<= 1 {
			if head[13]&flag != 0 {
				for at < len(head)-1 && head[at]&0x80 != 0 {
					at++
				}
				at++
			}
		}
		if filters := head[13]&3 + 1; filters != 1 || at+2 >= len(head) || head[at] != 0x21 || head[at+1] != 1 {
			return nil, dsec.Errorf(dsec.Unsupported, "decompress", "xz", "%d filters, only LZMA2 alone is read", filters)
		}
		if n, err := lzma.DecodeDictCap(head[at+2]); err != nil || n > largestDict {
			return nil, dsec.Errorf(dsec.Corrupt, "decompress", "xz", "a dictionary of %d bytes, at most %d", n, largestDict)
		}
	}
	x, err := xz.NewReader(br)
	if err != nil {
		return nil, dsec.E(dsec.Corrupt, "decompress", "xz", err)
	}
	return x, nil
}
