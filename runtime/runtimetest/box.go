package runtimetest

import (
	"context"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/netpolicy"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
)

// mainExec is the id of the main process.
const mainExec = "main"

// box is one sandbox of the fake.
type box struct {
	m     *Machine
	req   runtime.Request
	fs    *memFS
	clock *clock
	gone  chan struct{} // closed by destroy

	enders sync.WaitGroup // goroutines in endByItself

	mu       sync.Mutex
	running  bool
	expected bool // an end that is on its way was asked for
	dead     bool // gone is closed
	began    time.Time
	nextPid  int
	procs    map[string]*proc
	ports    map[uint16]chan net.Conn
	exit     *runtime.Exit // not yet acknowledged
	oomKills int64
	pidsPeak int64
	phase    int    // of the spec's
	moving   string // to which it is on its way
	network  uint64 // generation of its policy
}

func newBox(m *Machine, r runtime.Request) *box {
	b := &box{m: m, req: r, clock: newClock(), gone: make(chan struct{}), nextPid: 2,
		procs: map[string]*proc{}, ports: map[uint16]chan net.Conn{}}
	b.fs = newMemFS(r.Spec.Limits.Disk)
	if len(r.Spec.Phases) > 0 {
		b.network = 1
		b.fs.hide(r.Spec.HiddenIn(0))
	}
	return b
}

func (b *box) start(ctx context.Context) error {
	b.mu.Lock()
	if b.dead {
		b.mu.Unlock()
		return dsec.E(dsec.SandboxGone, "start sandbox", string(b.req.ID), nil)
	}
	b.running, b.expected, b.exit, b.began = true, false, nil, time.Now()
	if b.moving != "" { // a start finishes a move
		b.phase, b.moving = b.req.Spec.PhaseIndex(b.moving), ""
		b.fs.hide(b.req.Spec.HiddenIn(b.phase))
	}
	delete(b.procs, mainExec)
	b.mu.Unlock()
	b.clock.set(false)
	if len(b.req.Spec.Command) == 0 {
		return nil
	}
	_, err := b.exec(ctx, process.Spec{ID: mainExec, Argv: b.req.Spec.Command, Main: true})
	if err != nil {
		b.end(process.Killed)
	}
	return err
}

func (b *box) isRunning() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.running
}

func (b *box) expectEnd() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.expected = true
}

func (b *box) mainProcess() *proc {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.running {
		return nil
	}
	return b.procs[mainExec]
}

// end kills every process and waits for them.
func (b *box) end(why process.Status) {
	b.mu.Lock()
	b.running, b.expected = false, true
	procs := slices.Collect(maps.Values(b.procs))
	clear(b.ports)
	b.mu.Unlock()
	b.clock.set(false)
	for _, p := range procs {
		p.kill(why)
	}
	for _, p := range procs {
		<-p.done
		p.jobs.Wait()
	}
}

func (b *box) destroy() {
	b.mu.Lock()
	if !b.dead {
		b.dead = true
		close(b.gone)
	}
	b.mu.Unlock()
	b.end(process.Killed)
	b.enders.Wait()
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, p := range b.procs {
		p.closeSpools()
	}
	clear(b.procs)
}

// endByItself is an end that nobody asked for.
func (b *box) endByItself(e runtime.Exit) {
	b.mu.Lock()
	if !b.running || b.expected {
		b.mu.Unlock()
		return
	}
	b.running = false
	b.exit = &e
	b.mu.Unlock()
	b.end(process.Killed)
	b.m.exited(e)
}

// endLater is endByItself for a command, which could not wait for its own end.
func (b *box) endLater(e runtime.Exit) { b.enders.Go(func() { b.endByItself(e) }) }

func (b *box) pendingExit() *runtime.Exit {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.exit
}

func (b *box) acknowledge() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.exit = nil
}

func (b *box) status() runtime.Status {
	paused, _ := b.clock.state()
	b.mu.Lock()
	defer b.mu.Unlock()
	s := runtime.Status{ID: b.req.ID, Running: b.running, Paused: paused}
	for id := range b.procs {
		s.Execs = append(s.Execs, id)
	}
	slices.Sort(s.Execs)
	return s
}

func (b *box) stats() runtime.Stats {
	b.mu.Lock()
	defer b.mu.Unlock()
	l := b.req.Spec.Limits
	s := runtime.Stats{Memory: 1 << 20, MemoryPeak: 1 << 20, MemoryLimit: l.Memory, PidsPeak: max(1, b.pidsPeak), PidsLimit: l.Pids,
		Disk: b.fs.used(), DiskLimit: l.Disk, OOMKills: b.oomKills, CPU: time.Millisecond}
	if b.oomKills > 0 {
		s.MemoryPeak = l.Memory
	}
	if b.running {
		s.Pids = 1 + b.aliveLocked()
	}
	return s
}

func (b *box) aliveLocked() (n int64) {
	for _, p := range b.procs {
		if !p.ended() {
			n++
		}
	}
	return n
}

func (b *box) defaultUser() string {
	if u := b.req.Spec.User; u != "" {
		return u
	}
	return b.req.Layers.Config.User
}

