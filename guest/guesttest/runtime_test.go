package guesttest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/confine"
	"github.com/opendsec/dsec/files"
	"github.com/opendsec/dsec/guest"
	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
)

// machines is what outlives a Runtime: a disk and some hardware for each sandbox.
type machines struct {
	dir string
	mu  sync.Mutex
	all map[dsec.SandboxID]*box
}

func newMachines(dir string) *machines {
	return &machines{dir: dir, all: map[dsec.SandboxID]*box{}}
}

// box is one sandbox.
type box struct {
	id   dsec.SandboxID
	turn chan struct{} // holds a token; who has it changes the box

	mu      sync.Mutex
	req     runtime.Request
	made    bool
	running bool
	paused  bool
	removed bool
	asked   bool // a stop is under way
	dir     string
	disk    string
	exit    *runtime.Exit // not acknowledged
	h       *hardware
	c       *guest.Client // of the present Runtime
}

// tier is a Runtime over agents without virtual machines.
type tier struct {
	m     *machines
	exits chan runtime.Exit
	life  context.Context
	end   context.CancelFunc
	tasks sync.WaitGroup
}

var (
	_ runtime.Runtime = (*tier)(nil)
	_ runtime.Execer  = (*tier)(nil)
	_ runtime.Filer   = (*tier)(nil)
	_ runtime.Pauser  = (*tier)(nil)
	_ runtime.Resumer = (*tier)(nil)
	_ runtime.Dialer  = (*tier)(nil)
)

// open is a new agent of the node over machines that run.
func (m *machines) open(ctx context.Context) (*tier, error) {
	r := &tier{m: m, exits: make(chan runtime.Exit, 1000)}
	r.life, r.end = context.WithCancel(context.Background())
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, b := range m.all {
		b.mu.Lock()
		if b.exit != nil {
			r.exits <- *b.exit
		}
		h, running := b.h, b.running
		b.mu.Unlock()
		if !running {
			continue
		}
		c, err := h.connect(ctx)
		if err != nil {
			return nil, err
		}
		b.mu.Lock()
		b.c = c
		b.mu.Unlock()
		r.watch(b, c)
	}
	return r, nil
}

func (r *tier) Tier() dsec.Tier { return dsec.TierMicroVM }

func (r *tier) Probe(context.Context) runtime.Report {
	return runtime.Report{Tier: r.Tier(), OK: true, Checks: []runtime.Check{{Name: "agent", OK: true, Detail: "in namespaces, for tests"}}}
}

func (r *tier) Exits() <-chan runtime.Exit { return r.exits }

func (r *tier) Close() error {
	r.end()
	r.m.mu.Lock()
	for _, b := range r.m.all {
		b.mu.Lock()
		if b.c != nil {
			_ = b.c.Close()
			b.c = nil
		}
		b.mu.Unlock()
	}
	r.m.mu.Unlock()
	r.tasks.Wait()
	return nil
}

// acquire takes the turn of a box; create makes one that is missing.
func (r *tier) acquire(ctx context.Context, op string, id dsec.SandboxID, create bool) (*box, func(), error) {
	for {
		r.m.mu.Lock()
		b := r.m.all[id]
		if b == nil && create {
			b = &box{id: id, turn: make(chan struct{}, 1), dir: filepath.Join(r.m.dir, string(id))}
			b.turn <- struct{}{}
			r.m.all[id] = b
		}
		r.m.mu.Unlock()
		if b == nil {
			return nil, nil, dsec.E(dsec.SandboxGone, op, string(id), nil)
		}
		select {
		case <-b.turn:
		case <-ctx.Done():
			return nil, nil, dsec.E(dsec.ClassOf(ctx.Err()), op, string(id), ctx.Err())
		}
		b.mu.Lock()
		removed := b.removed
		b.mu.Unlock()
		if !removed {
			return b, func() { b.turn <- struct{}{} }, nil
		}
		b.turn <- struct{}{}
	}
}

