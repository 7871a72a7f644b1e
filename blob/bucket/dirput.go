package bucket

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
)

const writeBuffer = 256 << 10

// Put writes aside, syncs, and names. The body is read here; what writes to the
// file system has a buffer of its own to be left behind with.
func (d *dir) Put(ctx context.Context, key string, r io.Reader, o blob.PutOptions) error {
	if err := blob.CheckKey(key); err != nil {
		return err
	}
	name := path.Join(aside, dsec.Random(20))
	f, err := await(ctx, d, func() (*os.File, error) { return d.create(name) }, func(f *os.File) { d.giveUp(f, name) })
	if err != nil {
		return classify(writeOp, key, withoutPath(err))
	}
	w := &draft{d: d, f: f, name: name, key: key, absent: o.IfAbsent}
	if err = w.fill(ctx, r); err == nil {
		err = w.call(ctx, w.publish)
	}
	if !w.left {
		d.tidy(ctx, func() { d.giveUp(f, name) })
	}
	if err != nil {
		return classify(writeOp, key, withoutPath(err))
	}
	return nil
}

func (d *dir) create(name string) (*os.File, error) {
	const flags = os.O_WRONLY | os.O_CREATE | os.O_EXCL
	f, err := d.root.OpenFile(name, flags, 0o600)
	if errors.Is(err, fs.ErrNotExist) {
		if err := d.root.Mkdir(aside, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, err
		}
		f, err = d.root.OpenFile(name, flags, 0o600)
	}
	return f, err
}

// giveUp removes a file that has no name of its own, if it is still there.
func (d *dir) giveUp(f *os.File, name string) {
	f.Close()
	_ = d.root.Remove(name)
}

// draft is an object being written.
type draft struct {
	d         *dir
	f         *os.File
	name, key string
	absent    bool
	left      bool // a call was left behind
}

// call runs a step on the file system. If it is left behind, it is what closes
// the file, when it returns.
func (w *draft) call(ctx context.Context, do func() error) error {
	type outcome struct{ err error }
	out, err := await(ctx, w.d, func() (outcome, error) { return outcome{do()}, nil }, func(outcome) { w.d.giveUp(w.f, w.name) })
	if err == nil {
		return out.err
	}
	_, not := errors.AsType[notBegun](err)
	w.left = !not
	return err
}

func (w *draft) fill(ctx context.Context, r io.Reader) error {
	buf := make([]byte, writeBuffer)
	for {
		n, rerr := r.Read(buf)
		if n > 0 {
			if err := w.call(ctx, func() error { _, err := w.f.Write(buf[:n]); return err }); err != nil {
				return err
			}
		}
		if rerr == io.EOF {
			return nil
		}
		if rerr != nil {
			return rerr
		}
	}
}

func (w *draft) publish() error {
	if err := w.f.Sync(); err != nil {
		return err
	}
	dir := path.Dir(w.key)
	if err := w.d.root.MkdirAll(dir, 0o700); err != nil {
		if errors.Is(err, fs.ErrExist) {
			err = unix.ENOTDIR // a part of the key is a file
		}
		return err
	}
	name := w.d.replace
	if w.absent {
		name = w.d.link
	}
	if err := name(w.f, w.name, w.key); err != nil {
		return err
	}
	return w.d.sync(dir)
}

func (d *dir) replace(_ *os.File, from, to string) error { return d.root.Rename(from, to) }

// link names a file unless the name is taken, in one step for all machines that
// share the directory: by a rename that does not replace or, where a file system
// has none, by a hard link.
func (d *dir) link(f *os.File, from, to string) error {
	err := d.renameNew(from, to)
	if !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOSYS) && !errors.Is(err, unix.EOPNOTSUPP) {
		return taken(err, to)
	}
	return d.byLink(f, from, to)
}

func (d *dir) byLink(f *os.File, from, to string) error {
	err := d.root.Link(from, to)
	if errors.Is(err, fs.ErrExist) && links(f) == 2 {
		return nil // the answer to a first request was lost, and this is the one to the second
	}
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOSYS) {
		return dsec.Errorf(dsec.Unsupported, writeOp, to, "this file system has neither renameat2 with RENAME_NOREPLACE nor hard links")
	}
	return taken(err, to)
}

func taken(err error, key string) error {
	if errors.Is(err, fs.ErrExist) {
		return dsec.Errorf(dsec.AlreadyExists, writeOp, key, "the key is taken")
	}
	return err
}

func links(f *os.File) uint64 {
	st, err := f.Stat()
	if err != nil {
		return 0
	}
	return uint64(st.Sys().(*syscall.Stat_t).Nlink)
}

func (d *dir) renameNew(from, to string) error {
	src, err := d.root.Open(path.Dir(from))
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := d.root.Open(path.Dir(to))
	if err != nil {
		return err
	}
	defer dst.Close()
	return unix.Renameat2(int(src.Fd()), path.Base(from), int(dst.Fd()), path.Base(to), unix.RENAME_NOREPLACE)
}

// sync makes the names that lead to a directory's files durable.
func (d *dir) sync(dir string) error {
	for ; ; dir = path.Dir(dir) {
		f, err := d.root.Open(dir)
		if err != nil {
			return err
		}
		if err := errors.Join(f.Sync(), f.Close()); err != nil {
			return err
		}
		if dir == "." {
			return nil
		}
	}
}
