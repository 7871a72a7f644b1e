package files

import (
	"fmt"
	"io"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

const tarBlock = 512

var zeros [64 << 10]byte

// entry is a tar header to be.
type entry struct {
	name   string
	kind   byte // tar type flag
	mode   uint32
	uid    uint32
	gid    uint32
	mtime  time.Time
	link   string
	size   int64
	major  uint32
	minor  uint32
	xattrs []xattr
	sparse []segment // data of a sparse file of size bytes; nil: not sparse
}

type xattr struct{ name, value string }

// segment is a run of data in a sparse file.
type segment struct{ off, length int64 }

// tarWriter writes POSIX pax archives. The standard library's writer refuses
// sparse files, which are written here as GNU's format 1.0 has them: a map in
// front of the data, understood by GNU tar, bsdtar, Python and Go.
type tarWriter struct {
	w     io.Writer
	total int64 // bytes written
}

func newTarWriter(w io.Writer) *tarWriter { return &tarWriter{w: w} }

func (t *tarWriter) Write(p []byte) (int, error) {
	n, err := t.w.Write(p)
	t.total += int64(n)
	return n, err
}

// header writes the headers of e and the map of a sparse file. The caller
// writes the data, then pad of their length.
func (t *tarWriter) header(e *entry) error {
	size, name := e.size, e.name
	var pax records
	pax.add("mtime", fmt.Sprintf("%d.%09d", e.mtime.Unix(), e.mtime.Nanosecond()))
	if e.mtime.Unix() < 0 { // the seconds round down, decimal text rounds to zero
		pax = pax[:0]
		pax.add("mtime", strconv.FormatInt(e.mtime.Unix(), 10))
	}
	var sparseMap []byte
	if e.sparse != nil {
		sparseMap = encodeSparse(e.sparse)
		size = int64(len(sparseMap))
		for _, s := range e.sparse {
			size += s.length
		}
		pax.add("GNU.sparse.major", "1")
		pax.add("GNU.sparse.minor", "0")
		pax.add("GNU.sparse.name", e.name)
		pax.add("GNU.sparse.realsize", strconv.FormatInt(e.size, 10))
		name = "GNUSparseFile.0/" + e.name
	}
	for _, x := range e.xattrs {
		pax.add("SCHILY.xattr."+x.name, x.value)
	}
	h := block{kind: e.kind, mode: e.mode, mtime: e.mtime.Unix(), major: e.major, minor: e.minor}
	h.name = pax.textField("path", name, 100)
	h.link = pax.textField("linkpath", e.link, 100)
	h.size = pax.numberField("size", size, 12)
	h.uid = pax.numberField("uid", int64(e.uid), 8)
	h.gid = pax.numberField("gid", int64(e.gid), 8)
	if err := t.paxHeader(pax); err != nil {
		return err
	}
	if _, err := t.Write(h.encode()); err != nil {
		return err
	}
	_, err := t.Write(sparseMap)
	return err
}

func (t *tarWriter) paxHeader(pax records) error {
	h := block{name: "PaxHeaders.0/x", kind: 'x', mode: 0o644, size: int64(len(pax))}
	if _, err := t.Write(h.encode()); err != nil {
		return err
	}
	if _, err := t.Write(pax); err != nil {
		return err
	}
	return t.pad(int64(len(pax)))
}

// pad completes the last block of n bytes.
func (t *tarWriter) pad(n int64) error {
	_, err := t.Write(zeros[:(tarBlock-n%tarBlock)%tarBlock])
	return err
}

// end writes the end of the archive.
func (t *tarWriter) end() error {
	_, err := t.Write(zeros[:2*tarBlock])
	return err
}

// encodeSparse is the map: decimal lines of the number of segments, then
// offset and length of each, padded to a block.
func encodeSparse(s []segment) []byte {
	b := strconv.AppendInt(nil, int64(len(s)), 10)
	b = append(b, '\n')
	for _, x := range s {
		b = append(strconv.AppendInt(b, x.off, 10), '\n')
		b = append(strconv.AppendInt(b, x.length, 10), '\n')
	}
	return append(b, zeros[:(tarBlock-len(b)%tarBlock)%tarBlock]...)
}

// records are pax records: "length key=value\n", the length counting itself.
type records []byte

func (r *records) add(key, value string) {
	n := len(key) + len(value) + 3
	total := n + len(strconv.Itoa(n))
	if d := n + len(strconv.Itoa(total)); d != total {
		total = d
	}
	*r = append(strconv.AppendInt(*r, int64(total), 10), ' ')
	*r = append(append(*r, key...), '=')
	*r = append(append(*r, value...), '\n')
}

// textField returns what goes into the plain header; a record has it all if it
// does not fit or is not plain ASCII.
func (r *records) textField(key, s string, width int) string {
	plain := len(s) <= width
	for i := 0; i < len(s) && plain; i++ {
		plain = s[i] >= ' ' && s[i] < 0x7f
	}
	if plain {
		return s
	}
	r.add(key, s)
	b := []byte(s[:min(len(s), width)])
	for i, c := range b {
		if c < ' ' || c >= 0x7f {
			b[i] = '_'
		}
	}
	return string(b)
}

func (r *records) numberField(key string, n int64, width int) int64 {
	if n < 1<<(3*(width-1)) {
		return n
	}
	r.add(key, strconv.FormatInt(n, 10))
	return 0
}

// block is a ustar header.
type block struct {
	name         string
	mode         uint32
	uid, gid     int64
	size, mtime  int64
	kind         byte
	link         string
	major, minor uint32
}

func (h *block) encode() []byte {
	b := make([]byte, tarBlock)
	copy(b, h.name)
	octal(b[100:108], int64(h.mode&0o7777))
	octal(b[108:116], h.uid)
	octal(b[116:124], h.gid)
	octal(b[124:136], h.size)
	octal(b[136:148], max(0, min(h.mtime, 1<<33-1)))
	copy(b[148:156], "        ")
	b[156] = h.kind
	copy(b[157:257], h.link)
	copy(b[257:265], "ustar\x0000")
	octal(b[329:337], int64(h.major&0o7777777))
	octal(b[337:345], int64(h.minor&0o7777777))
	sum := int64(0)
	for _, c := range b {
		sum += int64(c)
	}
	octal(b[148:155], sum)
	return b
}

// octal fills a field with leading zeros and a zero byte at the end.
func octal(b []byte, n int64) {
	copy(b, fmt.Sprintf("%0*o", len(b)-1, n))
	b[len(b)-1] = 0
}

// tarKind of a file type; 0 for what a tar cannot hold.
func tarKind(mode uint32) byte {
	switch mode & unix.S_IFMT {
	case unix.S_IFREG:
		return '0'
	case unix.S_IFLNK:
		return '2'
	case unix.S_IFCHR:
		return '3'
	case unix.S_IFBLK:
		return '4'
	case unix.S_IFDIR:
		return '5'
	case unix.S_IFIFO:
		return '6'
	}
	return 0
}
