// Package wasm runs calls of WebAssembly modules (WASI preview 1), each in an instance
// of its own, in a worker process that has no rights: compiled modules are kept by their
// digest, instances are not. What a module can reach is its memory, what came with the
// call, clocks and random bytes.
//
// The program starts itself with Verb as its first argument; its main calls Main when it
// sees that. The worker has a control group with a limit on memory, no network, an empty
// root directory, a user that owns nothing and no_new_privs. If it ends, the calls in it
// fail as Unavailable, and the next one starts another.
package wasm

import (
	"bufio"
	"context"
	"crypto/sha256"
	"errors"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/cgroup"
)

// Verb is the hidden argument.
const Verb = "function-wasm"

// Options of a Host; zero values are the defaults.
type Options struct {
	Exe     string       // default: this program
	Dir     string       // an empty directory that nobody writes to, made if it is missing; "": one below the temporary ones, until Close
	Cgroups *cgroup.Root // nil: without limits of the kernel
	UID     int          // default 65531; used if this process is root
	Memory  int64        // bytes of the worker; default 2 GiB
	Log     *slog.Logger
}

const (
	group        = "function.wasm"
	ownMemory    = 512 << 20 // of the worker: compiled modules, calls on their way
	startWithin  = 20 * time.Second
	removeWithin = 10 * time.Second // a control group
	beyond       = 10 * time.Second // after its limit, a call's worker counts as stuck
)

// room is for the memory of instances.
func (o *Options) room() int64 { return max(o.Memory-ownMemory, 64<<20) }

// Host has a worker when it is needed.
type Host struct {
	o      Options
	memory *semaphore.Weighted // of instances

	trial chan struct{} // of one at a time

	mu     sync.Mutex
	w      *process
	closed bool
	dir    string
	good   map[which]bool          // modules that were compiled in time
	trying map[which]chan struct{} // those on trial; closed at its end
}

