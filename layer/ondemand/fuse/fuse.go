// Package fuse shows the data of a layer that are not here yet as a file whose
// reads wait until they are.
//
// A session is a mount whose root is the file, and the /dev/fuse descriptor on
// which the kernel asks for its bytes. Mount makes one; Serve answers. The
// descriptor and the journal are to be kept by a process that does not end: a
// reader waits while nobody serves, and gets all it asked for when somebody
// does again. When both are gone every read is an error (it fails closed).
//
// Serve returns when the last user of the mount is gone. It answers EIO for
// what cannot be had; the kernel asks again when somebody reads again.
package fuse

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/layer/ondemand/journal"
)

// Source has the bytes of the file.
type Source interface {
	Size() int64
	ReadAt(ctx context.Context, p []byte, off int64) (int, error)
}

// most is the largest read the kernel is told to make.
const most = 1 << 20

// Mount makes a session. The mount is attached nowhere; open its root to read.
func Mount() (dev, mount *os.File, err error) {
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, &os.PathError{Op: "open", Path: "/dev/fuse", Err: err}
	}
	mount, err = linux.NewFS("fuse").String("source", "dsec-layer").String("fd", strconv.Itoa(fd)).
		String("rootmode", "100400").String("user_id", "0").String("group_id", "0").String("max_read", strconv.Itoa(most)).
		Flag("ro").Flag("allow_other"). // a virtual machine's monitor reads, which is another user, and nobody else can get at it
		Mount(unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return nil, nil, errors.Join(err, unix.Close(fd))
	}
	// Only now: what waits for an event of a descriptor that belongs to no mount
	// is never told of one.
	return os.NewFile(uintptr(fd), "/dev/fuse"), mount, nil
}

// Session answers the reads of one mount.
type Session struct {
	dev  *os.File
	j    *journal.Journal
	src  Source
	busy sync.WaitGroup
	idle chan int // free slots

	mu    sync.Mutex
	reads map[uint64]context.CancelFunc // by unique, to be interrupted
}

// Serve answers until the mount is gone (nil) or ctx ends. It owns neither file,
// and begins when the process that served before has ended.
func Serve(ctx context.Context, dev, messages *os.File, src Source) error {
	if err := journal.Pollable(dev); err != nil {
		return dsec.E(dsec.Invalid, "serve layer", dev.Name(), err)
	}
	j, err := journal.Open(ctx, messages, shape)
	if err != nil {
		return err
	}
	s := &Session{dev: dev, j: j, src: src, idle: make(chan int, slots), reads: map[uint64]context.CancelFunc{}}
	ctx, cancel := context.WithCancel(ctx)
	defer func() {
		cancel()
		s.busy.Wait()
		j.Close()
	}()
	left := map[int]bool{}
	for _, i := range j.Left() {
		left[i] = true
		s.dispatch(ctx, i)
	}
	for i := range slots {
		if !left[i] {
			s.idle <- i
		}
	}
	return s.loop(ctx)
}

// loop returns nil when the mount is gone.
func (s *Session) loop(ctx context.Context) error {
	for {
		err := s.j.Receive(ctx, s.dev, slotSize, s.idle, func(i int) { s.dispatch(ctx, i) })
		switch {
		case errors.Is(err, unix.ENODEV): // unmounted
			return nil
		case errors.Is(err, unix.ENOENT): // taken back before it was read
		case ctx.Err() != nil:
			return ctx.Err()
		default:
			return fmt.Errorf("read request: %w", err)
		}
	}
}

// dispatch answers the message in a slot and frees the slot. Only reads wait
// for something.
func (s *Session) dispatch(ctx context.Context, i int) {
	r, err := parse(s.j.Slot(i))
	if err != nil || r.op != opRead {
		if err == nil {
			s.send(s.answer(&r))
		}
		s.done(i)
		return
	}
	s.busy.Add(1)
	one, cancel := context.WithCancel(ctx)
	s.mu.Lock()
	s.reads[r.unique] = cancel
	s.mu.Unlock()
	go func() {
		defer s.busy.Done()
		defer cancel()
		done := s.read(ctx, one, &r)
		s.mu.Lock()
		delete(s.reads, r.unique)
		s.mu.Unlock()
		if done {
			s.done(i)
		}
	}()
}

func (s *Session) done(i int) {
	s.j.Free(i)
	s.idle <- i
}

// send writes an answer. The kernel refuses those to requests that it has
// given up, or that were answered before this process began.
func (s *Session) send(b []byte) {
	if b != nil {
		_, _ = s.dev.Write(b)
	}
}
