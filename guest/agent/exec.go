package agent

import (
	"context"
	"errors"
	"os"
	"path"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/guest"
	"github.com/opendsec/dsec/internal/accounts"
	"github.com/opendsec/dsec/process"
)

const (
	startLimit  = 20 * time.Second // for a program to begin
	maxCommands = 16 << 10         // that run or wait for release
	killed      = process.Killed
)

var validID = regexp.MustCompile(`^[A-Za-z0-9_.]{1,64}$`)

// execution is one command.
type execution struct {
	a    *Agent
	sb   *sandbox
	spec process.Spec
	how  guest.Exec

	started chan struct{} // closed when the start succeeded or failed
	failed  error         // of the start
	done    chan struct{} // closed when it has ended

	group    group
	pid      int
	pidfd    *os.File
	end_     <-chan ending
	begun    time.Time
	clock    clock
	oom      int64 // of the sandbox at the start
	throttle time.Duration
	out      [2]*pump // stdout, stderr; stderr nil with a terminal
	res      process.Result

	mu    sync.Mutex
	input *os.File // write end of stdin, or the terminal's master; nil when closed
	cause process.Status
	over  bool
}

// exec starts a command, or finds the one that was started with the same id. What
// was begun is finished, whoever gave up meanwhile.
func (a *Agent) exec(q guest.Request) (guest.Answer, error) {
	const op = "exec"
	if q.Exec == nil {
		return guest.Answer{}, dsec.Errorf(dsec.Invalid, op, "", "no command")
	}
	spec := q.Exec.Command.Process()
	if err := spec.Validate(); err != nil {
		return guest.Answer{}, err
	}
	if !validID.MatchString(spec.ID) || spec.ID == "." || spec.ID == ".." {
		return guest.Answer{}, dsec.Errorf(dsec.Invalid, op, dsec.Quote(spec.ID), "not a valid id")
	}
	if spec.Cwd != "" && !path.IsAbs(spec.Cwd) {
		return guest.Answer{}, dsec.Errorf(dsec.Invalid, op, spec.ID, "working directory %s is not absolute", dsec.Quote(spec.Cwd))
	}
	if more := q.Exec.Caps & guest.Withheld; more != 0 && !a.service {
		return guest.Answer{}, dsec.Errorf(dsec.Unsupported, op, spec.ID, "no guest gives the capabilities %#x", more)
	}
	a.starting.RLock()
	defer a.starting.RUnlock()
	sb, err := a.live(op)
	if err != nil {
		return guest.Answer{}, err
	}
	e := &execution{a: a, sb: sb, spec: spec, how: *q.Exec, started: make(chan struct{}), done: make(chan struct{}), group: group(sb.group.file("exec-" + spec.ID))}
	e.clock.fire = func() { e.end(process.TimedOut) }
	a.mu.Lock()
	old := a.commands[spec.ID]
	if old == nil && len(a.commands) >= maxCommands {
		a.mu.Unlock()
		return guest.Answer{}, dsec.Errorf(dsec.ResourceExhausted, op, spec.ID, "%d commands run or wait for their release", maxCommands)
	}
	if old == nil {
		a.commands[spec.ID] = e
	}
	a.mu.Unlock()
	if old != nil {
		return old.same(spec)
	}
	if err := e.start(); err != nil {
		if dsec.ClassOf(err) == dsec.Internal {
			err = dsec.E(dsec.Internal, op, spec.ID, err)
		}
		a.mu.Lock()
		delete(a.commands, spec.ID)
		a.mu.Unlock()
		e.failed = err
		close(e.started)
		close(e.done)
		return guest.Answer{}, err
	}
	e.clock.start(spec.Timeout, false)
	close(e.started)
	go e.attend()
	return guest.Answer{Started: e.begun}, nil
}

// same waits for the start of an execution with our id and compares.
func (e *execution) same(s process.Spec) (guest.Answer, error) {
	<-e.started
	if e.failed != nil {
		return guest.Answer{}, e.failed
	}
	if !reflect.DeepEqual(guest.NewCommand(e.spec), guest.NewCommand(s)) {
		return guest.Answer{}, dsec.Errorf(dsec.Conflict, "exec", s.ID, "another command has this id")
	}
	return guest.Answer{Started: e.begun}, nil
}

