package hold

import (
	"errors"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/process"
)

// execution is one command.
type execution struct {
	sb   *sandbox
	spec wireExec

	spooled atomic.Bool   // a spool has a file
	started chan struct{} // closed when the start succeeded or failed
	failed  error         // of the start
	done    chan struct{} // closed when ended
	gone    chan struct{} // closed when its cgroup is dealt with

	pid   int
	pidfd *os.File
	vigil vigil
	group string // directory of its cgroup
	inode uint64 // of it, which is the number the kernel has for the cgroup; 0: not known
	begun time.Time
	mark  time.Time // begun, by a clock that nobody sets
	clock *clock
	usage usage
	out   [2]*pump // stdout, stderr; stderr nil with a PTY

	mu    sync.Mutex
	input *os.File // write end of stdin, or the PTY's master; nil when closed
	cause process.Status
	ended bool
	acked bool
	res   ExecResult
}

// exec starts a command, or finds the one that was started with the same id.
func (s *server) exec(w wireExec) (*execution, error) {
	sb, err := s.sandbox(w.Sandbox)
	if err != nil {
		return nil, err
	}
	id := w.Spec.ID
	if !validID(id) || len(w.Spec.Argv) == 0 || w.Spec.Argv[0] == "" || w.Spool == "" {
		return nil, dsec.Errorf(dsec.Invalid, "exec", dsec.Quote(id), "needs a valid id, a program and a spool directory")
	}
	if err := sb.alive("exec"); err != nil {
		return nil, err
	}
	e := newExecution(sb, w)
	sb.mu.Lock()
	if !sb.entered {
		sb.mu.Unlock()
		return nil, dsec.Errorf(dsec.IllegalState, "exec", sb.name(), "the sandbox has no root yet")
	}
	if old := sb.execs[id]; old != nil {
		sb.mu.Unlock()
		return old.same(w)
	}
	sb.execs[id] = e
	before := sb.leaving[id]
	sb.mu.Unlock()
	if before != nil {
		<-before.gone // its cgroup has the name of ours
	}
	if err := e.admitted(); err != nil {
		sb.mu.Lock()
		delete(sb.execs, id)
		sb.mu.Unlock()
		e.failed = err
		close(e.started)
		close(e.done)
		close(e.gone)
		return nil, err
	}
	sb.mu.Lock()
	e.clock.start(sb.held)
	sb.mu.Unlock()
	close(e.started)
	e.watch()
	return e, nil
}

func newExecution(sb *sandbox, w wireExec) *execution {
	e := &execution{sb: sb, spec: w, started: make(chan struct{}), done: make(chan struct{}), gone: make(chan struct{}), group: filepath.Join(sb.spec.Cgroup, "exec-"+w.Spec.ID)}
	e.clock = newClock(w.Spec.Timeout, func() { e.end(process.TimedOut) })
	return e
}

// hasStarted is false also of one that could not.
func (e *execution) hasStarted() bool {
	select {
	case <-e.started:
		return e.failed == nil
	default:
		return false
	}
}

func (e *execution) hasEnded() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.ended
}

// admitted starts it, if not so many run that the hold could serve no other.
func (e *execution) admitted() error {
	s := e.sb.s
	if s.running.Add(1) > int64(s.most) {
		s.running.Add(-1)
		return dsec.Errorf(dsec.ResourceExhausted, "exec", e.spec.Spec.ID, "%d commands run on this machine, as many as its limit of open files allows", s.most)
	}
	err := e.start()
	if err != nil {
		s.running.Add(-1)
	}
	return err
}

// same waits for the start of an execution with our id and compares.
func (e *execution) same(w wireExec) (*execution, error) {
	<-e.started
	if e.failed != nil {
		return nil, e.failed
	}
	if !e.spec.Spec.equal(w.Spec) {
		return nil, dsec.Errorf(dsec.Conflict, "exec", w.Spec.ID, "another command has this id")
	}
	return e, nil
}

// start makes everything a command needs and has it exec'd; on error nothing
// of it is left.
func (e *execution) start() (err error) {
	var undo []func()
	defer func() {
		if err != nil {
			for i := len(undo) - 1; i >= 0; i-- {
				undo[i]()
			}
			if dsec.ClassOf(err) == dsec.Internal {
				err = dsec.E(dsec.Internal, "exec", e.spec.Spec.ID, err)
			}
		}
	}()
	writers, err := e.makeSpools()
	if err != nil {
		return err
	}
	io, err := e.connect()
	if err != nil {
		return err
	}
	defer io.closeTheirs()
	undo = append(undo, io.closeOurs)
	if err := os.Mkdir(e.group, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	var st unix.Stat_t
	if unix.Stat(e.group, &st) == nil {
		e.inode = st.Ino
	}
	e.sb.s.mu.Lock()
	delete(e.sb.s.lingering, e.group) // ours again
	e.sb.s.mu.Unlock()
	undo = append(undo, func() { e.sb.s.removeCgroup(e.group) })
	warm, err := e.sb.s.warmth.use(e.sb)
	if err != nil {
		return err
	}
	defer e.sb.s.warmth.done(warm)
	e.usage.read(warm)
	e.begun = time.Now()
	e.mark = e.begun
	pty, err := e.launch(warm.tasks, io.theirs)
	if err != nil {
		return err
	}
	if pty != nil {
		io.in, io.out[0] = pty, pty
	}
	e.input = io.in
	for i, r := range io.out {
		if r != nil {
			e.out[i] = newPump(e, r, writers[i], pty != nil)
			e.out[i].start()
		}
	}
	return nil
}

func (e *execution) spoolPath(s process.Stream) string {
	return filepath.Join(e.spec.Spool, e.spec.Spec.ID+spoolSuffix(s))
}

func spoolSuffix(s process.Stream) string {
	if s == process.Stderr {
		return ".err"
	}
	return ".out"
}

func (e *execution) makeSpools() (w [2]*process.SpoolWriter, err error) {
	for i := range w {
		if i == 1 && e.spec.Spec.PTY != nil {
			break
		}
		w[i], err = process.NewLazySpoolWriter(e.spoolMaker(i), e.spec.Spec.Head, e.spec.Spec.Tail)
		if err != nil {
			return w, dsec.E(dsec.ClassOf(err), "exec", e.spec.Spec.ID, err)
		}
	}
	return w, nil
}

// spoolMaker makes the file of the i-th stream when it is needed.
func (e *execution) spoolMaker(i int) func() (*os.File, error) {
	path := e.spoolPath(process.Stream(i + 1))
	return func() (*os.File, error) {
		e.spooled.Store(true)
		return os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_TRUNC|unix.O_NOFOLLOW, 0o600)
	}
}

