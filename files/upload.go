package files

import (
	"archive/tar"
	"context"
	"errors"
	"io"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/linux"
)

const (
	maxLateDirs = 100_000   // whose attributes are set at the end
	noID        = 1<<32 - 1 // "keep" to chown(2)
	maxTail     = 4 << 20   // bytes read after the end of a tar, so that its sender is not cut off
)

// Upload implements FS. dir and missing directories of names are made. A file
// or link in the way is replaced, a directory is not. What may not be made or
// set (devices, foreign attributes) is left out and named in the error, after
// everything else was unpacked. Without the right to give files away they
// belong to the asking user, as with tar.
func (l *Local) Upload(ctx context.Context, dir string, r io.Reader, o TreeOptions) error {
	return l.upload(ctx, dir, r, o, false)
}

// Receive is Upload of a tree from a place where nobody is to be trusted with
// the rights of this process: nothing in it becomes setuid or setgid, gets file
// capabilities or is a device. Devices are left out and named in the error.
func (l *Local) Receive(ctx context.Context, dir string, r io.Reader, o TreeOptions) error {
	return l.upload(ctx, dir, r, o, true)
}

func (l *Local) upload(ctx context.Context, dir string, r io.Reader, o TreeOptions, tame bool) error {
	if err := check(ctx, opUpload, dir); err != nil {
		return err
	}
	own := owner{o.UID, o.GID}
	if err := own.check(opUpload, dir); err != nil {
		return err
	}
	d, err := l.openDir(dir)
	if missing(err) {
		var made *os.File
		if made, err = l.makeAll(dir, own); err == nil {
			made.Close()
			d, err = l.openDir(dir)
		}
	}
	if err != nil {
		return fail(opUpload, dir, err)
	}
	defer d.Close()
	u := unpacking{ctx: ctx, l: l, asked: dir, dir: d, own: own, src: &source{ctx: ctx, r: r}, isRoot: l.isRoot(d), tame: tame}
	return u.run()
}

// isRoot reports whether d is the root, below which links cannot lead out.
func (l *Local) isRoot(d *os.File) bool {
	a, err := fstat(l.root)
	if err != nil {
		return false
	}
	b, err := fstat(d)
	return err == nil && a.Dev == b.Dev && a.Ino == b.Ino
}

// unpacking is one tar being unpacked.
type unpacking struct {
	ctx    context.Context
	l      *Local
	asked  string
	dir    *os.File
	own    owner
	src    *source
	isRoot bool
	tame   bool // the tar is not trusted, see Receive
	late   []lateDir
	denied error // first thing that was not permitted
}

// lateDir gets its attributes when everything is in it.
type lateDir struct {
	name string
	h    *tar.Header
}

func (u *unpacking) run() error {
	tr := tar.NewReader(u.src)
	for {
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return u.broken(u.asked, err)
		}
		if err := u.entry(tr, h); err != nil {
			return err
		}
	}
	for _, d := range u.late {
		if err := u.lateAttributes(d); err != nil {
			return err
		}
	}
	_, _ = io.CopyN(io.Discard, u.src, maxTail)
	if u.src.err != nil {
		return failPeer(opUpload, u.asked, u.src.err)
	}
	return u.denied
}

// broken tells a broken tar from a broken source.
func (u *unpacking) broken(path string, err error) error {
	if u.src.err != nil {
		return failPeer(opUpload, path, u.src.err)
	}
	return dsec.E(dsec.Invalid, opUpload, dsec.Quote(path), err)
}

func (u *unpacking) path(name string) string { return trimRoot(u.asked) + "/" + name }

func (u *unpacking) entry(tr *tar.Reader, h *tar.Header) error {
	name, err := u.inside(h.Name)
	if err != nil || name == "" {
		return err
	}
	if h.Uid < 0 || h.Gid < 0 || int64(h.Uid) >= noID || int64(h.Gid) >= noID {
		return invalid(opUpload, u.path(name), "owner %d:%d", h.Uid, h.Gid)
	}
	p, err := u.parent(name)
	if err != nil {
		return err
	}
	defer p.close()
	if u.tame {
		if h.Typeflag == tar.TypeChar || h.Typeflag == tar.TypeBlock {
			return u.note(p.path, unix.EPERM)
		}
		tameHeader(h)
	}
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeGNUSparse, tar.TypeCont:
		return u.file(tr, h, p)
	case tar.TypeDir:
		return u.makeDir(h, p, name)
	case tar.TypeSymlink:
		return u.symlink(h, p)
	case tar.TypeLink:
		return u.hardLink(h, p)
	case tar.TypeFifo, tar.TypeChar, tar.TypeBlock:
		return u.node(h, p)
	}
	return invalid(opUpload, p.path, "tar entry of unknown type %q", h.Typeflag)
}