// start makes all a command needs and has it begin; on error nothing is left.
func (e *execution) start() (err error) {
	var undo []func()
	defer func() {
		for i := len(undo) - 1; i >= 0 && err != nil; i-- {
			undo[i]()
		}
	}()
	who, err := e.sb.identify(e.spec.User)
	if err != nil {
		return err
	}
	writers, err := e.makeSpools()
	if err != nil {
		return err
	}
	var io stdio
	if e.spec.PTY == nil {
		if io, err = makePipes(e.spec.Stdin, who); err != nil {
			return err
		}
	}
	defer func() { closeAll(io.theirs) }() // of a terminal, they are known later
	undo = append(undo, func() { closeAll([]*os.File{io.in, io.out[0], io.out[1]}) })
	e.a.mu.Lock()
	delete(e.a.lingering, e.group) // ours again
	e.a.mu.Unlock()
	if err := os.Mkdir(string(e.group), 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	undo = append(undo, func() { e.a.removeGroup(e.group) })
	e.oom, e.throttle = e.sb.oomKills(), e.sb.group.throttled()
	e.begun = time.Now()
	if err := e.launch(who, &io); err != nil {
		return err
	}
	e.input = io.in
	for i, r := range io.out {
		if r != nil {
			e.out[i] = newPump(e, r, writers[i], e.spec.PTY != nil)
		}
	}
	return nil
}

// launch has a thread of the sandbox start the program.
func (e *execution) launch(who accounts.Identity, io *stdio) error {
	d := e.sb.spec.Defaults
	env := accounts.Environment(who, e.spec.PTY != nil, "", d.ImageEnv, d.Env, e.spec.Env)
	cwd := e.spec.Cwd
	for _, next := range []string{d.Cwd, "/"} {
		if cwd == "" {
			cwd = next
		}
	}
	dir, err := os.Open(string(e.group))
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	// A program that does not begin, because somebody stopped it before, is ended.
	late := time.AfterFunc(startLimit, func() { _ = e.group.kill() })
	defer late.Stop()
	var pid, pidfd int
	var end <-chan ending
	var failed error
	err = e.sb.threads.on(kindOfForker{caps: e.how.Caps, noNewPrivs: e.how.NoNewPrivs, inside: true}, func() {
		var programs []string
		failed = asUser(who.UID, who.GID, who.Groups, func() (err error) {
			programs, err = lookUp(e.spec.Argv[0], cwd, env)
			return err
		})
		if failed == nil && e.spec.PTY != nil {
			*io, failed = makeTerminal(*e.spec.PTY, who)
		}
		if failed != nil {
			return
		}
		attr := &syscall.ProcAttr{Dir: cwd, Env: env, Sys: &syscall.SysProcAttr{Setsid: true, UseCgroupFD: true, CgroupFD: int(dir.Fd()), PidFD: &pidfd,
			Setctty: e.spec.PTY != nil, Credential: &syscall.Credential{Uid: who.UID, Gid: who.GID, Groups: who.Groups}}}
		for _, f := range io.theirs {
			attr.Files = append(attr.Files, f.Fd())
		}
		pid, end, failed = e.a.reaper.start(func() (pid int, err error) {
			for _, p := range programs { // as execvp(3)
				if pid, err = syscall.ForkExec(p, e.spec.Argv, attr); !slices.Contains([]error{unix.ENOENT, unix.ENOTDIR, unix.EACCES}, err) {
					break
				}
			}
			return pid, err
		})
	})
	if err == nil && failed != nil {
		if _, ok := errors.AsType[*dsec.Error](failed); ok {
			return failed
		}
		return dsec.E(classOf(failed), "exec", dsec.Quote(short(e.spec.Argv[0])), failed)
	}
	if err != nil {
		return err
	}
	e.pid, e.end_ = pid, end
	e.pidfd = os.NewFile(uintptr(pidfd), "pidfd")
	if adj := e.how.OOMScoreAdj; adj != 0 {
		setOOMScore(pid, adj)
	}
	return nil
}

func short(s string) string { return s[:min(len(s), 256)] }

// lookUp checks the directory a program begins in, and returns where the program
// may be, on the thread of a user.
func lookUp(name, cwd string, env []string) ([]string, error) {
	fd, err := unix.Open(cwd, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err == nil {
		_ = unix.Close(fd)
		err = unix.Faccessat(unix.AT_FDCWD, cwd, unix.X_OK, unix.AT_EACCESS)
	}
	if err != nil {
		class := classOf(err)
		if err == unix.ENOTDIR {
			class = dsec.NotADirectory
		}
		return nil, dsec.E(class, "enter working directory", dsec.Quote(cwd), err)
	}
	if strings.Contains(name, "/") {
		return []string{name}, nil
	}
	var all []string
	found := error(unix.ENOENT)
	for _, v := range env {
		dirs, ok := strings.CutPrefix(v, "PATH=")
		if !ok {
			continue
		}
		for _, d := range filepath.SplitList(dirs) {
			at := filepath.Join(d, name)
			if !filepath.IsAbs(at) {
				at = filepath.Join(cwd, at)
			}
			var st unix.Stat_t
			if unix.Stat(at, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
				continue
			}
			if unix.Faccessat(unix.AT_FDCWD, at, unix.X_OK, unix.AT_EACCESS) != nil {
				found = unix.EACCES
				continue
			}
			all = append(all, at)
		}
	}
	if len(all) == 0 {
		return nil, dsec.E(classOf(found), "exec", dsec.Quote(short(name)), found)
	}
	return all, nil
}

func (e *execution) makeSpools() (w [2]*process.SpoolWriter, err error) {
	for i := range w {
		if i == 1 && e.spec.PTY != nil {
			break
		}
		at := e.spoolPath(i)
		w[i], err = process.NewLazySpoolWriter(func() (*os.File, error) {
			return os.OpenFile(at, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
		}, e.spec.Head, e.spec.Tail)
		if err != nil {
			return w, dsec.E(dsec.ClassOf(err), "exec", e.spec.ID, err)
		}
	}
	return w, nil
}

func (e *execution) spoolPath(i int) string {
	return filepath.Join(e.sb.spool, e.spec.ID+[]string{".out", ".err"}[i])
}

// end kills the whole tree for a reason; the first reason stands.
func (e *execution) end(why process.Status) {
	e.mu.Lock()
	if e.cause == "" && !e.over {
		e.cause = why
	}
	e.mu.Unlock()
	_ = e.group.kill() // gone already: it has ended
}

func (e *execution) ended(op string) error {
	return dsec.Errorf(dsec.IllegalState, op, e.spec.ID, "it has ended")
}

func (e *execution) signal(sig int) error {
	const op = "signal exec"
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.over {
		return e.ended(op)
	}
	err := unix.PidfdSendSignal(int(e.pidfd.Fd()), syscall.Signal(sig), nil, 0)
	switch {
	case err == unix.ESRCH:
		return e.ended(op)
	case err != nil:
		return dsec.E(dsec.Invalid, op, e.spec.ID, err)
	}
	return nil
}

func (e *execution) resize(size process.Size) error {
	const op = "resize exec"
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.spec.PTY == nil {
		return dsec.Errorf(dsec.IllegalState, op, e.spec.ID, "it has no terminal")
	}
	if e.over || e.input == nil {
		return e.ended(op)
	}
	return setSize(e.input, size)
}

// closeStdin: a terminal says it with ^D.
func (e *execution) closeStdin() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.input == nil || e.over {
		return nil
	}
	if e.spec.PTY != nil {
		_, err := e.input.Write([]byte{4})
		return err
	}
	err := e.input.Close()
	e.input = nil
	return err
}

// release forgets an ended command.
func (a *Agent) release(id string) error {
	e, err := a.find(id)
	if err != nil {
		return nil //nolint:nilerr // it is forgotten already
	}
	select {
	case <-e.done:
	default:
		return dsec.Errorf(dsec.IllegalState, "release exec", id, "it runs")
	}
	a.mu.Lock()
	delete(a.commands, id)
	a.mu.Unlock()
	for i, p := range e.out {
		if p != nil {
			p.abandon()
			_ = os.Remove(e.spoolPath(i)) // of one that wrote little there is none
		}
	}
	return nil
}

// removeGroup removes the group of a command that did not begin.
func (a *Agent) removeGroup(g group) {
	ctx, cancel := context.WithTimeout(context.Background(), undoWait)
	defer cancel()
	if err := g.remove(ctx); err != nil {
		a.log.Warn("remove control group", "group", string(g), "err", err)
	}
}

// lingerAgain is how often groups are tried in which an ended command has left
// somebody.
const lingerAgain = time.Second

// leave removes the group of a command that has ended, now or when what it left
// behind has ended, too.
func (a *Agent) leave(g group) {
	if os.Remove(string(g)) == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.lingering[g] = struct{}{}; len(a.lingering) == 1 {
		time.AfterFunc(lingerAgain, a.linger)
	}
}

func (a *Agent) linger() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for g := range a.lingering {
		err := os.Remove(string(g))
		if err == nil || errors.Is(err, os.ErrNotExist) {
			delete(a.lingering, g)
		}
	}
	if len(a.lingering) > 0 {
		time.AfterFunc(lingerAgain, a.linger)
	}
}
