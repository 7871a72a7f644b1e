package files

import (
	"context"
	"errors"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

const (
	maxXattrs   = 512 << 10 // bytes of one entry; readers refuse headers over 1 MiB
	maxSegments = 32 << 10  // of a sparse file; what follows is written as data
	maxHardLink = 1 << 20   // remembered; further ones become files of their own
)

// Download implements FS. A file that changes meanwhile has the size it had
// when it was begun, zeros if it shrank. What the user may not read is left
// out and named in the error, after everything else was written. Sockets have
// no place in a tar and are left out.
func (l *Local) Download(ctx context.Context, dir string, w io.Writer, o TreeOptions) error {
	if err := check(ctx, opDownload, dir); err != nil {
		return err
	}
	globs, err := compileGlobs(opDownload, o.Globs)
	if err != nil {
		return err
	}
	d, err := l.openDir(dir)
	if err != nil {
		return fail(opDownload, dir, err)
	}
	defer d.Close()
	k := packing{ctx: ctx, l: l, op: opDownload, asked: dir, globs: globs, max: o.Max, t: newTarWriter(w)}
	if err := k.walk(d, "", 0); err != nil {
		return err
	}
	return k.finish()
}

// packing is one tar in the making.
type packing struct {
	ctx    context.Context
	l      *Local
	op     string
	asked  string
	globs  []glob
	max    int64
	t      *tarWriter
	links  map[inode]string // first name of files with several
	denied error            // first entry that may not be read
}

type inode struct{ dev, ino uint64 }

func (k *packing) finish() error {
	if err := k.t.end(); err != nil {
		return failPeer(k.op, k.asked, err)
	}
	return k.denied
}

// walk packs the entries of a directory, sorted among 1,024 at a time, so that
// memory does not depend on how many there are.
func (k *packing) walk(d *os.File, prefix string, level int) error {
	if level >= maxDepth {
		return invalid(k.op, k.asked, "deeper than %d directories", maxDepth)
	}
	for {
		names, err := d.Readdirnames(1024)
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return fail(k.op, k.path(prefix), errno(err))
		}
		slices.Sort(names)
		for _, name := range names {
			if err := k.entry(d, name, prefix, level); err != nil {
				return err
			}
		}
	}
}

func (k *packing) path(rel string) string { return trimRoot(k.asked) + "/" + rel }

// entry packs one entry and, of a directory, all below.
func (k *packing) entry(d *os.File, name, prefix string, level int) error {
	if err := k.ctx.Err(); err != nil {
		return fail(k.op, k.asked, err)
	}
	rel := prefix + name
	st, err := lstatAt(d, name)
	if missing(err) {
		return nil
	}
	if err != nil {
		return fail(k.op, k.path(rel), err)
	}
	e := entry{name: rel, kind: tarKind(st.Mode), mode: st.Mode & 0o7777, uid: st.Uid, gid: st.Gid, mtime: time.Unix(st.Mtim.Unix())}
	wanted := matchAny(k.globs, rel)
	switch {
	case e.kind == 0 || !wanted && e.kind != '5':
		return nil
	case e.kind == '5':
		return k.dir(d, name, &e, wanted, level)
	case st.Nlink > 1 && k.seen(&st, &e):
	case e.kind == '0':
		return k.file(d, name, &e)
	case e.kind == '2':
		if e.link, err = readlink(d, name); err != nil {
			return nil // replaced meanwhile
		}
	default:
		e.major, e.minor = unix.Major(st.Rdev), unix.Minor(st.Rdev)
	}
	return k.header(&e)
}

// seen turns e into a hard link if its file has been written.
func (k *packing) seen(st *unix.Stat_t, e *entry) bool {
	id := inode{st.Dev, st.Ino}
	if first, ok := k.links[id]; ok {
		e.kind, e.link = '1', first
		return true
	}
	if k.links == nil {
		k.links = map[inode]string{}
	}
	if len(k.links) < maxHardLink {
		k.links[id] = e.name
	}
	return false
}

func (k *packing) header(e *entry) error {
	if err := k.room(e.size); err != nil {
		return err
	}
	if err := k.t.header(e); err != nil {
		return failPeer(k.op, k.path(e.name), err)
	}
	return nil
}

func (k *packing) room(n int64) error {
	if k.max > 0 && k.t.total+n > k.max {
		return dsec.Errorf(dsec.ResourceExhausted, k.op, dsec.Quote(k.asked), "more than %d bytes", k.max)
	}
	return nil
}