// exec starts a command, or finds it if it runs under that id already.
func (b *box) exec(ctx context.Context, s process.Spec) (process.Process, error) {
	if s.ID == "" {
		s.ID = dsec.Random(12)
	}
	if len(s.Argv) == 0 || s.Argv[0] == "" {
		return nil, dsec.Errorf(dsec.Invalid, "exec", s.ID, "no program")
	}
	for _, a := range s.Argv {
		if len(a) >= 128<<10 {
			return nil, dsec.Errorf(dsec.Invalid, "exec", s.Argv[0], "argument of %d bytes: argument list too long", len(a))
		}
	}
	p, err := b.prepare(s)
	if err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if old := b.procs[s.ID]; old != nil {
		p.discard()
		if !sameSpec(old.spec, s) {
			return nil, dsec.Errorf(dsec.Conflict, "exec", s.ID, "runs with another spec")
		}
		return old, nil
	}
	if err := ctx.Err(); err != nil {
		p.discard()
		return nil, dsec.E(dsec.ClassOf(err), "exec", s.ID, err)
	}
	if paused, _ := b.clock.state(); paused || !b.running || b.moving != "" {
		p.discard()
		return nil, dsec.Errorf(dsec.IllegalState, "exec", string(b.req.ID), "the sandbox is not running")
	}
	if s.Service && b.phase != 0 {
		p.discard()
		return nil, dsec.Errorf(dsec.IllegalState, "exec", string(b.req.ID), "services are started in the first phase")
	}
	if n := b.aliveLocked() + 2; n > b.req.Spec.Limits.Pids && b.req.Spec.Limits.Pids > 0 {
		p.discard()
		return nil, dsec.Errorf(dsec.ResourceExhausted, "exec", s.ID, "limit of %d processes", b.req.Spec.Limits.Pids)
	} else {
		b.pidsPeak = max(b.pidsPeak, n)
	}
	p.pid = b.nextPid
	b.nextPid++
	b.procs[s.ID] = p
	p.run()
	return p, nil
}

func sameSpec(a, b process.Spec) bool {
	return fmt.Sprintf("%#v", deref(a)) == fmt.Sprintf("%#v", deref(b))
}

// deref makes the terminal size comparable by value.
func deref(s process.Spec) any {
	var size process.Size
	if s.PTY != nil {
		size = *s.PTY
	}
	pty := s.PTY != nil
	s.PTY = nil
	return []any{s, pty, size}
}

// environ is the image's, the sandbox's, the user's and the command's.
func (b *box) environ(s process.Spec, u user) map[string]string {
	env := map[string]string{"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	for _, kv := range b.req.Layers.Config.Env {
		k, v, _ := strings.Cut(kv, "=")
		env[k] = v
	}
	env["HOME"], env["USER"] = u.home, u.name
	maps.Copy(env, netpolicy.MirrorEnvironment(*b.req.Spec.NetworkPolicy()))
	maps.Copy(env, b.req.Spec.Env)
	maps.Copy(env, s.Env)
	return env
}

func (b *box) process(id string) (process.Process, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if p := b.procs[id]; p != nil {
		return p, nil
	}
	return nil, dsec.E(dsec.NotFound, "find command", dsec.Quote(id), nil)
}

func (b *box) release(p *proc) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.procs[p.spec.ID] == p {
		delete(b.procs, p.spec.ID)
		p.closeSpools()
	}
}

func (b *box) listen(port uint16) (chan net.Conn, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ports[port] != nil || !b.running {
		return nil, dsec.Errorf(dsec.AlreadyExists, "listen", fmt.Sprint(port), "address in use")
	}
	c := make(chan net.Conn)
	b.ports[port] = c
	return c, nil
}

func (b *box) unlisten(port uint16, c chan net.Conn) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ports[port] == c {
		delete(b.ports, port)
	}
}

func (b *box) dial(ctx context.Context, port uint16) (net.Conn, error) {
	b.mu.Lock()
	c := b.ports[port]
	b.mu.Unlock()
	if c == nil {
		return nil, dsec.Errorf(dsec.Unavailable, "dial", fmt.Sprint(port), "connection refused")
	}
	ours, theirs := net.Pipe()
	select {
	case c <- theirs:
		return ours, nil
	case <-b.gone:
		return nil, dsec.E(dsec.SandboxGone, "dial", string(b.req.ID), nil)
	case <-ctx.Done():
		return nil, dsec.E(dsec.ClassOf(ctx.Err()), "dial", fmt.Sprint(port), ctx.Err())
	}
}

// outOfMemory is what the memory limit does to a command.
func (b *box) outOfMemory(p *proc) {
	limit := b.req.Spec.Limits.Memory
	b.mu.Lock()
	b.oomKills++
	b.mu.Unlock()
	p.oomKilled(limit)
	if b.req.Spec.OOM == dsec.OOMSandbox {
		evidence := fmt.Sprintf("memory limit %d, peak %d, oom_kill 1", limit, limit)
		b.endLater(runtime.Exit{ID: b.req.ID, Cause: dsec.CauseOOM, By: dsec.InducedBySelf, Evidence: []string{evidence}})
	}
}

// mainEnded ends the sandbox after its main process, unless that was asked for.
func (b *box) mainEnded(r process.Result) {
	e := runtime.Exit{ID: b.req.ID, Cause: dsec.CauseCompleted, By: dsec.InducedBySelf,
		Evidence: []string{fmt.Sprintf("main process: %s, exit code %d", r.Status, r.ExitCode)}}
	if r.OOM {
		e.Cause = dsec.CauseOOM
		e.Evidence = append(e.Evidence, fmt.Sprintf("memory limit %d, peak %d, oom_kill 1", r.OOMLimit, r.OOMPeak))
	}
	b.endLater(e)
}
