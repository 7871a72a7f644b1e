package runtimetest

import (
	"context"
	"io"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/process"
)

const drain = 100 * time.Millisecond // for daemons that hold the output

// proc is one command of the fake.
type proc struct {
	b    *box
	spec process.Spec
	pid  int
	user user
	env  map[string]string
	cwd  string

	tree, main         context.Context // tree: the command and its background jobs; main: without them
	killTree, killMain context.CancelFunc
	out, err           *process.SpoolWriter // err is nil with a terminal
	outFile, errFile   *os.File
	in                 chan []byte
	inClosed           chan struct{}
	jobs               sync.WaitGroup // every goroutine
	background         sync.WaitGroup // those of "&"
	done               chan struct{}  // closed when res is final

	mu      sync.Mutex
	ignored map[int]bool
	why     process.Status // set by the first kill
	sig     int            // that ended the main process
	oom     bool
	size    process.Size
	closed  bool // stdin
	res     process.Result
	limit   int64 // bytes, when oom
	kept    bool  // spools are open
}

// prepare checks what the command itself can get wrong.
func (b *box) prepare(s process.Spec) (*proc, error) {
	name := s.User
	if name == "" {
		name = b.defaultUser()
	}
	u, err := b.fs.user(name)
	if err != nil {
		return nil, err
	}
	p := &proc{b: b, spec: s, user: u, env: b.environ(s, u), in: make(chan []byte), inClosed: make(chan struct{}),
		done: make(chan struct{}), ignored: map[int]bool{}, kept: true}
	if p.cwd, err = b.workdir(s, u); err != nil {
		return nil, err
	}
	if _, err := b.fs.lookPath(s.Argv[0], p.env["PATH"], p.cwd, u); err != nil {
		return nil, err
	}
	if s.PTY != nil {
		p.size = *s.PTY
	}
	if !s.Stdin {
		p.closed = true
		close(p.inClosed)
	}
	if p.out, p.outFile, err = newSpool(s); err != nil {
		return nil, err
	}
	if s.PTY == nil {
		if p.err, p.errFile, err = newSpool(s); err != nil {
			p.discard()
			return nil, err
		}
	}
	p.tree, p.killTree = context.WithCancel(context.Background())
	p.main, p.killMain = context.WithCancel(p.tree)
	return p, nil
}

func (b *box) workdir(s process.Spec, u user) (string, error) {
	dir := s.Cwd
	for _, d := range []string{b.req.Spec.Workdir, b.req.Layers.Config.Workdir, u.home, "/"} {
		if dir == "" {
			dir = d
		}
	}
	n, err := b.fs.lookup(u, dir, true)
	if err != nil {
		if s.Cwd != "" {
			return "", err
		}
		return "/", nil // a home that does not exist
	}
	if !n.isDir() {
		return "", dsec.E(dsec.NotADirectory, "enter directory", dir, nil)
	}
	return dir, nil
}

func newSpool(s process.Spec) (*process.SpoolWriter, *os.File, error) {
	fd, err := unix.MemfdCreate("fake output", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, nil, dsec.E(dsec.Internal, "make spool", s.ID, err)
	}
	f := os.NewFile(uintptr(fd), "fake output")
	w, err := process.NewSpoolWriter(f, s.Head, s.Tail)
	if err != nil {
		_ = f.Close() // nothing in it
	}
	return w, f, err
}

// discard undoes prepare.
func (p *proc) discard() {
	if p.killTree != nil {
		p.killTree()
	}
	p.closeSpools()
}

func (p *proc) closeSpools() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.kept {
		return
	}
	p.kept = false
	for _, w := range []*process.SpoolWriter{p.out, p.err} {
		if w != nil {
			w.End()
			_ = w.Close() // memory
		}
	}
}

// run starts the command. Its goroutines end with the tree.
func (p *proc) run() {
	began := time.Now()
	held := p.b.clock.heldUntilNow()
	if t := p.spec.Timeout; t > 0 {
		wall := time.AfterFunc(2*t+time.Minute, func() { p.kill(process.TimedOut) })
		p.jobs.Go(func() {
			if p.b.clock.sleep(p.main, t) == nil {
				p.kill(process.TimedOut)
			}
			wall.Stop()
		})
	}
	p.jobs.Go(func() {
		code := newShell(p).command(p.main, p.spec.Argv)
		p.killMain()
		p.drain()
		p.finish(code, began, held)
	})
}