// New returns a Host without a worker.
func New(o Options) *Host {
	if o.Exe == "" {
		o.Exe = "/proc/self/exe"
	}
	if o.UID == 0 {
		o.UID = 65531
	}
	if o.Memory == 0 {
		o.Memory = 2 << 30
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	return &Host{o: o, memory: semaphore.NewWeighted(o.room()), trial: make(chan struct{}, 1), good: map[which]bool{}, trying: map[which]chan struct{}{}}
}

// process is a worker at work.
type process struct {
	h     *Host
	group *cgroup.Group // nil: none
	cmd   *exec.Cmd
	conn  net.Conn
	ready chan struct{} // closed when it is, or has ended
	ended chan struct{} // closed when it was waited for
	why   error         // after ended

	writing sync.Mutex

	mu    sync.Mutex
	next  uint64
	calls map[uint64]chan *answer
	known map[[32]byte]bool // modules that it was sent
}

// Call makes a call of type wasm that is valid and has its defaults.
func (h *Host) Call(ctx context.Context, c dsec.Call) (dsec.CallResult, error) {
	came := time.Now()
	need := max(c.Limits.Memory, 1<<20)
	if need > h.o.room() {
		return dsec.CallResult{}, dsec.Errorf(dsec.Invalid, "call", "limits.memory", "%d bytes, all modules of this node together have %d", need, h.o.room())
	}
	r := &request{digest: sha256.Sum256(c.Code), memory: uint64(c.Limits.Memory) &^ 0xffff, fuel: uint64(c.Limits.Fuel), wall: min(c.Limits.Wall, c.Limits.CPUTime), output: uint64(c.Limits.Output),
		args: c.Command, stdin: c.Stdin}
	for k, v := range c.Env {
		r.env = append(r.env, k+"="+v)
	}
	for _, f := range c.Files {
		r.files = append(r.files, file{f.Path, f.Mode, f.Data})
	}
	if a, err := h.tried(ctx, r, c.Code, c.Limits.Compile); err != nil {
		return dsec.CallResult{}, err
	} else if a != nil {
		return result(&c, a)
	}
	if err := h.memory.Acquire(ctx, need); err != nil {
		return dsec.CallResult{}, dsec.E(dsec.ClassOf(err), "wait for memory of modules", "", context.Cause(ctx))
	}
	defer h.memory.Release(need)
	queued := time.Since(came)
	for again := 0; ; again++ {
		a, err := h.once(ctx, r, c.Code)
		if err != nil && ctx.Err() == nil && again == 0 && dsec.ClassOf(err) == dsec.Unavailable {
			h.o.Log.Warn("module called again", "err", err)
			continue
		}
		if err != nil {
			return dsec.CallResult{}, err
		}
		res, err := result(&c, a)
		res.Queued = queued
		return res, err
	}
}

func (h *Host) once(ctx context.Context, r *request, module []byte) (*answer, error) {
	p, err := h.worker(ctx)
	if err != nil {
		return nil, err
	}
	a, err := p.ask(ctx, r, module)
	if err == nil && a.says == saysNeed { // it was thrown out meanwhile
		p.mu.Lock()
		delete(p.known, r.digest)
		p.mu.Unlock()
		a, err = p.ask(ctx, r, module)
	}
	if err == nil && a.says != saysResult {
		return nil, dsec.Errorf(dsec.Internal, "call module", "", "the worker does not take it")
	}
	return a, err
}

// worker is the one there is, or a new one.
func (h *Host) worker(ctx context.Context) (*process, error) {
	h.mu.Lock()
	if h.closed {
		h.mu.Unlock()
		return nil, dsec.Errorf(dsec.Unavailable, "call module", "", "the function tier is closed")
	}
	if h.w == nil || h.w.over() {
		p, err := h.start(group, h.o.Memory)
		if err != nil {
			h.mu.Unlock()
			return nil, dsec.E(dsec.Unavailable, "start worker of modules", "", err)
		}
		h.w = p
	}
	p := h.w
	h.mu.Unlock()
	select {
	case <-p.ready:
	case <-ctx.Done():
		return nil, dsec.E(dsec.ClassOf(ctx.Err()), "start worker of modules", "", context.Cause(ctx))
	}
	return p, nil
}

func (p *process) over() bool {
	select {
	case <-p.ended:
		return true
	default:
		return false
	}
}

// start starts a worker in a control group of that name; the caller has the lock.
func (h *Host) start(group string, memory int64) (*process, error) {
	if h.dir == "" && h.o.Dir != "" {
		if err := os.Mkdir(h.o.Dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
			return nil, err
		}
		h.dir = h.o.Dir
	}
	if h.dir == "" {
		dir, err := os.MkdirTemp("", "dsec-wasm-")
		if err != nil {
			return nil, err
		}
		h.dir = dir
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socketpair", err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "worker"), os.NewFile(uintptr(fds[1]), "worker")
	defer func() { _ = ours.Close(); _ = theirs.Close() }()
	cmd := exec.Command(h.o.Exe)
	cmd.Env, cmd.Dir = []string{"GODEBUG=madvdontneed=1"}, "/"
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	uid, tasks, made := 0, 0, (*cgroup.Group)(nil)
	if os.Geteuid() == 0 {
		uid = h.o.UID
		cmd.SysProcAttr.Cloneflags = unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWNET
	}
	if h.o.Cgroups != nil {
		if err := h.removeGroup(group); err != nil { // of a worker before
			return nil, err
		}
		g, err := h.o.Cgroups.Create(group, cgroup.Limits{Memory: memory, Pids: 256})
		if err != nil {
			return nil, err
		}
		made = g
		handles, err := g.Handles()
		if err != nil {
			return nil, err
		}
		defer handles.Close()
		cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(handles.Unified.Fd())
		cmd.ExtraFiles = append(cmd.ExtraFiles, handles.Tasks...)
		tasks = len(handles.Tasks)
	}
	cmd.Args = []string{"dsec", Verb, strconv.Itoa(uid), strconv.FormatInt(memory, 10), strconv.Itoa(tasks), h.dir}
	conn, err := net.FileConn(ours)
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	p := &process{h: h, group: made, cmd: cmd, conn: conn, ready: make(chan struct{}), ended: make(chan struct{}), calls: map[uint64]chan *answer{}, known: map[[32]byte]bool{}}
	late := time.AfterFunc(startWithin, func() { _ = cmd.Process.Kill() })
	go p.read(late)
	return p, nil
}

// read hears the worker until it ends, and then waits for it.
func (p *process) read(late *time.Timer) {
	in := bufio.NewReaderSize(p.conn, 256<<10)
	begun := false
	var err error
	for {
		var b []byte
		if b, err = readFrame(in); err != nil {
			break
		}
		var a *answer
		if a, err = decodeAnswer(b); err != nil {
			break
		}
		if a.says == saysReady && !begun {
			begun = true
			late.Stop()
			close(p.ready)
			continue
		}
		p.mu.Lock()
		c := p.calls[a.id]
		delete(p.calls, a.id)
		p.mu.Unlock()
		if c != nil {
			c <- a
		}
	}
	late.Stop()
	_ = p.cmd.Process.Kill() // also one that went mad
	p.why = errors.Join(err, p.cmd.Wait(), p.conn.Close())
	close(p.ended)
	if !begun {
		close(p.ready)
	}
}

// ask sends a call, with the module if the worker was not sent it, and waits.
func (p *process) ask(ctx context.Context, r *request, module []byte) (*answer, error) {
	c := make(chan *answer, 1)
	q := *r
	p.mu.Lock()
	p.next++
	q.id = p.next
	p.calls[q.id] = c
	first := !p.known[q.digest]
	p.mu.Unlock()
	if first {
		q.module = module
	}
	b := q.encode()
	p.writing.Lock()
	_, err := p.conn.Write(b)
	p.writing.Unlock()
	if first && err == nil {
		p.mu.Lock()
		if len(p.known) >= 4*keptModules {
			clear(p.known)
		}
		p.known[q.digest] = true
		p.mu.Unlock()
	}
	gone := func() error {
		return dsec.Errorf(dsec.Unavailable, "call module", "", "the worker has ended: %w", p.why)
	}
	if err != nil {
		<-p.ended
		return nil, gone()
	}
	stuck := time.NewTimer(r.wall + beyond + time.Minute) // it may wait for a processor
	defer stuck.Stop()
	select {
	case a := <-c:
		return a, nil
	case <-p.ended:
		return nil, gone()
	case <-stuck.C:
		_ = p.cmd.Process.Kill()
		<-p.ended
		return nil, gone()
	case <-ctx.Done():
		p.mu.Lock()
		delete(p.calls, q.id)
		p.mu.Unlock()
		p.writing.Lock()
		_, _ = p.conn.Write(newBuilder(saysCancel, q.id).done())
		p.writing.Unlock()
		return nil, dsec.E(dsec.ClassOf(ctx.Err()), "call module", "", context.Cause(ctx))
	}
}

// removeGroup takes the control group of a worker that has ended away, if there is one.
func (h *Host) removeGroup(name string) error {
	if h.o.Cgroups == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), removeWithin)
	defer cancel()
	return h.o.Cgroups.Remove(ctx, name)
}

// Close ends the worker.
func (h *Host) Close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil
	}
	h.closed = true
	var err error
	if p := h.w; p != nil {
		_ = p.cmd.Process.Kill() // it has nothing to finish
		<-p.ended
		err = h.removeGroup(group)
	}
	if h.dir != "" && h.o.Dir == "" {
		err = errors.Join(err, os.Remove(h.dir))
	}
	return err
}
