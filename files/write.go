package files

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"hash"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// Write implements FS. A replaced file's hard links keep the old content, its
// extended attributes are gone. A file whose directory the user may not write
// to, or that is a mount point, is overwritten in place once all bytes are here.
func (l *Local) Write(ctx context.Context, path string, r io.Reader, o WriteOptions) (Info, error) {
	if err := check(ctx, opWrite, path); err != nil {
		return Info{}, err
	}
	if o.Append && o.SHA256 != "" {
		return Info{}, invalid(opWrite, path, "sha256 of an append cannot be checked before it is done")
	}
	if err := (owner{o.UID, o.GID}).check(opWrite, path); err != nil {
		return Info{}, err
	}
	p, err := l.target(opWrite, path, o.Parents, owner{o.UID, o.GID})
	if err != nil {
		return Info{}, err
	}
	defer p.close()
	old, err := writable(path, p)
	if err != nil {
		return Info{}, err
	}
	w := writing{l: l, path: path, p: p, old: old, o: o, r: &source{ctx: ctx, r: r}}
	if o.Append && old != nil {
		return w.append()
	}
	return w.replace()
}

// writable returns what is at p, nil if nothing; an error if it is no regular
// file or the user may not write to it.
func writable(path string, p place) (*unix.Stat_t, error) {
	st, err := p.lstat()
	switch {
	case missing(err):
		return nil, nil
	case err != nil:
		return nil, fail(opWrite, path, err)
	case kindOf(st.Mode) == Dir:
		return nil, dsec.E(dsec.IsADirectory, opWrite, dsec.Quote(path), unix.EISDIR)
	case kindOf(st.Mode) != File:
		return nil, invalid(opWrite, path, "not a regular file")
	}
	err = unix.Faccessat2(int(p.dir.Fd()), p.name, unix.W_OK, unix.AT_EACCESS|unix.AT_SYMLINK_NOFOLLOW)
	if err != nil && err != unix.ENOSYS {
		return nil, fail(opWrite, path, err)
	}
	return &st, nil
}

// writing is one call of Write.
type writing struct {
	l    *Local
	path string
	p    place
	old  *unix.Stat_t // nil if there is none
	o    WriteOptions
	r    *source
}

func (w *writing) append() (Info, error) {
	f, err := child(w.p.dir, w.p.name, unix.O_WRONLY|unix.O_APPEND, 0)
	if err != nil {
		return Info{}, fail(opWrite, w.path, err)
	}
	defer f.Close()
	if _, err := regular(opWrite, w.path, f); err != nil {
		return Info{}, err
	}
	if err := w.copy(f, nil); err != nil {
		return Info{}, err
	}
	if err := chownFile(f, owner{w.o.UID, w.o.GID}); err != nil {
		return Info{}, fail(opWrite, w.path, err)
	}
	if w.o.Mode != nil {
		if err := unix.Fchmod(int(f.Fd()), *w.o.Mode&0o7777); err != nil {
			return Info{}, fail(opWrite, w.path, err)
		}
	}
	return w.info(f)
}

func (w *writing) replace() (Info, error) {
	t, err := w.l.newTemp(w.p.dir)
	inPlace := w.old != nil && errors.Is(err, unix.EACCES)
	if inPlace {
		t, err = w.l.elsewhere()
	}
	if err != nil {
		return Info{}, fail(opWrite, w.path, err)
	}
	defer t.close()
	sum := sha256.New()
	if err := w.copy(t.f, sum); err != nil {
		return Info{}, err
	}
	if got := hex.EncodeToString(sum.Sum(nil)); w.o.SHA256 != "" && !strings.EqualFold(got, w.o.SHA256) {
		return Info{}, dsec.Errorf(dsec.Corrupt, opWrite, dsec.Quote(w.path), "sha256 is %s, want %s", got, w.o.SHA256)
	}
	if inPlace {
		return w.overwrite(t.f)
	}
	if err := w.attributes(t.f); err != nil {
		return Info{}, fail(opWrite, w.path, err)
	}
	err = t.publish(w.l, w.p.name, w.old != nil)
	if err == unix.EBUSY && w.old != nil {
		return w.overwrite(t.f)
	}
	if err != nil {
		return Info{}, fail(opWrite, w.path, err)
	}
	return w.info(t.f)
}

// copy moves everything from the source to f.
func (w *writing) copy(f *os.File, sum hash.Hash) error {
	buf, done := w.l.buffer()
	defer done()
	for {
		n, err := w.r.Read(buf)
		if n > 0 {
			if sum != nil {
				sum.Write(buf[:n])
			}
			if _, err := f.Write(buf[:n]); err != nil {
				return fail(opWrite, w.path, errno(err))
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return failPeer(opWrite, w.path, err)
		}
	}
}

// attributes gives the new file mode and owner: what was asked for, else what
// the replaced one had, as far as the user may.
func (w *writing) attributes(f *os.File) error {
	mode, o := uint32(0o644), owner{w.o.UID, w.o.GID}
	if w.old != nil {
		mode = w.old.Mode & 0o7777
		if err := keepOwner(f, w.old); err != nil {
			mode &^= unix.S_ISUID | unix.S_ISGID
		}
	}
	if w.o.Mode != nil {
		mode = *w.o.Mode & 0o7777
	}
	if err := chownFile(f, o); err != nil {
		return err
	}
	return unix.Fchmod(int(f.Fd()), mode) // after chown, which clears setuid
}

func keepOwner(f *os.File, old *unix.Stat_t) error {
	st, err := fstat(f)
	if err != nil || st.Uid == old.Uid && st.Gid == old.Gid {
		return err
	}
	if err = unix.Fchown(int(f.Fd()), int(old.Uid), int(old.Gid)); err != nil {
		_ = unix.Fchown(int(f.Fd()), -1, int(old.Gid)) // a group of the user's own it may set
	}
	return err
}

// overwrite copies the complete new content over the old file. Its space is
// reserved first, so that what is missing is known before a byte is lost.
func (w *writing) overwrite(from *os.File) (Info, error) {
	to, err := child(w.p.dir, w.p.name, unix.O_RDWR, 0)
	if err != nil {
		return Info{}, fail(opWrite, w.path, err)
	}
	defer to.Close()
	if _, err := regular(opWrite, w.path, to); err != nil {
		return Info{}, err
	}
	st, err := fstat(from)
	if err != nil {
		return Info{}, fail(opWrite, w.path, err)
	}
	if grow := st.Size - w.old.Size; grow > 0 {
		if err := unix.Fallocate(int(to.Fd()), 0, w.old.Size, grow); err != nil && err != unix.EOPNOTSUPP {
			_ = unix.Ftruncate(int(to.Fd()), w.old.Size)
			return Info{}, fail(opWrite, w.path, err)
		}
	}
	if _, err := from.Seek(0, io.SeekStart); err != nil {
		return Info{}, fail(opWrite, w.path, errno(err))
	}
	w.r = &source{ctx: context.WithoutCancel(w.r.ctx), r: from} // bounded: half a file is worse than a late answer
	if err := w.copy(to, nil); err != nil {
		return Info{}, err
	}
	if err := unix.Ftruncate(int(to.Fd()), st.Size); err != nil {
		return Info{}, fail(opWrite, w.path, err)
	}
	if err := w.attributes(to); err != nil {
		return Info{}, fail(opWrite, w.path, err)
	}
	return w.info(to)
}

func (w *writing) info(f *os.File) (Info, error) {
	st, err := fstat(f)
	if err != nil {
		return Info{}, fail(opWrite, w.path, err)
	}
	return w.l.info(w.path, &st), nil
}
