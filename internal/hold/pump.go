package hold

import (
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
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

// pumpStage is how far a pump is.
type pumpStage string

const (
	pumpReads    pumpStage = "reading"
	pumpDrains   pumpStage = "draining"   // the command has ended: what the pipe held then
	pumpDiscards pumpStage = "discarding" // what others still write
	pumpDone     pumpStage = "done"
)

// pump moves what a command writes into its spool. After the command's end it
// takes what the pipe held at that moment; later output of processes that were
// left behind is read and thrown away, so that they neither block nor die.
type pump struct {
	s   *server
	e   *execution // nil if there is only something to discard
	r   *os.File
	w   *process.SpoolWriter
	pty bool

	seen    atomic.Int64  // bytes read, which a slow follower may keep out of the spool for a while
	drained chan struct{} // closed when the spool has all of the command's output
	stop    chan struct{} // closed by abandon: wait for no follower
	once    sync.Once

	// Of the goroutine that runs, or of who starts it.
	pending []byte // read and not yet in the spool, because the pump was paused
	rest    int64  // draining: bytes to read
	wide    bool

	mu       sync.Mutex
	stage    pumpStage // written by the goroutine that runs
	on       bool      // it runs
	finished bool      // the command has ended
	hung     bool      // a terminal: close it when its output is in the spool
	paused   bool
	halt     chan struct{} // closed by pause
	places   []place       // of followers from before an upgrade
}

func newPump(e *execution, r *os.File, w *process.SpoolWriter, pty bool) *pump {
	p := &pump{s: e.sb.s, e: e, r: r, w: w, pty: pty, stage: pumpReads, drained: make(chan struct{}), stop: make(chan struct{})}
	p.s.add(p)
	return p
}

func (s *server) add(p *pump) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pumps[p] = struct{}{}
}

// start lets it run, also after a pause.
func (p *pump) start() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.paused || p.halt == nil {
		p.paused, p.halt = false, make(chan struct{})
		p.deadlineLocked()
	}
	if !p.on {
		p.on = true
		p.s.pumping.enter()
		go p.run()
	}
}

// deadlineLocked lets a wait for output end at once where something else is to
// be done.
func (p *pump) deadlineLocked() {
	t := never
	if p.paused || p.finished && p.stage == pumpReads {
		t = aLongTimeAgo
	}
	_ = p.r.SetReadDeadline(t)
}

// pause makes it stop where it is; nothing that was read is lost.
func (p *pump) pause() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.paused {
		p.paused = true
		close(p.halt)
		p.deadlineLocked()
	}
}

// finish says that the command has ended; what is in the pipe now is the rest.
func (p *pump) finish() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.finished = true
	p.deadlineLocked()
}

// hangUp closes a terminal once its output is in the spool: what still uses it
// gets SIGHUP, as when a terminal window is closed.
func (p *pump) hangUp() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.hung = true
	p.hangUpLocked()
}

func (p *pump) hangUpLocked() {
	if p.hung && (p.stage == pumpDiscards || p.stage == pumpDone) {
		_ = p.r.Close()
	}
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
	defer p.s.pumping.leave()
	rc, err := p.r.SyscallConn()
	if err != nil {
		p.s.log.Error("pump", "error", err)
		return
	}
	for {
		halt := p.halted()
		if len(p.pending) > 0 {
			p.put(p.pending, halt)
		}
		if len(p.pending) == 0 {
			p.step(rc, halt)
		}
		if p.stage == pumpDone || p.off() {
			break
		}
	}
	if p.stage != pumpDone {
		return
	}
	if !p.pty { // a terminal takes input until the command has ended
		_ = p.r.Close()
	}
	p.s.mu.Lock()
	defer p.s.mu.Unlock()
	delete(p.s.pumps, p)
}

// step does what its stage is about, until the next one or a pause.
func (p *pump) step(rc syscall.RawConn, halt <-chan struct{}) {
	switch p.stage {
	case pumpReads:
		p.read(rc, halt)
	case pumpDrains:
		p.drain(rc.Control, halt)
	case pumpDiscards:
		p.discard(rc.Read)
	}
}

func (p *pump) halted() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.halt
}

// off is true if it must stop for a pause.
func (p *pump) off() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.paused {
		p.on = false
	}
	return p.paused
}

func (p *pump) to(s pumpStage) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stage = s
	p.deadlineLocked()
	p.hangUpLocked()
}

func (p *pump) read(rc syscall.RawConn, halt <-chan struct{}) {
	for {
		n, err := p.move(rc.Read, -1, halt)
		if n == pumpBuffer && !p.wide && !p.pty {
			p.wide = true
			p.widen(rc.Control)
		}
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			p.mu.Lock()
			finished := p.finished
			p.mu.Unlock()
			if finished {
				if p.rest = process.DefaultKeep; !p.pty {
					p.rest = p.unread()
				}
				p.to(pumpDrains)
			}
			return
		case n == 0 || err != nil:
			p.end(pumpDone)
			return
		case len(p.pending) > 0:
			return
		}
	}
}

// end closes the spool.
func (p *pump) end(next pumpStage) {
	p.w.End()
	close(p.drained)
	_ = p.w.Close()
	p.to(next)
}

// widen gives a command that writes much a larger pipe: fewer turns for the
// same bytes. It is refused where the user's pipes are at their limit.
func (p *pump) widen(control func(func(uintptr)) error) {
	_ = control(func(fd uintptr) { _, _ = unix.FcntlInt(fd, unix.F_SETPIPE_SZ, widePipe) })
}

// drain takes what was in the pipe.
func (p *pump) drain(once func(func(uintptr)) error, halt <-chan struct{}) {
	try := func(f func(uintptr) bool) error { return once(func(fd uintptr) { f(fd) }) }
	for p.rest > 0 {
		n, err := p.move(try, p.rest, halt)
		p.rest -= int64(n)
		switch {
		case errors.Is(err, unix.EAGAIN):
			p.end(pumpDiscards)
			return
		case err != nil || n == 0:
			p.end(pumpDone)
			return
		case len(p.pending) > 0:
			return
		}
	}
	p.end(pumpDiscards)
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
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return
		case err == nil && rerr == unix.EINTR:
		case err != nil || rerr != nil || n <= 0:
			p.to(pumpDone)
			return
		}
	}
}

// move reads once, at most limit bytes if that is not negative, and writes it
// to the spool. 0 bytes without an error is the end of the stream.
func (p *pump) move(wait func(func(uintptr) bool) error, limit int64, halt <-chan struct{}) (int, error) {
	var n int
	var rerr error
	var buf *[]byte
	err := wait(func(fd uintptr) bool {
		buf = pumpBuffers.Get().(*[]byte)
		b := *buf
		if limit >= 0 && limit < int64(len(b)) {
			b = b[:limit]
		}
		rerr = noEINTR(func() (err error) {
			n, err = unix.Read(int(fd), b)
			return err
		})
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
	p.put((*buf)[:n], halt)
	return n, nil
}

// put writes to the spool, and keeps what did not get there before a pause.
func (p *pump) put(b []byte, halt <-chan struct{}) {
	p.pending = append([]byte(nil), p.w.WriteUntil(b, p.stop, halt)...)
	p.e.wrote(p.w)
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
