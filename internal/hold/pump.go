package hold

import (
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/process"
)

// drainMost is how long a result waits for what is left in the pipes.
const drainMost = 100 * time.Millisecond

const (
	pumpBuffer = 64 << 10
	widePipe   = 512 << 10
)

var pumpBuffers = sync.Pool{New: func() any { b := make([]byte, pumpBuffer); return &b }}

// pump moves what a command writes into its spool. After the command's end it
// takes what the pipe held at that moment; later output of processes that were
// left behind is read and thrown away, so that they neither block nor die.
type pump struct {
	e   *execution
	r   *os.File
	w   *process.SpoolWriter
	pty bool

	seen    atomic.Int64  // bytes read, which a slow follower may keep out of the spool for a while
	drained chan struct{} // closed when the spool has all of the command's output
	stop    chan struct{} // closed by abandon: wait for no follower
	once    sync.Once
}

func newPump(e *execution, r *os.File, w *process.SpoolWriter, pty bool) *pump {
	p := &pump{e: e, r: r, w: w, pty: pty, drained: make(chan struct{}), stop: make(chan struct{})}
	go p.run()
	return p
}

// finish says that the command has ended; what is in the pipe now is the rest.
func (p *pump) finish() {
	_ = p.r.SetReadDeadline(time.Unix(1, 0)) // wakes run
}

// abandon stops waiting for followers.
func (p *pump) abandon() { p.once.Do(func() { close(p.stop) }) }

// summary is what the result tells, output still on its way included.
func (p *pump) summary() process.OutputSummary {
	total := p.seen.Load()
	select {
	case <-p.drained:
	default:
		total += p.unread()
	}
	h := p.w.Header()
	h.Total = max(h.Total, total)
	return h.Summary()
}

// unread is how much the pipe holds.
func (p *pump) unread() (n int64) {
	rc, err := p.r.SyscallConn()
	if err != nil {
		return 0
	}
	_ = rc.Control(func(fd uintptr) {
		if v, err := unix.IoctlGetInt(int(fd), unix.TIOCINQ); err == nil {
			n = int64(v)
		}
	})
	return n
}

func (p *pump) run() {
	rc, err := p.r.SyscallConn()
	if err != nil {
		p.e.sb.s.log.Error("pump", "exec", p.e.spec.Spec.ID, "error", err)
		return
	}
	ended, wide := false, p.pty
	for {
		n, err := p.move(rc.Read, -1)
		if !wide && n == pumpBuffer {
			wide = true
			p.widen(rc.Control)
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			break
		}
		if n == 0 || err != nil {
			ended = true
			break
		}
	}
	if !ended {
		_ = p.r.SetReadDeadline(time.Time{})
		ended = p.drain(rc.Control)
	}
	p.w.End()
	close(p.drained)
	_ = p.w.Close()
	if !ended {
		p.discard(rc.Read)
	}
	if !p.pty { // a terminal's master is closed by the execution
		_ = p.r.Close()
	}
}

// widen gives a command that writes much a larger pipe: fewer turns for the
// same bytes. It is refused where the user's pipes are at their limit.
func (p *pump) widen(control func(func(uintptr)) error) {
	_ = control(func(fd uintptr) { _, _ = unix.FcntlInt(fd, unix.F_SETPIPE_SZ, widePipe) })
}

// drain takes what is in the pipe now.
func (p *pump) drain(once func(func(uintptr)) error) (ended bool) {
	rest := int64(process.DefaultKeep)
	if !p.pty {
		rest = p.unread()
	}
	try := func(f func(uintptr) bool) error { return once(func(fd uintptr) { f(fd) }) }
	for rest > 0 {
		n, err := p.move(try, rest)
		if err != nil || n == 0 {
			return err == nil || !errors.Is(err, unix.EAGAIN)
		}
		rest -= int64(n)
	}
	return false
}

func (p *pump) discard(wait func(func(uintptr) bool) error) {
	for {
		var n int
		var rerr error
		err := wait(func(fd uintptr) bool {
			buf := pumpBuffers.Get().(*[]byte)
			defer pumpBuffers.Put(buf)
			n, rerr = unix.Read(int(fd), *buf)
			return rerr != unix.EAGAIN
		})
		if rerr == unix.EINTR {
			continue
		}
		if err != nil || rerr != nil || n <= 0 {
			return
		}
	}
}

// move reads once, at most limit bytes if that is not negative, and writes it
// to the spool. 0 bytes without an error is the end of the stream.
func (p *pump) move(wait func(func(uintptr) bool) error, limit int64) (int, error) {
	var n int
	var rerr error
	var buf *[]byte
	err := wait(func(fd uintptr) bool {
		buf = pumpBuffers.Get().(*[]byte)
		b := *buf
		if limit >= 0 && limit < int64(len(b)) {
			b = b[:limit]
		}
		for {
			n, rerr = unix.Read(int(fd), b)
			if rerr != unix.EINTR {
				break
			}
		}
		if rerr != nil || n <= 0 {
			pumpBuffers.Put(buf)
			buf = nil
		}
		return rerr != unix.EAGAIN
	})
	switch {
	case err != nil:
		return 0, err
	case rerr == unix.EIO && p.pty: // every process has closed the terminal
		return 0, nil
	case rerr != nil:
		return 0, rerr
	case buf == nil:
		return 0, nil
	}
	defer pumpBuffers.Put(buf)
	p.seen.Add(int64(n))
	p.w.Write((*buf)[:n], p.stop)
	p.e.wrote(p.w)
	return n, nil
}

// wrote enforces on_limit.
func (e *execution) wrote(w *process.SpoolWriter) {
	if e.spec.Spec.OnLimit != process.Kill {
		return
	}
	if h := w.Header(); h.Total > h.Head+h.Tail {
		e.end(process.OutputLimit)
	}
}

// pollableFile returns f's descriptor as a file that the runtime waits for.
func pollableFile(f *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(uintptr(fdOf(f)), unix.F_DUPFD_CLOEXEC, 5)
	name := f.Name()
	_ = f.Close()
	if err != nil {
		return nil, os.NewSyscallError("dup", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		_ = unix.Close(fd)
		return nil, os.NewSyscallError("fcntl", err)
	}
	return os.NewFile(uintptr(fd), name), nil
}
