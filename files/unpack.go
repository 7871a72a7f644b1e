package files

import (
	"archive/tar"
	"bytes"
	"io"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"
)

const paxXattr = "SCHILY.xattr."

func (u *unpacking) file(tr *tar.Reader, h *tar.Header, p place) error {
	var f *os.File
	err := makeRoom(p, func() (err error) {
		f, err = child(p.dir, p.name, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY, 0o600)
		return err
	})
	if err != nil {
		return fail(opUpload, p.path, err)
	}
	defer f.Close()
	if err := u.content(tr, h, f, p.path); err != nil {
		return err
	}
	return u.attributes(f, h, p.path)
}

// content writes a file's bytes; blocks of zeros of a sparse file become holes.
func (u *unpacking) content(tr *tar.Reader, h *tar.Header, f *os.File, path string) error {
	buf, done := u.l.buffer()
	defer done()
	sparse := h.Typeflag == tar.TypeGNUSparse || h.PAXRecords["GNU.sparse.major"] != "" || h.PAXRecords["GNU.sparse.map"] != "" || h.PAXRecords["GNU.sparse.size"] != ""
	hole := false
	for {
		n, err := io.ReadFull(tr, buf)
		if n > 0 {
			var werr error
			if hole, werr = writePiece(f, buf[:n], sparse); werr != nil {
				return fail(opUpload, path, errno(werr))
			}
		}
		if err == io.EOF || err == io.ErrUnexpectedEOF && u.src.err == nil && whole(f, h) {
			break
		}
		if err != nil {
			return u.broken(path, err)
		}
	}
	if hole {
		return fail(opUpload, path, errno(f.Truncate(h.Size)))
	}
	return nil
}

// whole reports whether a short piece was the last one, not a broken tar.
func whole(f *os.File, h *tar.Header) bool {
	at, err := f.Seek(0, io.SeekCurrent)
	return err == nil && at == h.Size
}

// writePiece writes a piece in blocks, leaving out zeros if they shall be a
// hole, and reports whether it ended in one.
func writePiece(f *os.File, p []byte, sparse bool) (hole bool, err error) {
	if !sparse {
		_, err = f.Write(p)
		return false, err
	}
	for len(p) > 0 {
		b := p[:min(len(p), 4096)]
		p = p[len(b):]
		if hole = bytes.Equal(b, zeros[:len(b)]); hole {
			_, err = f.Seek(int64(len(b)), io.SeekCurrent)
		} else {
			_, err = f.Write(b)
		}
		if err != nil {
			return hole, err
		}
	}
	return hole, nil
}

func (u *unpacking) makeDir(h *tar.Header, p place, name string) error {
	err := makeDir(p.dir, p.name, 0o700, u.own)
	if err == unix.EEXIST {
		var d *os.File
		if d, err = u.open(name, unix.O_PATH|unix.O_DIRECTORY); err == nil { // there, perhaps by a link that stays below
			d.Close()
		}
	}
	if err != nil {
		return u.leaving(name, err)
	}
	late := lateDir{name, h}
	if len(u.late) >= maxLateDirs {
		return u.lateAttributes(late)
	}
	u.late = append(u.late, late)
	return nil
}

func (u *unpacking) lateAttributes(d lateDir) error {
	f, err := u.open(d.name, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return u.note(u.path(d.name), err)
	}
	defer f.Close()
	return u.attributes(f, d.h, u.path(d.name))
}

// owns returns whom an entry shall belong to: as asked, else as the tar says
// if the user may give files away.
func (u *unpacking) owns(h *tar.Header) owner {
	o := u.own
	if os.Geteuid() != 0 {
		return o
	}
	if uid := uint32(h.Uid); o.uid == nil {
		o.uid = &uid
	}
	if gid := uint32(h.Gid); o.gid == nil {
		o.gid = &gid
	}
	return o
}

func (u *unpacking) attributes(f *os.File, h *tar.Header, path string) error {
	if err := chownFile(f, u.owns(h)); err != nil {
		return fail(opUpload, path, err)
	}
	if err := unix.Fchmod(int(f.Fd()), uint32(h.Mode)&0o7777); err != nil {
		return u.note(path, err)
	}
	for key, value := range h.PAXRecords {
		name, ok := strings.CutPrefix(key, paxXattr)
		if !ok || !portable(name) {
			continue
		}
		err := unix.Fsetxattr(int(f.Fd()), name, []byte(value), 0)
		if err != nil && err != unix.EOPNOTSUPP {
			if err := u.note(path, err); err != nil {
				return err
			}
		}
	}
	if !h.ModTime.IsZero() {
		return fail(opUpload, path, setMTime(int(f.Fd()), "", h.ModTime, unix.AT_EMPTY_PATH))
	}
	return nil
}

func (u *unpacking) symlink(h *tar.Header, p place) error {
	err := makeRoom(p, func() error { return unix.Symlinkat(h.Linkname, int(p.dir.Fd()), p.name) })
	if err != nil {
		return fail(opUpload, p.path, err)
	}
	return u.linkAttributes(h, p)
}

// linkAttributes of what cannot be opened.
func (u *unpacking) linkAttributes(h *tar.Header, p place) error {
	o := u.owns(h)
	if o.uid != nil || o.gid != nil {
		if err := unix.Fchownat(int(p.dir.Fd()), p.name, o.id(o.uid), o.id(o.gid), unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return fail(opUpload, p.path, err)
		}
	}
	if h.ModTime.IsZero() {
		return nil
	}
	return fail(opUpload, p.path, setMTime(int(p.dir.Fd()), p.name, h.ModTime, unix.AT_SYMLINK_NOFOLLOW))
}

func (u *unpacking) hardLink(h *tar.Header, p place) error {
	first, err := u.inside(h.Linkname)
	if err != nil {
		return err
	}
	if first == "" {
		return invalid(opUpload, p.path, "hard link to a directory")
	}
	dir, base := path.Split(first)
	d, err := u.open(dir, unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return u.leaving(first, err)
	}
	defer d.Close()
	err = makeRoom(p, func() error { return unix.Linkat(int(d.Fd()), base, int(p.dir.Fd()), p.name, 0) })
	return fail(opUpload, p.path, err)
}

// node makes a FIFO, or a device where that is permitted.
func (u *unpacking) node(h *tar.Header, p place) error {
	kind, dev := uint32(unix.S_IFIFO), 0
	switch h.Typeflag {
	case tar.TypeChar:
		kind = unix.S_IFCHR
	case tar.TypeBlock:
		kind = unix.S_IFBLK
	}
	if kind != unix.S_IFIFO {
		dev = int(unix.Mkdev(uint32(h.Devmajor), uint32(h.Devminor)))
	}
	err := makeRoom(p, func() error {
		return unix.Mknodat(int(p.dir.Fd()), p.name, kind|uint32(h.Mode)&0o7777, dev)
	})
	if err != nil {
		return u.note(p.path, err)
	}
	err = unix.Fchmodat(int(p.dir.Fd()), p.name, uint32(h.Mode)&0o7777, unix.AT_SYMLINK_NOFOLLOW)
	if err != nil && err != unix.EOPNOTSUPP { // before 6.6: what the umask left
		return u.note(p.path, err)
	}
	return u.linkAttributes(h, p)
}