// skip notes an entry that cannot be read and says whether to go on.
func (k *packing) skip(rel string, err error) error {
	if missing(err) || errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ENXIO) {
		return nil // gone or replaced meanwhile
	}
	if errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM) {
		if k.denied == nil {
			k.denied = fail(k.op, k.path(rel), err)
		}
		return nil
	}
	return fail(k.op, k.path(rel), err)
}

func (k *packing) dir(d *os.File, name string, e *entry, wanted bool, level int) error {
	rel := e.name
	sub, err := child(d, name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return k.skip(rel, err)
	}
	defer sub.Close()
	if wanted {
		e.name += "/"
		e.xattrs = readXattrs(sub)
		if err := k.header(e); err != nil {
			return err
		}
	}
	return k.walk(sub, rel+"/", level+1)
}

func (k *packing) file(d *os.File, name string, e *entry) error {
	f, err := child(d, name, unix.O_RDONLY, 0)
	if err != nil {
		return k.skip(e.name, err)
	}
	defer f.Close()
	st, err := fstat(f)
	if err != nil || kindOf(st.Mode) != File {
		return nil // replaced meanwhile
	}
	e.size, e.xattrs = st.Size, readXattrs(f)
	data := []segment{{0, st.Size}}
	if st.Blocks*512 < st.Size {
		if s := segments(f, st.Size); len(s) != 1 || s[0] != data[0] {
			data, e.sparse = s, s
		}
	}
	total := int64(0)
	for _, s := range data {
		total += s.length
	}
	if err := k.room(total); err != nil {
		return err
	}
	if err := k.t.header(e); err != nil {
		return failPeer(k.op, k.path(e.name), err)
	}
	for _, s := range data {
		if err := k.data(f, s, e.name); err != nil {
			return err
		}
	}
	if err := k.t.pad(total); err != nil {
		return failPeer(k.op, k.path(e.name), err)
	}
	return nil
}

// data copies a segment; what is no longer there is zeros.
func (k *packing) data(f *os.File, s segment, rel string) error {
	buf, done := k.l.buffer()
	defer done()
	for s.length > 0 {
		if err := k.ctx.Err(); err != nil {
			return fail(k.op, k.asked, err)
		}
		piece := buf[:min(int64(len(buf)), s.length)]
		n, err := f.ReadAt(piece, s.off)
		if err == io.EOF {
			clear(piece[n:])
			n, err = len(piece), nil
		}
		if err != nil {
			return fail(k.op, k.path(rel), errno(err))
		}
		if _, err := k.t.Write(piece[:n]); err != nil {
			return failPeer(k.op, k.path(rel), err)
		}
		s.off, s.length = s.off+int64(n), s.length-int64(n)
	}
	return nil
}

// segments finds the data of a sparse file. A hole at the end is marked by an
// empty segment, as GNU tar does.
func segments(f *os.File, size int64) []segment {
	out := []segment{}
	fd := int(f.Fd())
	for off := int64(0); off < size; {
		if len(out) == maxSegments {
			return append(out, segment{off, size - off})
		}
		start, err := unix.Seek(fd, off, unix.SEEK_DATA)
		if err == unix.ENXIO {
			break
		}
		if err != nil {
			return []segment{{0, size}} // this file system does not tell
		}
		end, err := unix.Seek(fd, start, unix.SEEK_HOLE)
		if err != nil || end > size {
			end = size
		}
		if start >= end {
			break
		}
		out = append(out, segment{start, end - start})
		off = end
	}
	if n := len(out); n == 0 || out[n-1].off+out[n-1].length < size {
		out = append(out, segment{size, 0})
	}
	return out
}

// readXattrs returns the attributes that mean something elsewhere.
func readXattrs(f *os.File) []xattr {
	fd := int(f.Fd())
	list := make([]byte, 1<<10)
	n, err := unix.Flistxattr(fd, list)
	if err == unix.ERANGE {
		list = make([]byte, 64<<10) // the kernel's limit
		n, err = unix.Flistxattr(fd, list)
	}
	if err != nil || n == 0 {
		return nil
	}
	var out []xattr
	total := 0
	value := make([]byte, 64<<10)
	for name := range strings.SplitSeq(strings.TrimSuffix(string(list[:n]), "\x00"), "\x00") {
		if !portable(name) {
			continue
		}
		n, err := unix.Fgetxattr(fd, name, value)
		if total += len(name) + max(n, 0); err != nil || total > maxXattrs {
			continue
		}
		out = append(out, xattr{name, string(value[:n])})
	}
	return out
}

func portable(name string) bool {
	return strings.HasPrefix(name, "user.") && !strings.Contains(name, "=") || name == "security.capability" ||
		name == "system.posix_acl_access" || name == "system.posix_acl_default"
}