// tameHeader takes away what gives rights to who runs a file.
func tameHeader(h *tar.Header) {
	h.Mode &^= unix.S_ISUID | unix.S_ISGID
	for key := range h.PAXRecords {
		if strings.HasPrefix(key, paxXattr+"security.") {
			delete(h.PAXRecords, key)
		}
	}
}

// inside cleans a name; "" is the directory itself, whose attributes stay.
func (u *unpacking) inside(name string) (string, error) {
	clean := path.Clean(name)
	switch {
	case clean == "." || clean == "":
		return "", nil
	case strings.HasPrefix(clean, "/") || clean == ".." || strings.HasPrefix(clean, "../"):
		return "", invalid(opUpload, name, "leaves %s", dsec.Quote(u.asked))
	case strings.IndexByte(clean, 0) >= 0:
		return "", invalid(opUpload, name, "holds a zero byte")
	}
	for part := range strings.SplitSeq(name, "/") {
		if part == ".." {
			return "", invalid(opUpload, name, `".." in a name`)
		}
	}
	return clean, nil
}

// parent opens the directory of a name below dir and makes what is missing.
// Links are followed as long as they stay below dir.
func (u *unpacking) parent(name string) (place, error) {
	dir, base := path.Split(name)
	d, err := u.open(dir, unix.O_PATH|unix.O_DIRECTORY)
	if missing(err) {
		d, err = u.makeParents(dir)
	}
	if err != nil {
		return place{}, u.leaving(name, err)
	}
	return place{dir: d, name: base, path: u.path(name)}, nil
}

// leaving says why a name cannot be followed.
func (u *unpacking) leaving(name string, err error) error {
	if errors.Is(err, unix.EXDEV) {
		return invalid(opUpload, u.path(name), "a link leads out of %s", dsec.Quote(u.asked))
	}
	return fail(opUpload, u.path(name), err)
}

// open resolves a name below dir. RESOLVE_BENEATH refuses every way out;
// below the root there is none, and absolute links mean the root.
func (u *unpacking) open(name string, flags int) (*os.File, error) {
	if name == "" {
		name = "."
	}
	if u.isRoot {
		f, err := linux.OpenIn(u.dir, name, flags)
		return f, errno(err)
	}
	how := unix.OpenHow{Flags: uint64(flags) | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_MAGICLINKS}
	for tries := 0; ; tries++ {
		fd, err := unix.Openat2(int(u.dir.Fd()), name, &how)
		if err == unix.EINTR || err == unix.EAGAIN && tries < 16 {
			continue
		}
		if err != nil {
			return nil, err
		}
		return os.NewFile(uintptr(fd), name), nil
	}
}

func (u *unpacking) makeParents(dir string) (*os.File, error) {
	dir = trimSlash(dir)
	for end := 1; end <= len(dir); end++ {
		if end < len(dir) && dir[end] != '/' {
			continue
		}
		d, err := u.open(dir[:end], unix.O_PATH|unix.O_DIRECTORY)
		if err == nil {
			d.Close()
			continue
		}
		if !missing(err) {
			return nil, err
		}
		up, base := path.Split(dir[:end])
		d, err = u.open(up, unix.O_PATH|unix.O_DIRECTORY)
		if err != nil {
			return nil, err
		}
		err = makeDir(d, base, 0o755, u.own)
		if err == unix.EEXIST {
			if st, serr := lstatAt(d, base); serr == nil && kindOf(st.Mode) == Symlink {
				err = unix.ENOENT // a link to nothing
			} else {
				err = nil
			}
		}
		d.Close()
		if err != nil {
			return nil, err
		}
	}
	return u.open(dir, unix.O_PATH|unix.O_DIRECTORY)
}

// note remembers the first thing that was not permitted.
func (u *unpacking) note(path string, err error) error {
	if !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.EACCES) {
		return fail(opUpload, path, err)
	}
	if u.denied == nil {
		u.denied = fail(opUpload, path, err)
	}
	return nil
}

// makeRoom calls fn until the name is free, removing what is in the way but no
// directory.
func makeRoom(p place, fn func() error) error {
	for range 8 {
		err := fn()
		if err != unix.EEXIST {
			return err
		}
		if err := unix.Unlinkat(int(p.dir.Fd()), p.name, 0); err != nil && !missing(err) {
			return err
		}
	}
	return unix.EEXIST
}
