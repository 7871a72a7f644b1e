package watch

import (
	"context"
	"errors"
	"os"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/audit"
)

// group is a fanotify group.
type group struct {
	file  *os.File
	hurry chan struct{} // has an element when somebody waits in settle

	mu      sync.Mutex
	idle    *sync.Cond // on mu: all that was read is handled, or nobody reads
	rounds  int
	reading bool
}

func openGroup(ctx context.Context, k audit.Keeper, name string, flags uint) (*group, error) {
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
	g := &group{file: os.NewFile(uintptr(fd), name), hurry: make(chan struct{}, 1)}
	g.idle = sync.NewCond(&g.mu)
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

const (
	eventBytes = 64 << 10
	linger     = 10 * time.Millisecond // until the next are read, where there were some a moment ago
)

// rest lets events come together: to be woken for each of a build costs several times
// what they do. After a pause the first is read at once, while who did it still runs.
func (g *group) rest(last time.Time) {
	if time.Since(last) > 2*linger {
		return
	}
	wait := time.NewTimer(linger)
	defer wait.Stop()
	select {
	case <-wait.C:
	case <-g.hurry:
	}
}

// start has read begin.
func (g *group) start() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.reading = true
}

// read hands out events until the group is closed here. It closes their files. Who
// waits in settle wakes it by a deadline.
func (g *group) read(take func(event), overflow func()) {
	buf := make([]byte, eventBytes)
	handle := func(n int) {
		each(buf[:max(0, n)], func(e event) {
			if e.mask&unix.FAN_Q_OVERFLOW != 0 {
				overflow()
				return
			}
			take(e)
			if e.fd >= 0 {
				_ = unix.Close(e.fd) // only looked at
			}
		})
	}
	var last time.Time
	for {
		n, err := g.file.Read(buf)
		if err == nil {
			handle(n)
			g.rest(last)
			last = time.Now()
			continue
		}
		woken := errors.Is(err, os.ErrDeadlineExceeded) && g.file.SetReadDeadline(time.Time{}) == nil
		for woken {
			if n = g.tryRead(buf); n <= 0 {
				break
			}
			handle(n)
		}
		g.mu.Lock()
		g.rounds++
		g.reading = woken
		g.mu.Unlock()
		g.idle.Broadcast()
		if !woken {
			return
		}
	}
}

// tryRead reads what is there now.
func (g *group) tryRead(buf []byte) (n int) {
	raw, err := g.file.SyscallConn()
	if err != nil {
		return 0
	}
	_ = raw.Control(func(fd uintptr) { n, _ = unix.Read(int(fd), buf) }) // nothing, or closed
	return n
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

// settle waits until the events there are have been handled: the reader, when it is
// woken, has none in its hands and takes all there is.
func (g *group) settle() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.reading || g.file.SetReadDeadline(time.Unix(1, 0)) != nil {
		return
	}
	select {
	case g.hurry <- struct{}{}:
	default:
	}
	for round := g.rounds; g.rounds == round && g.reading; {
		g.idle.Wait()
	}
}
