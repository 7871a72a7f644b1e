package agent

import (
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/process"
)

const (
	drainMost  = 100 * time.Millisecond // that a result waits for what is left in the pipes
	pumpBuffer = 64 << 10
	widePipe   = 512 << 10
)

var aLongTimeAgo = time.Unix(1, 0)

// pump moves what a command writes into its spool. After the command's end it
// takes what the pipe held at that moment; what others write later is read and
// thrown away, so that they neither block nor die.
type pump struct {
	e   *execution
	r   *os.File
	w   *process.SpoolWriter
	pty bool

	seen    atomic.Int64  // bytes read, which a slow follower may keep out of the spool for a while
	drained chan struct{} // closed when the spool has all of the command's output
	stop    chan struct{} // closed by abandon: wait for no follower
	once    sync.Once
	ending  chan struct{} // closed when the command has ended
}

func newPump(e *execution, r *os.File, w *process.SpoolWriter, pty bool) *pump {
	p := &pump{e: e, r: r, w: w, pty: pty, drained: make(chan struct{}), stop: make(chan struct{}), ending: make(chan struct{})}
	go p.run()
	return p
}

// finish says that the command has ended.
func (p *pump) finish() {
	close(p.ending)
	_ = p.r.SetReadDeadline(aLongTimeAgo)
}

// abandon stops waiting for followers.
func (p *pump) abandon() { p.once.Do(func() { close(p.stop) }) }

func (p *pump) run() {
	buf := make([]byte, pumpBuffer)
	last := p.read(buf)
	if !last {
		p.drain(buf)
	}
	p.w.End()
	close(p.drained)
	_ = p.w.Close()
	if p.pty {
		<-p.ending
		p.hangUp()
		return
	}
	if !last {
		_ = p.r.SetReadDeadline(time.Time{})
		for {
			if n, err := p.r.Read(buf); n == 0 || err != nil {
				break
			}
		}
	}
	_ = p.r.Close()
}

// hangUp closes a terminal: what still uses it gets SIGHUP, as when a terminal
// window is closed.
func (p *pump) hangUp() {
	p.e.mu.Lock()
	p.e.input = nil
	p.e.mu.Unlock()
	_ = p.r.Close()
}

// read returns true at the end of the stream and false at the command's.
func (p *pump) read(buf []byte) (last bool) {
	wide := p.pty
	for {
		n, err := p.r.Read(buf)
		if n > 0 {
			p.put(buf[:n])
		}
		if n == len(buf) && !wide { // fewer turns for the same bytes
			wide = true
			p.control(func(fd int) { _, _ = unix.FcntlInt(uintptr(fd), unix.F_SETPIPE_SZ, widePipe) })
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return false
		}
		if err != nil {
			return true
		}
	}
}

// drain takes what is in the pipe now.
func (p *pump) drain(buf []byte) {
	rest := int64(process.DefaultKeep)
	if !p.pty {
		rest = p.unread()
	}
	for rest > 0 {
		n, err := 0, error(nil)
		p.control(func(fd int) { n, err = unix.Read(fd, buf[:min(rest, int64(len(buf)))]) })
		if err == unix.EINTR {
			continue
		}
		if err != nil || n <= 0 {
			return
		}
		rest -= int64(n)
		p.put(buf[:n])
	}
}

func (p *pump) control(f func(fd int)) {
	if rc, err := p.r.SyscallConn(); err == nil {
		_ = rc.Control(func(fd uintptr) { f(int(fd)) }) // closed: nothing to do
	}
}

func (p *pump) unread() (n int64) {
	p.control(func(fd int) {
		if v, err := unix.IoctlGetInt(fd, unix.TIOCINQ); err == nil {
			n = int64(v)
		}
	})
	return n
}

// put writes to the spool and enforces on_limit.
func (p *pump) put(b []byte) {
	p.seen.Add(int64(len(b)))
	p.w.Write(b, p.stop)
	if p.e.spec.OnLimit == process.Kill {
		if h := p.w.Header(); h.Total > h.Head+h.Tail {
			p.e.end(process.OutputLimit)
		}
	}
}

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

// attend waits for the end of the main process and makes the result.
func (e *execution) attend() {
	end := <-e.end_
	wall := time.Since(e.begun)
	held := e.clock.stop()
	limit := time.NewTimer(drainMost)
	defer limit.Stop()
	for _, p := range e.out {
		if p != nil {
			p.finish()
		}
	}
	for _, p := range e.out {
		if p == nil {
			continue
		}
		select {
		case <-p.drained:
		case <-limit.C:
			limit.Reset(0)
		}
	}
	e.result(end, wall, held)
	e.mu.Lock()
	e.over = true
	input := e.input
	e.input = nil
	e.mu.Unlock()
	if e.spec.PTY == nil && input != nil {
		_ = input.Close()
	}
	_ = e.pidfd.Close()
	e.a.leave(e.group)
	close(e.done)
}

func (e *execution) result(end ending, wall, held time.Duration) {
	r := process.Result{Status: process.Exited, ExitCode: end.code, Signal: end.signal, Started: e.begun.Round(0), Wall: wall, Held: held,
		CPU: max(end.cpu, e.group.cpu()), Throttle: max(e.sb.group.throttled()-e.throttle, 0), Stdout: e.out[0].summary()}
	if end.signal != 0 {
		r.ExitCode = 128 + end.signal
	}
	e.mu.Lock()
	cause := e.cause
	e.mu.Unlock()
	byKill := end.signal == int(unix.SIGKILL)
	switch {
	case cause == process.OutputLimit, cause != "" && byKill:
		r.Status = cause
	case byKill && e.sb.dying():
		r.Status = process.Killed
	}
	if e.sb.oomKills() > e.oom {
		r.OOM, r.OOMLimit, r.OOMPeak = true, e.sb.memoryLimit(), e.sb.memoryPeak()
	}
	if e.out[1] != nil {
		r.Stderr = e.out[1].summary()
	}
	e.res = r
}
