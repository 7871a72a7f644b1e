// Package journal is shared memory that outlives a process which reads messages
// of the kernel into it, so that who comes after a process that was killed finds
// those that it had taken and not answered: the kernel gives none of them again.
//
// A journal is slots of one size. A message is read into a slot that was taken;
// it must begin with its length, 32 bits that are not 0. Its slot is freed when
// it has been answered. Who is killed between an answer and that leaves a
// message that is answered twice, which the kernel refuses; it never leaves one
// that nobody knows.
//
// One process at a time has a journal open: another waits until the first has
// ended with all its threads, which is later than it was killed. So a message
// cannot arrive behind the back of who looked for it.
package journal

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

const page = 4 << 10

// Shape of a journal.
type Shape struct {
	Slots int
	Size  int // bytes of a slot, a multiple of 8
}

// head is what is before the slots: the state of each.
func (s Shape) head() int { return (4*s.Slots + page - 1) / page * page }

func (s Shape) bytes() int { return s.head() + s.Slots*s.Size }

const (
	free = iota
	taken
)

// Journal is one that is open. Different slots may be used concurrently.
type Journal struct {
	m     []byte
	file  *os.File
	shape Shape
}

// New makes the memory of one.
func New(s Shape) (*os.File, error) {
	fd, err := unix.MemfdCreate("dsec-journal", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	f := os.NewFile(uintptr(fd), "journal")
	if err := f.Truncate(int64(s.bytes())); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// Open maps one, when nobody else has it: Unavailable if ctx ends before. The
// file stays its owner's, who must not close it, nor another descriptor of it,
// before the Journal: that would let others in.
func Open(ctx context.Context, f *os.File, s Shape) (*Journal, error) {
	const op = "open journal"
	st, err := f.Stat()
	if err != nil {
		return nil, dsec.E(dsec.Internal, op, "", err)
	}
	if st.Size() != int64(s.bytes()) {
		return nil, dsec.Errorf(dsec.Invalid, op, "", "%d bytes, not %d", st.Size(), s.bytes())
	}
	if err := await(ctx, f); err != nil {
		return nil, dsec.E(dsec.Unavailable, op, "", err)
	}
	// All pages at once: a page that had to be found while a message is copied
	// into it could be refused to a process that is being killed.
	m, err := unix.Mmap(int(f.Fd()), 0, s.bytes(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE)
	if err != nil {
		return nil, dsec.E(dsec.Internal, op, "", errors.Join(os.NewSyscallError("mmap", err), lock(f, unix.F_UNLCK)))
	}
	return &Journal{m: m, file: f, shape: s}, nil
}

// await takes the lock. A process that is being killed has it a little longer.
func await(ctx context.Context, f *os.File) error {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		err := lock(f, unix.F_WRLCK)
		if !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EACCES) {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("another process has it: %w", err)
		}
	}
}

// lock is one of the process, not of the descriptor, which others have too.
func lock(f *os.File, kind int16) error {
	return unix.FcntlFlock(f.Fd(), unix.F_SETLK, &unix.Flock_t{Type: kind})
}

// Close unmaps it and lets others in.
func (j *Journal) Close() {
	_ = unix.Munmap(j.m)
	_ = lock(j.file, unix.F_UNLCK)
}

func (j *Journal) state(i int) *uint32 { return (*uint32)(unsafe.Pointer(&j.m[4*i])) }

func (j *Journal) length(i int) *uint32 {
	return (*uint32)(unsafe.Pointer(&j.m[j.shape.head()+i*j.shape.Size]))
}

// Slot is the memory of a slot.
func (j *Journal) Slot(i int) []byte {
	return j.m[j.shape.head()+i*j.shape.Size:][:j.shape.Size:j.shape.Size]
}

// Take readies a slot to be read into: from now on, a message in it counts.
func (j *Journal) Take(i int) []byte {
	b := j.Slot(i)
	clear(b)
	atomic.StoreUint32(j.state(i), taken)
	return b
}

// Free says that what is in the slot was answered.
func (j *Journal) Free(i int) { atomic.StoreUint32(j.state(i), free) }

// Left are the slots with messages that nobody answered, or nobody noted it.
func (j *Journal) Left() (is []int) {
	for i := range j.shape.Slots {
		if atomic.LoadUint32(j.state(i)) == free {
			continue
		}
		if atomic.LoadUint32(j.length(i)) == 0 { // its reader was killed before a message came
			j.Free(i)
			continue
		}
		is = append(is, i)
	}
	return is
}

// Receive reads messages of the kernel from a file (see Pollable), each into a
// slot that is idle and not into more than room bytes of it, and passes the slot
// on, which who answers gives back to idle. It returns ctx's error when that ends,
// else the first of a read that was more than interrupted.
func (j *Journal) Receive(ctx context.Context, from *os.File, room int, idle chan int, taken func(slot int)) error {
	woken := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		_ = from.SetReadDeadline(past)
		close(woken)
	})
	defer func() {
		if !stop() {
			<-woken // else it could end who receives next
		}
	}()
	for {
		var i int
		select {
		case i = <-idle:
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		err := receive(from, j.Take(i)[:room])
		if err == nil {
			taken(i)
			continue
		}
		j.Free(i)
		idle <- i
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.EAGAIN) {
			return err
		}
	}
}

// receive reads one message. Of a file with an error the runtime says no more than
// that; the kernel knows which.
func receive(from *os.File, b []byte) error {
	_, err := from.Read(b)
	if _, ok := errors.AsType[unix.Errno](err); err == nil || ok || errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, os.ErrClosed) {
		return err
	}
	raw, rawErr := from.SyscallConn()
	if rawErr != nil {
		return err
	}
	again := err
	if raw.Control(func(fd uintptr) { _, again = unix.Read(int(fd), b) }) != nil || errors.Is(again, unix.EAGAIN) {
		return err
	}
	return again
}

// past is a deadline that ends a read at once.
var past = time.Unix(1, 0)

// Pollable readies what messages are read from: a read of it waits in the
// runtime, and ends when a deadline is set. Other processes have it too, and may
// have left it otherwise.
func Pollable(f *os.File) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var set error
	if err := raw.Control(func(fd uintptr) { set = unix.SetNonblock(int(fd), true) }); err != nil {
		return err
	}
	if set != nil {
		return set
	}
	return f.SetReadDeadline(time.Time{})
}