// end kills the whole tree for a reason; the first reason stands.
func (e *execution) end(why process.Status) {
	e.mu.Lock()
	if e.cause == "" && !e.ended {
		e.cause = why
	}
	e.mu.Unlock()
	_ = killCgroup(e.group)
}

func (e *execution) signal(sig int) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.ended {
		return dsec.Errorf(dsec.IllegalState, "signal exec", e.spec.Spec.ID, "it has ended")
	}
	err := signalPidfd(e.pidfd, syscall.Signal(sig))
	switch {
	case errors.Is(err, unix.ESRCH):
		return dsec.Errorf(dsec.IllegalState, "signal exec", e.spec.Spec.ID, "it has ended")
	case err != nil:
		return dsec.E(dsec.Invalid, "signal exec", e.spec.Spec.ID, err)
	}
	return nil
}

var errStdinClosed = errors.New("its stdin is closed")

// stdinFile returns a duplicate of what feeds the command.
func (e *execution) stdinFile() (*os.File, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.input == nil || e.ended {
		return nil, dsec.E(dsec.IllegalState, "write to exec", e.spec.Spec.ID, errStdinClosed)
	}
	return duplicate(e.input)
}

func (e *execution) closeStdin() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.input == nil || e.ended {
		return nil
	}
	if e.spec.Spec.PTY != nil { // a terminal says it with ^D
		_, err := e.input.Write([]byte{4})
		return err
	}
	err := e.input.Close()
	e.input = nil
	return err
}

func (e *execution) resize(size process.Size) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.spec.Spec.PTY == nil {
		return dsec.Errorf(dsec.IllegalState, "resize exec", e.spec.Spec.ID, "it has no terminal")
	}
	if e.ended || e.input == nil {
		return dsec.Errorf(dsec.IllegalState, "resize exec", e.spec.Spec.ID, "it has ended")
	}
	ws := &unix.Winsize{Row: size.Rows, Col: size.Cols}
	if err := unix.IoctlSetWinsize(fdOf(e.input), unix.TIOCSWINSZ, ws); err != nil {
		return dsec.E(dsec.Internal, "resize exec", e.spec.Spec.ID, err)
	}
	return nil
}

func (e *execution) stream(s process.Stream) (*process.SpoolWriter, error) {
	if s != process.Stdout && (s != process.Stderr || e.out[1] == nil) {
		return nil, dsec.Errorf(dsec.Invalid, "read output of exec", e.spec.Spec.ID, "it has no stream %d", s)
	}
	return e.out[s-1].w, nil
}

// spoolFile opens the spool of a stream, or a copy of it while it is small.
func (e *execution) spoolFile(s process.Stream) (*os.File, error) {
	w, err := e.stream(s)
	if err != nil {
		return nil, err
	}
	var f *os.File
	if b, ok := w.Image(); ok {
		f, err = linux.SealedFile("spool", b)
	} else {
		f, err = os.Open(e.spoolPath(s))
	}
	if err != nil {
		return nil, dsec.E(dsec.Internal, "read output of exec", e.spec.Spec.ID, err)
	}
	return f, nil
}

func (e *execution) info() wireExecInfo {
	e.mu.Lock()
	defer e.mu.Unlock()
	i := wireExecInfo{Sandbox: e.sb.name(), Spec: e.spec.Spec, PID: e.pid, Group: e.inode, Started: e.begun, Spool: e.spec.Spool, Ended: e.ended, Acked: e.acked, Result: e.res}
	if !e.ended {
		i.Result = ExecResult{Status: process.Running, Started: e.begun}
	}
	return i
}

// begunInfo is what the one who started it does not know.
func (e *execution) begunInfo() wireExecInfo {
	i := e.info()
	i.Spec, i.Spool = wireSpec{}, ""
	return i
}

// release forgets an ended command.
func (sb *sandbox) release(id string) error {
	sb.mu.Lock()
	e := sb.execs[id]
	sb.mu.Unlock()
	if e == nil {
		return nil
	}
	if !e.hasEnded() {
		return dsec.Errorf(dsec.IllegalState, "release exec", id, "it runs")
	}
	<-e.done // about to be closed: the end is reported
	sb.mu.Lock()
	delete(sb.execs, id)
	select {
	case <-e.gone:
	default:
		sb.leaving[id] = e
		go func() {
			<-e.gone
			sb.mu.Lock()
			defer sb.mu.Unlock()
			if sb.leaving[id] == e {
				delete(sb.leaving, id)
			}
		}()
	}
	sb.mu.Unlock()
	for _, p := range e.out {
		if p != nil {
			p.abandon()
		}
	}
	if !e.spooled.Load() {
		return nil
	}
	_ = os.Remove(e.spoolPath(process.Stdout))
	_ = os.Remove(e.spoolPath(process.Stderr))
	return nil
}