func (r *tier) Create(ctx context.Context, req runtime.Request) ([]dsec.Step, error) {
	const op = "create sandbox"
	if err := ctx.Err(); err != nil {
		return nil, dsec.E(dsec.ClassOf(err), op, string(req.ID), err)
	}
	profile, err := confine.ParseProfile(req.Spec.Profile)
	if err != nil {
		return nil, dsec.E(dsec.Invalid, op, string(req.ID), err)
	}
	if err := confine.Require(profile, r.Tier()); err != nil {
		return nil, err
	}
	if more := capsOf(profile) & guest.Withheld; more != 0 {
		return nil, dsec.Errorf(dsec.Unsupported, op, string(req.ID), "the profile %s has capabilities %#x that no guest gives", profile, more)
	}
	if len(req.Spec.Phases) > 0 {
		return nil, dsec.Errorf(dsec.Unsupported, op, string(req.ID), "tier %s has no phases", r.Tier())
	}
	b, done, err := r.acquire(ctx, op, req.ID, true)
	if err != nil {
		return nil, err
	}
	defer done()
	b.mu.Lock()
	made, was := b.made, b.req
	b.mu.Unlock()
	if made {
		have, _ := json.Marshal(was)
		want, _ := json.Marshal(req)
		if string(have) != string(want) {
			return nil, dsec.Errorf(dsec.Conflict, op, string(req.ID), "it exists and was asked for differently")
		}
		return nil, nil
	}
	b.mu.Lock()
	b.req = req
	b.mu.Unlock()
	began := time.Now()
	err = os.Mkdir(b.dir, 0o755)
	if err == nil {
		b.disk, err = makeDisk(b.dir, req.Spec.Limits.Disk)
	}
	if err == nil {
		err = r.boot(ctx, b, true)
	}
	if err != nil {
		return nil, errors.Join(r.wrap(op, b, err), r.remove(b))
	}
	b.mu.Lock()
	b.made = true
	b.mu.Unlock()
	return []dsec.Step{{Name: "boot", Took: time.Since(began)}}, nil
}

func (r *tier) wrap(op string, b *box, err error) error {
	if e, ok := errors.AsType[*dsec.Error](err); ok {
		return e
	}
	return dsec.E(dsec.ClassOf(err), op, string(b.id), err)
}

// boot powers a box on; run says that it is for its commands and not only its files.
func (r *tier) boot(ctx context.Context, b *box, run bool) (err error) {
	s := b.req.Spec
	h, err := powerOn(string(b.id), b.dir, b.disk, cgroup.Limits{Memory: s.Limits.Memory, Pids: s.Limits.Pids, Devices: cgroup.DefaultDevices()})
	if err != nil {
		return err
	}
	var c *guest.Client
	defer func() {
		if err != nil {
			if c != nil {
				_ = c.Close()
			}
			err = errors.Join(err, h.powerOff())
		}
	}()
	limited, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	if c, err = h.connect(limited); err != nil {
		return fmt.Errorf("%w; its log: %s", err, h.log())
	}
	if err := c.Resume(limited, guest.Resume{Seed: seed(), Hostname: "box"}); err != nil {
		return err
	}
	m := h.mountOf()
	m.Limits.Memory, m.Limits.Pids = s.Limits.Memory, s.Limits.Pids
	m.Defaults = guest.Defaults{User: s.User, Cwd: s.Workdir, Env: s.Env}
	if err := c.Mount(limited, m); err != nil {
		return err
	}
	b.mu.Lock()
	b.h, b.c, b.asked, b.paused, b.running = h, c, false, false, run
	b.mu.Unlock()
	if !run {
		return nil
	}
	if len(s.Command) > 0 {
		if _, err := c.Exec(limited, r.command(b, process.Spec{ID: "main", Argv: s.Command})); err != nil {
			b.mu.Lock()
			b.running = false
			b.mu.Unlock()
			return err
		}
	}
	r.watch(b, c)
	return nil
}

// capsOf a profile but MKNOD, which in a container makes nothing that can be
// opened, and in a machine would.
func capsOf(p confine.Profile) uint64 {
	return uint64(confine.Capabilities(p)) &^ (1 << unix.CAP_MKNOD)
}

func (r *tier) command(b *box, s process.Spec) guest.Exec {
	p, _ := confine.ParseProfile(b.req.Spec.Profile) // was looked at
	return guest.Exec{Command: guest.NewCommand(s), Caps: capsOf(p), NoNewPrivs: b.req.Spec.NoNewPrivs, OOMScoreAdj: confine.OOMScoreAdj}
}

// watch ends a box with its main command or its PID 1.
func (r *tier) watch(b *box, c *guest.Client) {
	r.tasks.Go(func() {
		why, err := c.Ended(r.life)
		if err == nil {
			r.ended(b, c, runtime.Exit{ID: b.id, Cause: dsec.CauseAgentDamage, By: dsec.InducedBySelf, Evidence: []string{why}})
		}
	})
	r.tasks.Go(func() {
		ids, err := c.List(r.life)
		for _, id := range ids {
			if p, perr := c.Process(r.life, id); perr == nil && err == nil {
				r.watchCommand(b, c, p)
			}
		}
	})
}

