package runtimetest

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/confine"
	"github.com/opendsec/dsec/files"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/internal/lifecycle"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
)

// Machine holds fake sandboxes. It outlives the Fakes opened on it.
type Machine struct {
	mu    sync.Mutex
	boxes map[dsec.SandboxID]*box
	locks map[dsec.SandboxID]*idLock
	open  map[*Fake]struct{}
	disks error // why they have failed
	full  error // why they have no room
}

// FailDisks has every disk fail, or with nil none.
func (m *Machine) FailDisks(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.disks = err
}

// DiskFailed implements runtime.DiskWatcher.
func (f *Fake) DiskFailed(context.Context) error {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	return f.m.disks
}

// FillDisks has no disk take more, or with nil all again.
func (m *Machine) FillDisks(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.full = err
}

// DiskFull implements runtime.DiskWatcher.
func (f *Fake) DiskFull(context.Context) error {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	return f.m.full
}

// idLock makes the operations on one id take turns.
type idLock struct {
	turn chan struct{} // capacity 1
	refs int           // guarded by Machine.mu
}

// NewMachine returns a machine without sandboxes.
func NewMachine() *Machine {
	return &Machine{boxes: map[dsec.SandboxID]*box{}, locks: map[dsec.SandboxID]*idLock{}, open: map[*Fake]struct{}{}}
}

// Open returns a runtime over the machine's sandboxes, as a new process would.
func (m *Machine) Open() *Fake {
	ctx, cancel := context.WithCancelCause(context.Background())
	f := &Fake{m: m, tier: dsec.TierContainer, ctx: ctx, cancel: cancel, exits: make(chan runtime.Exit), wake: make(chan struct{}, 1)}
	m.mu.Lock()
	m.open[f] = struct{}{}
	for _, b := range m.boxes {
		if e := b.pendingExit(); e != nil {
			f.queue = append(f.queue, *e)
		}
	}
	m.mu.Unlock()
	f.done.Go(f.deliver)
	f.kick()
	return f
}

// Residue lists the ids of which anything is left.
func (m *Machine) Residue() []dsec.SandboxID {
	m.mu.Lock()
	defer m.mu.Unlock()
	var ids []dsec.SandboxID
	for id := range m.boxes {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}

// Crash ends a running sandbox as a dying kernel or supervisor would.
func (m *Machine) Crash(id dsec.SandboxID, c dsec.Cause, by dsec.Inducer, evidence ...string) {
	if b := m.find(id); b != nil {
		b.endByItself(runtime.Exit{ID: id, Cause: c, By: by, Evidence: evidence})
	}
}

func (m *Machine) find(id dsec.SandboxID) *box {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.boxes[id]
}

// lock waits for its turn on an id.
func (m *Machine) lock(ctx context.Context, id dsec.SandboxID) (unlock func(), err error) {
	m.mu.Lock()
	l := m.locks[id]
	if l == nil {
		l = &idLock{turn: make(chan struct{}, 1)}
		m.locks[id] = l
	}
	l.refs++
	m.mu.Unlock()
	leave := func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		if l.refs--; l.refs == 0 {
			delete(m.locks, id)
		}
	}
	select {
	case l.turn <- struct{}{}:
		return func() { <-l.turn; leave() }, nil
	case <-ctx.Done():
		leave()
		return nil, dsec.E(dsec.ClassOf(ctx.Err()), "wait for turn", string(id), ctx.Err())
	}
}

func (m *Machine) exited(e runtime.Exit) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for f := range m.open {
		f.mu.Lock()
		f.queue = append(f.queue, e)
		f.mu.Unlock()
		f.kick()
	}
}

// Fake is an in-memory runtime.Runtime with every ability.
type Fake struct {
	m      *Machine
	tier   dsec.Tier
	ctx    context.Context // ends with Close
	cancel context.CancelCauseFunc
	exits  chan runtime.Exit
	wake   chan struct{} // capacity 1
	done   sync.WaitGroup

	mu    sync.Mutex
	queue []runtime.Exit
}

// NewFake opens a machine of its own.
func NewFake() *Fake { return NewMachine().Open() }

// As makes the fake answer as another tier.
func (f *Fake) As(t dsec.Tier) *Fake {
	f.tier = t
	return f
}

// Machine returns the machine it was opened on.
func (f *Fake) Machine() *Machine { return f.m }

