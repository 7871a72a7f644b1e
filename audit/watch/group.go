package watch

import (
	"context"
	"errors"
	"os"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// group is a fanotify group.
type group struct {
	file *os.File

	mu     sync.Mutex
	empty  *sync.Cond // on mu: it was seen empty, or is closed
	rounds int
	busy   bool
	closed bool
}

func openGroup(ctx context.Context, k Keeper, name string, flags uint) (*group, error) {
	f, err := k.Get(ctx, name)
	if errors.Is(err, dsec.NotFound.Err()) {
		if f, err = newGroup(name, flags); err == nil {
			err = k.Put(ctx, name, f)
		}
	}
	if err != nil {
		if f != nil {
			_ = f.Close() // useless
		}
		return nil, err
	}
	// Of a descriptor that does not block, and only of that, a File is made that waits in the poller.
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err == nil {
		err = unix.SetNonblock(fd, true)
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return nil, err
	}
	g := &group{file: os.NewFile(uintptr(fd), name)}
	g.empty = sync.NewCond(&g.mu)
	return g, nil
}

func newGroup(name string, flags uint) (*os.File, error) {
	fd, err := unix.FanotifyInit(flags|unix.FAN_CLOEXEC|unix.FAN_NONBLOCK, unix.O_RDONLY|unix.O_LARGEFILE|unix.O_CLOEXEC|unix.O_NONBLOCK|unix.O_NOATIME)
	if err != nil {
		return nil, os.NewSyscallError("fanotify_init", err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// mark adds the file system that something is in.
func (g *group) mark(at *os.File, events uint64) error {
	var err error
	raw, cerr := g.file.SyscallConn()
	if cerr != nil {
		return cerr
	}
	cerr = raw.Control(func(fd uintptr) {
		err = unix.FanotifyMark(int(fd), unix.FAN_MARK_ADD|unix.FAN_MARK_FILESYSTEM, events, int(at.Fd()), ".")
	})
	return errors.Join(cerr, os.NewSyscallError("fanotify_mark", err))
}

// event is one of the kernel's. fd is -1 in a group that tells names; info is what
// follows the fixed part.
type event struct {
	mask uint64
	fd   int
	pid  int
	info []byte
}

const eventBytes = 64 << 10

// read hands out events until the group is closed here. It closes their files.
func (g *group) read(take func(event), overflow func()) {
	buf := make([]byte, eventBytes)
	for {
		n, err := g.file.Read(buf)
		if err != nil {
			g.mu.Lock()
			g.closed = true
			g.mu.Unlock()
			g.empty.Broadcast()
			return
		}
		g.mu.Lock()
		g.busy = true
		g.mu.Unlock()
		each(buf[:n], func(e event) {
			if e.mask&unix.FAN_Q_OVERFLOW != 0 {
				overflow()
				return
			}
			take(e)
			if e.fd >= 0 {
				_ = unix.Close(e.fd) // only looked at
			}
		})
		if g.pending() == 0 {
			g.mu.Lock()
			g.busy, g.rounds = false, g.rounds+1
			g.mu.Unlock()
			g.empty.Broadcast()
		}
	}
}

const metadataSize = int(unsafe.Sizeof(unix.FanotifyEventMetadata{}))

// each cuts what was read into events.
func each(b []byte, take func(event)) {
	for len(b) >= metadataSize {
		m := (*unix.FanotifyEventMetadata)(unsafe.Pointer(&b[0]))
		size := int(m.Event_len)
		if size < metadataSize || size > len(b) || int(m.Metadata_len) > size {
			return
		}
		take(event{mask: m.Mask, fd: int(m.Fd), pid: int(m.Pid), info: b[m.Metadata_len:size]})
		b = b[size:]
	}
}

// pending is the number of bytes that wait to be read.
func (g *group) pending() (n int) {
	raw, err := g.file.SyscallConn()
	if err != nil {
		return 0
	}
	_ = raw.Control(func(fd uintptr) { n, _ = unix.IoctlGetInt(int(fd), unix.TIOCINQ) }) // closed: none
	return n
}

// settle waits until the events there are have been handled.
func (g *group) settle(stop <-chan struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for round := g.rounds; g.rounds == round && !g.closed && (g.busy || g.pending() > 0); {
		select {
		case <-stop:
			return
		default:
		}
		g.empty.Wait()
	}
}