func (r *tier) watchCommand(b *box, c *guest.Client, p process.Process) {
	s := b.req.Spec
	isMain := p.Spec().ID == "main" && len(s.Command) > 0
	if !isMain && s.OOM != dsec.OOMSandbox {
		return
	}
	r.tasks.Go(func() {
		res, err := p.Wait(r.life)
		if err != nil || res.Status == process.Killed {
			return
		}
		x := runtime.Exit{ID: b.id, Cause: dsec.CauseCompleted, By: dsec.InducedBySelf, Evidence: []string{fmt.Sprintf("the main process exited with %d", res.ExitCode)}}
		switch {
		case res.OOM:
			x.Cause, x.Evidence = dsec.CauseOOM, []string{fmt.Sprintf("limit %d bytes, peak %d bytes", res.OOMLimit, res.OOMPeak)}
		case !isMain:
			return
		case res.Signal != 0:
			x.Cause = dsec.CauseAgentError
		}
		r.ended(b, c, x)
	})
}

func (r *tier) ended(b *box, c *guest.Client, x runtime.Exit) {
	b.mu.Lock()
	if !b.running || b.asked || b.c != c {
		b.mu.Unlock()
		return
	}
	b.running, b.exit = false, &x
	h := b.h
	b.mu.Unlock()
	r.exits <- x
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_ = c.Shutdown(ctx, 0) // the disk is as it is
	_ = h.powerOff()       // again when it is stopped
}

// off ends the machine of a box, if it has one.
func (r *tier) off(b *box, grace time.Duration) error {
	b.mu.Lock()
	h, c, running := b.h, b.c, b.running
	b.asked = true
	b.mu.Unlock()
	if h == nil {
		return nil
	}
	if c != nil {
		ctx, cancel := context.WithTimeout(context.Background(), grace+10*time.Second)
		if running {
			_ = c.Shutdown(ctx, grace) // the machine goes in any case
		}
		cancel()
		_ = c.Close()
	}
	err := h.powerOff()
	b.mu.Lock()
	b.h, b.c, b.running, b.paused = nil, nil, false, false
	b.mu.Unlock()
	return err
}

func (r *tier) Stop(ctx context.Context, id dsec.SandboxID, grace time.Duration) error {
	b, done, err := r.acquire(ctx, "stop sandbox", id, false)
	if err != nil {
		return err
	}
	defer done()
	err = r.off(b, grace)
	b.mu.Lock()
	b.exit = nil
	b.mu.Unlock()
	return r.wrapOr("stop sandbox", b, err)
}

func (r *tier) wrapOr(op string, b *box, err error) error {
	if err == nil {
		return nil
	}
	return r.wrap(op, b, err)
}

func (r *tier) Start(ctx context.Context, id dsec.SandboxID) ([]dsec.Step, error) {
	const op = "start sandbox"
	b, done, err := r.acquire(ctx, op, id, false)
	if err != nil {
		return nil, err
	}
	defer done()
	b.mu.Lock()
	running := b.running
	b.mu.Unlock()
	if running {
		return nil, nil
	}
	began := time.Now()
	if err := r.off(b, 0); err != nil { // a file service
		return nil, r.wrap(op, b, err)
	}
	if err := r.boot(ctx, b, true); err != nil {
		return nil, r.wrap(op, b, err)
	}
	return []dsec.Step{{Name: "boot", Took: time.Since(began)}}, nil
}

func (r *tier) Destroy(ctx context.Context, id dsec.SandboxID) error {
	b, done, err := r.acquire(ctx, "destroy sandbox", id, false)
	if errors.Is(err, dsec.SandboxGone.Err()) {
		return nil
	}
	if err != nil {
		return err
	}
	defer done()
	return r.wrapOr("destroy sandbox", b, r.remove(b))
}

func (r *tier) remove(b *box) error {
	b.mu.Lock()
	b.removed = true
	b.mu.Unlock()
	err := r.off(b, 0)
	if b.disk != "" {
		err = errors.Join(err, unix.Unmount(b.disk, 0))
	}
	r.m.mu.Lock()
	delete(r.m.all, b.id)
	r.m.mu.Unlock()
	return errors.Join(err, os.RemoveAll(b.dir))
}

