package fuse

import (
	"fmt"
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// journal is shared memory that outlives this process. The kernel's messages are
// read into it, so that who comes after a process that was killed finds those
// that it had taken and not answered: the kernel gives none of them again.
//
// The first page has the state of each slot; the slots follow.
type journal struct {
	m []byte
}

const (
	slots     = 64
	slotSize  = 8 << 10 // what the kernel wants to have room for
	slotsFrom = 4 << 10
)

const (
	slotFree = iota
	slotTaken
)

// NewJournal makes one.
func NewJournal() (*os.File, error) {
	fd, err := unix.MemfdCreate("dsec-journal", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	f := os.NewFile(uintptr(fd), "journal")
	if err := f.Truncate(slotsFrom + slots*slotSize); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

func openJournal(f *os.File) (*journal, error) {
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if st.Size() != slotsFrom+slots*slotSize {
		return nil, fmt.Errorf("journal of %d bytes", st.Size())
	}
	m, err := unix.Mmap(int(f.Fd()), 0, int(st.Size()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, os.NewSyscallError("mmap", err)
	}
	return &journal{m: m}, nil
}

func (j *journal) close() { _ = unix.Munmap(j.m) }

func (j *journal) state(i int) *uint32 { return (*uint32)(unsafe.Pointer(&j.m[4*i])) }

func (j *journal) slot(i int) []byte { return j.m[slotsFrom+i*slotSize:][:slotSize] }

// take readies a slot to be read into: from now on, a message in it counts.
func (j *journal) take(i int) []byte {
	b := j.slot(i)
	le.PutUint32(b, 0)
	atomic.StoreUint32(j.state(i), slotTaken)
	return b
}

func (j *journal) free(i int) { atomic.StoreUint32(j.state(i), slotFree) }

// left are the slots with messages that nobody answered, or nobody noted it.
func (j *journal) left() (is []int) {
	for i := range slots {
		if atomic.LoadUint32(j.state(i)) != slotTaken {
			continue
		}
		if le.Uint32(j.slot(i)) == 0 { // its reader was killed before a message came
			j.free(i)
			continue
		}
		is = append(is, i)
	}
	return is
}
