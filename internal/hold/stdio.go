package hold

import (
	"os"

	"golang.org/x/sys/unix"
)

// stdio is what the command's descriptors are connected to; theirs are closed
// after the start.
type stdio struct {
	theirs []*os.File
	in     *os.File
	out    [2]*os.File
}

func (o *stdio) closeTheirs() {
	for _, f := range o.theirs {
		if f.Name() == pipeName { // the null device is the hold's
			_ = f.Close()
		}
	}
}

func (o *stdio) closeOurs() {
	closeAll([]*os.File{o.in, o.out[0], o.out[1]})
}

const pipeName = "pipe"

// pipe makes a pipe of which the runtime waits for our end, which is the
// reading one if read is set.
func pipe(read bool) (ours, theirs *os.File, err error) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, os.NewSyscallError("pipe2", err)
	}
	if !read {
		p[0], p[1] = p[1], p[0]
	}
	if _, err := unix.FcntlInt(uintptr(p[0]), unix.F_SETFL, unix.O_NONBLOCK); err != nil { // it has no other flags
		_, _ = unix.Close(p[0]), unix.Close(p[1])
		return nil, nil, os.NewSyscallError("fcntl", err)
	}
	return os.NewFile(uintptr(p[0]), pipeName), os.NewFile(uintptr(p[1]), pipeName), nil
}

func (e *execution) connect() (o stdio, err error) {
	defer func() {
		if err != nil {
			o.closeTheirs()
			o.closeOurs()
		}
	}()
	if e.spec.Spec.PTY != nil {
		return o, nil
	}
	if e.spec.Spec.Stdin {
		w, r, err := pipe(false)
		if err != nil {
			return o, err
		}
		o.in, o.theirs = w, append(o.theirs, r)
	} else {
		o.theirs = append(o.theirs, e.sb.s.null)
	}
	for i := range o.out {
		r, w, err := pipe(true)
		if err != nil {
			return o, err
		}
		o.out[i], o.theirs = r, append(o.theirs, w)
	}
	return o, e.give(o.theirs)
}

// give makes pipes the user's, so that a command can open /dev/stdout again.
func (e *execution) give(theirs []*os.File) error {
	uid, gid := int(e.sb.spec.UIDBase+e.spec.UID), int(e.sb.spec.GIDBase+e.spec.GID)
	for _, f := range theirs {
		if f.Name() != pipeName {
			continue // the null device stays the host's
		}
		if err := f.Chown(uid, gid); err != nil {
			return err
		}
	}
	return nil
}