// client of a box that runs.
func (r *tier) client(op string, id dsec.SandboxID) (*box, *guest.Client, error) {
	r.m.mu.Lock()
	b := r.m.all[id]
	r.m.mu.Unlock()
	if b == nil {
		return nil, nil, dsec.E(dsec.SandboxGone, op, string(id), nil)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.running || b.c == nil {
		return nil, nil, dsec.Errorf(dsec.IllegalState, op, string(id), "it does not run")
	}
	return b, b.c, nil
}

// translate: a guest that does not answer is one that was turned off.
func (b *box) translate(op string, err error) error {
	if err == nil || !errors.Is(err, dsec.Unavailable.Err()) {
		return err
	}
	b.mu.Lock()
	gone := !b.running || b.removed || b.asked
	b.mu.Unlock()
	if gone {
		return dsec.E(dsec.SandboxGone, op, string(b.id), err)
	}
	return err
}

func (r *tier) Exec(ctx context.Context, id dsec.SandboxID, s process.Spec) (process.Process, error) {
	b, c, err := r.client("exec in sandbox", id)
	if err != nil {
		return nil, err
	}
	if s.ID == "" {
		s.ID = dsec.Random(20)
	}
	p, err := c.Exec(ctx, r.command(b, s))
	if err != nil {
		return nil, b.translate("exec in sandbox", err)
	}
	r.watchCommand(b, c, p)
	return &command{p, b}, nil
}

func (r *tier) Process(ctx context.Context, id dsec.SandboxID, exec string) (process.Process, error) {
	b, c, err := r.client("find command", id)
	if err != nil {
		return nil, err
	}
	p, err := c.Process(ctx, exec)
	if err != nil {
		return nil, b.translate("find command", err)
	}
	return &command{p, b}, nil
}

func (r *tier) Files(ctx context.Context, id dsec.SandboxID, user string) (files.FS, error) {
	const op = "open files"
	b, done, err := r.acquire(ctx, op, id, false)
	if err != nil {
		return nil, err
	}
	defer done()
	b.mu.Lock()
	running, c := b.running, b.c
	b.mu.Unlock()
	if !running {
		if err := r.off(b, 0); err != nil {
			return nil, r.wrap(op, b, err)
		}
		if err := r.boot(ctx, b, false); err != nil {
			return nil, r.wrap(op, b, err)
		}
		c = b.c
	}
	fs, err := c.Files(ctx, user)
	if err != nil {
		return nil, err
	}
	return &service{fs, b}, nil
}

func (r *tier) Dial(ctx context.Context, id dsec.SandboxID, port uint16) (net.Conn, error) {
	_, c, err := r.client("dial", id)
	if err != nil {
		return nil, err
	}
	return c.Dial(ctx, port)
}

func (r *tier) Pause(ctx context.Context, id dsec.SandboxID) error {
	b, c, err := r.client("pause sandbox", id)
	if err != nil {
		return err
	}
	if err := c.Freeze(ctx, false); err != nil {
		return err
	}
	b.mu.Lock()
	b.paused = true
	b.mu.Unlock()
	return nil
}

func (r *tier) Resume(ctx context.Context, id dsec.SandboxID) error {
	b, c, err := r.client("resume sandbox", id)
	if err != nil {
		return err
	}
	if err := c.Resume(ctx, guest.Resume{Seed: seed()}); err != nil {
		return err
	}
	b.mu.Lock()
	b.paused = false
	b.mu.Unlock()
	return nil
}

// Stats are what the guest says, and what is measured from outside.
func (r *tier) Stats(ctx context.Context, id dsec.SandboxID) (runtime.Stats, error) {
	b, c, err := r.client("read stats", id)
	if err != nil {
		return runtime.Stats{}, err
	}
	s, err := c.Stats(ctx)
	if err != nil {
		return runtime.Stats{}, b.translate("read stats", err)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.h == nil {
		return runtime.Stats{}, dsec.E(dsec.SandboxGone, "read stats", string(id), nil)
	}
	g, err := b.h.group.Stats()
	if err != nil {
		return runtime.Stats{}, r.wrap("read stats", b, err)
	}
	l := b.req.Spec.Limits
	return runtime.Stats{CPU: s.CPU, Memory: g.Memory, MemoryPeak: g.MemoryPeak, MemoryLimit: l.Memory, Pids: s.Pids, PidsLimit: l.Pids,
		Disk: s.Disk, DiskLimit: l.Disk, OOMKills: s.OOMKills}, nil
}

func (r *tier) List(ctx context.Context) ([]runtime.Status, error) {
	r.m.mu.Lock()
	var all []*box
	for _, b := range r.m.all {
		all = append(all, b)
	}
	r.m.mu.Unlock()
	var out []runtime.Status
	for _, b := range all {
		b.mu.Lock()
		s, made, c := runtime.Status{ID: b.id, Running: b.running, Paused: b.paused}, b.made, b.c
		b.mu.Unlock()
		if !made {
			continue
		}
		if s.Running && c != nil {
			var err error
			if s.Execs, err = c.List(ctx); err != nil {
				b.mu.Lock()
				s.Running = b.running
				b.mu.Unlock()
			}
		}
		out = append(out, s)
	}
	return out, nil
}
