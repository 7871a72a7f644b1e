package files

import (
	"context"
	"io"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// moveAcross moves an entry to another file system: a tar of it is unpacked
// beside the target, which is then replaced by a rename.
func (l *Local) moveAcross(ctx context.Context, src, dst place) error {
	stage := tempName()
	if err := makeDir(dst.dir, stage, 0o700, owner{}); err != nil {
		return fail(opMove, dst.path, err)
	}
	into, err := child(dst.dir, stage, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return fail(opMove, dst.path, err)
	}
	defer into.Close()
	undo := context.WithoutCancel(ctx) // what was begun here is ours to clean up
	defer func() { _ = removeTree(undo, dst.dir, stage, 0) }()
	pr, pw := io.Pipe()
	done := make(chan error, 1)
	go func() {
		err := l.packOne(ctx, src, pw)
		pw.CloseWithError(err)
		done <- err
	}()
	u := unpacking{ctx: ctx, l: l, asked: dst.path, dir: into, src: &source{ctx: ctx, r: pr}}
	err = u.run()
	pr.CloseWithError(io.ErrClosedPipe)
	if perr := <-done; perr != nil && (err == nil || dsec.ClassOf(err) == dsec.Canceled) {
		err = perr
	}
	if err != nil {
		return err
	}
	err = unix.Renameat2(int(into.Fd()), src.name, int(dst.dir.Fd()), dst.name, 0)
	if err != nil {
		return fail(opMove, dst.path, err)
	}
	err = unix.Unlinkat(int(src.dir.Fd()), src.name, 0)
	if err == unix.EISDIR {
		err = removeTree(ctx, src.dir, src.name, 0)
	}
	return fail(opMove, src.path, err)
}

// packOne writes a tar of one entry of a directory and all below it.
func (l *Local) packOne(ctx context.Context, p place, w io.Writer) error {
	k := packing{ctx: ctx, l: l, op: opMove, asked: p.path, t: newTarWriter(w)}
	if err := k.entry(p.dir, p.name, "", 0); err != nil {
		return err
	}
	return k.finish()
}