var errClosed = errors.New("the runtime is closed")

// Close lets go of the machine. Its sandboxes run on.
func (f *Fake) Close() error {
	f.cancel(errClosed)
	f.done.Wait()
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	delete(f.m.open, f)
	return nil
}

func (f *Fake) kick() {
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

func (f *Fake) deliver() {
	for {
		f.mu.Lock()
		var next *runtime.Exit
		if len(f.queue) > 0 {
			next = &f.queue[0]
		}
		f.mu.Unlock()
		if next == nil {
			select {
			case <-f.wake:
				continue
			case <-f.ctx.Done():
				return
			}
		}
		select {
		case f.exits <- *next:
			f.mu.Lock()
			f.queue = f.queue[1:]
			f.mu.Unlock()
		case <-f.ctx.Done():
			return
		}
	}
}

// Tier is container unless As said otherwise.
func (f *Fake) Tier() dsec.Tier { return f.tier }

// Exits is the channel of unasked ends.
func (f *Fake) Exits() <-chan runtime.Exit { return f.exits }

// Probe always succeeds.
func (f *Fake) Probe(context.Context) runtime.Report {
	return runtime.Report{Tier: f.tier, OK: true, Checks: []runtime.Check{{Name: "memory", OK: true, Detail: "sandboxes in this process"}}}
}

// Create builds a sandbox. Its steps have the failpoints "fake.create.*".
func (f *Fake) Create(ctx context.Context, r runtime.Request) ([]dsec.Step, error) {
	profile, err := confine.ParseProfile(r.Spec.Profile)
	if err == nil {
		err = confine.Require(profile, f.Tier())
	}
	if err != nil {
		return nil, err
	}
	unlock, err := f.m.lock(ctx, r.ID)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if b := f.m.find(r.ID); b != nil {
		if !sameRequest(b.req, r) {
			return nil, dsec.Errorf(dsec.Conflict, "create sandbox", string(r.ID), "exists with another request")
		}
		return nil, nil
	}
	b := newBox(f.m, r)
	return lifecycle.Run(ctx, "fake.create",
		lifecycle.Step{Name: "root",
			Do: func(context.Context) error {
				f.m.mu.Lock()
				defer f.m.mu.Unlock()
				f.m.boxes[r.ID] = b
				return nil
			},
			Undo: func(context.Context) error { f.m.forget(r.ID); return nil }},
		lifecycle.Step{Name: "start", Do: b.start, Undo: func(context.Context) error { b.end(process.Killed); return nil }},
	)
}

func (m *Machine) forget(id dsec.SandboxID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.boxes, id)
}

func sameRequest(a, b runtime.Request) bool {
	x, _ := json.Marshal(a) // plain data
	y, _ := json.Marshal(b)
	return string(x) == string(y)
}

// locked runs fn on an existing sandbox in its turn.
func (f *Fake) locked(ctx context.Context, op string, id dsec.SandboxID, fn func(b *box) error) error {
	unlock, err := f.m.lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	b := f.m.find(id)
	if b == nil {
		return dsec.E(dsec.NotFound, op, string(id), nil)
	}
	return fn(b)
}

// Start runs a stopped sandbox again.
func (f *Fake) Start(ctx context.Context, id dsec.SandboxID) (steps []dsec.Step, err error) {
	err = f.locked(ctx, "start sandbox", id, func(b *box) error {
		if b.isRunning() {
			return nil
		}
		steps, err = lifecycle.Run(ctx, "fake.start",
			lifecycle.Step{Name: "start", Do: b.start, Undo: func(context.Context) error { b.end(process.Killed); return nil }})
		return err
	})
	return steps, err
}

// Stop ends the processes and acknowledges an Exit.
func (f *Fake) Stop(ctx context.Context, id dsec.SandboxID, grace time.Duration) error {
	return f.locked(ctx, "stop sandbox", id, func(b *box) error {
		if p := b.mainProcess(); p != nil && grace > 0 {
			b.expectEnd()
			b.clock.set(false)
			p.signal(syscall.SIGTERM)
			t := time.NewTimer(grace)
			defer t.Stop()
			select {
			case <-p.done:
			case <-t.C:
			case <-ctx.Done():
			}
		}
		b.end(process.Killed)
		b.acknowledge()
		return nil
	})
}