// drain waits a little for background jobs, which hold the output too.
func (p *proc) drain() {
	idle := make(chan struct{})
	go func() { p.background.Wait(); close(idle) }()
	t := time.NewTimer(drain)
	defer t.Stop()
	select {
	case <-idle:
	case <-t.C:
	case <-p.tree.Done():
	}
}

func (p *proc) finish(code int, began time.Time, held time.Duration) {
	p.mu.Lock()
	r := process.Result{Status: process.Exited, ExitCode: code, Started: began, Wall: time.Since(began),
		CPU: time.Microsecond, Held: p.b.clock.heldUntilNow() - held}
	switch {
	case p.why != "":
		r.Status, r.ExitCode, r.Signal = p.why, 128+int(syscall.SIGKILL), int(syscall.SIGKILL)
	case p.sig != 0:
		r.ExitCode, r.Signal = 128+p.sig, p.sig
	}
	if p.oom {
		r.OOM, r.OOMLimit, r.OOMPeak = true, p.limit, p.limit
	}
	p.out.End()
	r.Stdout = p.out.Header().Summary()
	if p.err != nil {
		p.err.End()
		r.Stderr = p.err.Header().Summary()
	}
	p.res = r
	close(p.done)
	p.mu.Unlock()
	if p.spec.Main {
		p.b.mainEnded(r)
	}
}

func (p *proc) ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// kill ends the tree; the first reason counts.
func (p *proc) kill(why process.Status) {
	p.mu.Lock()
	if p.why == "" && p.sig == 0 && p.main.Err() == nil {
		p.why = why
	}
	p.mu.Unlock()
	p.killTree()
}

func (p *proc) oomKilled(limit int64) {
	p.mu.Lock()
	p.oom, p.limit = true, limit
	if p.sig == 0 && p.why == "" {
		p.sig = int(syscall.SIGKILL)
	}
	p.mu.Unlock()
	p.killMain()
}

// signal does what the default or an empty trap does.
func (p *proc) signal(sig syscall.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if sig == 0 || sig != syscall.SIGKILL && p.ignored[int(sig)] || p.main.Err() != nil {
		return
	}
	switch sig {
	case syscall.SIGCHLD, syscall.SIGWINCH, syscall.SIGCONT, syscall.SIGURG:
		return
	}
	if p.sig == 0 && p.why == "" {
		p.sig = int(sig)
	}
	p.killMain()
}

// output is a stream as the command writes it.
type output struct {
	p *proc
	w *process.SpoolWriter
}

func (o output) Write(b []byte) (int, error) {
	if err := o.p.b.clock.gate(o.p.tree); err != nil {
		return 0, io.ErrClosedPipe
	}
	if o.p.ended() {
		return 0, io.ErrClosedPipe // a daemon after its command's end
	}
	n := len(b)
	if o.p.spec.PTY != nil {
		b = []byte(strings.ReplaceAll(string(b), "\n", "\r\n"))
	}
	o.w.Write(b, o.p.tree.Done())
	h := o.w.Header()
	if o.p.spec.OnLimit == process.Kill && h.Total > h.Head+h.Tail {
		o.p.kill(process.OutputLimit)
	}
	if o.p.tree.Err() != nil {
		return 0, io.ErrClosedPipe
	}
	return n, nil
}

// input is stdin as the command reads it.
type input struct {
	p    *proc
	rest []byte
}

func (i *input) Read(b []byte) (int, error) {
	for len(i.rest) == 0 {
		select {
		case i.rest = <-i.p.in:
		default:
			select {
			case i.rest = <-i.p.in:
			case <-i.p.inClosed:
				return 0, io.EOF
			case <-i.p.tree.Done():
				return 0, io.EOF
			case <-i.p.main.Done():
				return 0, io.EOF
			}
		}
	}
	n := copy(b, i.rest)
	i.rest = i.rest[n:]
	return n, nil
}