// Destroy removes everything of an id. Calls in flight end with SandboxGone.
func (f *Fake) Destroy(ctx context.Context, id dsec.SandboxID) error {
	if b := f.m.find(id); b != nil {
		b.destroy() // before its turn: an exec in flight must not hold it up
	}
	unlock, err := f.m.lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	if b := f.m.find(id); b != nil {
		b.destroy()
		f.m.forget(id)
	}
	return nil
}

// List tells of all sandboxes.
func (f *Fake) List(context.Context) ([]runtime.Status, error) {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	var out []runtime.Status
	for _, b := range f.m.boxes {
		out = append(out, b.status())
	}
	return out, nil
}

// running finds a sandbox that can be reached into.
func (f *Fake) running(op string, id dsec.SandboxID) (*box, error) {
	b := f.m.find(id)
	if b == nil {
		return nil, dsec.E(dsec.SandboxGone, op, string(id), nil)
	}
	if !b.isRunning() {
		return nil, dsec.Errorf(dsec.IllegalState, op, string(id), "the sandbox is not running")
	}
	return b, nil
}

// Stats samples.
func (f *Fake) Stats(_ context.Context, id dsec.SandboxID) (runtime.Stats, error) {
	b := f.m.find(id)
	if b == nil {
		return runtime.Stats{}, dsec.E(dsec.SandboxGone, "read stats", string(id), nil)
	}
	return b.stats(), nil
}

// Exec starts a command.
func (f *Fake) Exec(ctx context.Context, id dsec.SandboxID, s process.Spec) (process.Process, error) {
	b, err := f.running("exec", id)
	if err != nil {
		return nil, err
	}
	return b.exec(ctx, s)
}

// Process finds a command.
func (f *Fake) Process(_ context.Context, id dsec.SandboxID, exec string) (process.Process, error) {
	b := f.m.find(id)
	if b == nil {
		return nil, dsec.E(dsec.SandboxGone, "find command", string(id), nil)
	}
	return b.process(exec)
}

// Files opens the file service.
func (f *Fake) Files(_ context.Context, id dsec.SandboxID, user string) (files.FS, error) {
	b := f.m.find(id)
	if b == nil {
		return nil, dsec.E(dsec.SandboxGone, "open files", string(id), nil)
	}
	if user == "" {
		user = b.defaultUser()
	}
	u, err := b.fs.user(user)
	if err != nil {
		return nil, err
	}
	return &fsView{fs: b.fs, u: u, gone: b.gone}, nil
}

// Pause stops the sandbox's clock.
func (f *Fake) Pause(ctx context.Context, id dsec.SandboxID) error {
	return f.hold(ctx, "pause sandbox", id, true)
}

// Resume lets it go on.
func (f *Fake) Resume(ctx context.Context, id dsec.SandboxID) error {
	return f.hold(ctx, "resume sandbox", id, false)
}

func (f *Fake) hold(ctx context.Context, op string, id dsec.SandboxID, paused bool) error {
	return f.locked(ctx, op, id, func(b *box) error {
		if !b.isRunning() {
			return dsec.Errorf(dsec.IllegalState, op, string(id), "the sandbox is not running")
		}
		b.clock.set(paused)
		return nil
	})
}

// Dial connects to a listener that nc opened inside.
func (f *Fake) Dial(ctx context.Context, id dsec.SandboxID, port uint16) (net.Conn, error) {
	b, err := f.running("dial", id)
	if err != nil {
		return nil, err
	}
	return b.dial(ctx, port)
}

// Pack writes what was changed above the base. The fake knows no scrubbing.
func (f *Fake) Pack(ctx context.Context, id dsec.SandboxID, into image.Files, scrub dsec.Scrub) (packed dsec.Packed, err error) {
	const op = "pack disk of sandbox"
	err = f.locked(ctx, op, id, func(b *box) error {
		if scrub.Any() {
			return dsec.Errorf(dsec.Unsupported, op, string(id), "the fake leaves nothing out")
		}
		packed, err = b.fs.pack(into)
		return err
	})
	return packed, err
}

// Changes lists what was changed above the base.
func (f *Fake) Changes(ctx context.Context, id dsec.SandboxID, most int) (c dsec.Changes, err error) {
	err = f.locked(ctx, "compare disk of sandbox", id, func(b *box) error {
		c = b.fs.changes(most)
		return nil
	})
	return c, err
}
