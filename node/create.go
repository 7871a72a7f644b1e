package node

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/lifecycle"
)

const (
	maxCallID   = 256
	undoLimit   = 30 * time.Second // of finishing or undoing one thing
	abandonedIn = time.Minute      // a sandbox whose creator left has to be asked for
)

// creation is a Create at work. Calls with the same key share it.
type creation struct {
	hash string
	done chan struct{} // closed when sb and err are set
	sb   Sandbox
	err  error

	mu      sync.Mutex
	waiting int // callers
}

// Create implements Service. With a call id a creation goes on when its caller
// goes away, because the caller will ask again with the same id; if nobody
// does, the sandbox is removed a minute after it is ready. Without one it is
// undone at once. A creation that failed is not remembered: the same id tries
// again.
func (n *Node) Create(ctx context.Context, project string, s dsec.Spec) (Sandbox, error) {
	if err := n.check(&s); err != nil {
		return Sandbox{}, err
	}
	hash := hashOf(s)
	if s.CallID == "" {
		c := &creation{hash: hash, done: make(chan struct{}), waiting: 1}
		return n.wait(ctx, c, n.begin(ctx, c, project, s, nil))
	}
	key := callKey(project, s.CallID)
	n.mu.Lock()
	c := n.creations[string(key)]
	if c == nil {
		c = &creation{hash: hash, done: make(chan struct{})}
		n.creations[string(key)] = c
		c.waiting++
		n.mu.Unlock()
		n.begin(ctx, c, project, s, key)
		return n.wait(ctx, c, nil)
	}
	n.mu.Unlock()
	if c.hash != hash {
		return Sandbox{}, conflict(s.CallID)
	}
	c.mu.Lock()
	c.waiting++
	c.mu.Unlock()
	return n.wait(ctx, c, nil)
}

func conflict(callID string) error {
	return dsec.Errorf(dsec.Conflict, "use call id", dsec.Quote(callID), "it was used with other parameters")
}

// hashOf names what was asked for.
func hashOf(v any) string {
	b, err := json.Marshal(v)
	if err != nil { // plain data
		panic(err)
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// check refuses what can never work, before anything is done.
func (n *Node) check(s *dsec.Spec) error {
	if err := s.Validate(); err != nil {
		return err
	}
	if len(s.CallID) > maxCallID {
		return dsec.Errorf(dsec.Invalid, "validate spec", "call_id", "%d bytes, at most %d", len(s.CallID), maxCallID)
	}
	rt, err := n.runtimeOf(s)
	if err != nil {
		return err
	}
	if err := errors.Join(checkPhases(s, rt), n.checkCheckpoint(s, rt)); err != nil {
		return err
	}
	mounts := make([]dsec.HostMount, len(s.Mounts)) // not the caller's
	for i, m := range s.Mounts {
		real, err := n.mountSource(m.Source)
		if err != nil {
			return err
		}
		mounts[i] = dsec.HostMount{Source: real, Target: m.Target}
	}
	if len(mounts) > 0 {
		s.Mounts = mounts
	}
	return nil
}

// mountSource resolves a host path and holds it against the allowed roots.
func (n *Node) mountSource(p string) (string, error) {
	real, err := filepath.EvalSymlinks(p)
	if err != nil {
		return "", dsec.E(dsec.Invalid, "mount host path", dsec.Quote(p), err)
	}
	for _, root := range n.cfg.MountRoots {
		if real == root || strings.HasPrefix(real, strings.TrimSuffix(root, "/")+"/") {
			return real, nil
		}
	}
	return "", dsec.Errorf(dsec.PermissionDenied, "mount host path", dsec.Quote(p), "not under a directory that this node allows")
}

// begin starts a creation and returns how to cancel it.
func (n *Node) begin(ctx context.Context, c *creation, project string, s dsec.Spec, key []byte) context.CancelCauseFunc {
	cctx, cancel := context.WithCancelCause(n.ctx)
	run := func() {
		defer cancel(nil)
		tctx, stop := context.WithTimeout(cctx, n.cfg.StartTime)
		defer stop()
		c.sb, c.err = n.createOrFind(tctx, cancel, c, project, s, key)
		n.mu.Lock()
		delete(n.creations, string(key))
		n.mu.Unlock()
		close(c.done)
	}
	if !n.spawn(run) {
		cancel(nil)
		c.err = dsec.E(dsec.Unavailable, "create sandbox", "", ErrClosed)
		n.mu.Lock()
		delete(n.creations, string(key))
		n.mu.Unlock()
		close(c.done)
	}
	return cancel
}

// spawn runs fn unless the node is closed.
func (n *Node) spawn(fn func()) bool {
	n.mu.RLock()
	defer n.mu.RUnlock()
	if n.ctx.Err() != nil {
		return false
	}
	n.wg.Go(fn)
	return true
}

// wait waits for a creation; cancel, if not nil, ends it when ctx does.
func (n *Node) wait(ctx context.Context, c *creation, cancel context.CancelCauseFunc) (Sandbox, error) {
	select {
	case <-c.done:
		return c.sb, c.err
	case <-ctx.Done():
	}
	if cancel != nil {
		cancel(context.Cause(ctx))
		<-c.done
		return c.sb, c.err
	}
	c.mu.Lock()
	c.waiting--
	c.mu.Unlock()
	return Sandbox{}, dsec.Errorf(dsec.ClassOf(ctx.Err()), "create sandbox", "", "it goes on; ask again with the same call id: %w", ctx.Err())
}

func (n *Node) createOrFind(ctx context.Context, cancel context.CancelCauseFunc, c *creation, project string, s dsec.Spec, key []byte) (Sandbox, error) {
	if key != nil {
		old, err := n.ledger.findCall(key)
		if err != nil {
			return Sandbox{}, err
		}
		if old != nil {
			if old.Hash != c.hash || old.Verb != "create" {
				return Sandbox{}, conflict(s.CallID)
			}
			id := dsec.SandboxID(old.Answer)
			if b := n.find(id); b != nil {
				b.touch()
			}
			return n.Get(ctx, id)
		}
	}
	b, err := n.admit(project, s, c.hash, cancel)
	if err != nil {
		n.cfg.Metrics.created(err, nil)
		return Sandbox{}, err
	}
	defer b.unlock()
	steps, err := n.create(ctx, b, key)
	n.cfg.Metrics.created(err, steps)
	if err != nil {
		return Sandbox{}, n.failCreation(ctx, b, key, steps, err)
	}
	c.mu.Lock()
	left := key != nil && c.waiting == 0
	c.mu.Unlock()
	if left {
		b.mu.Lock()
		b.abandoned = n.cfg.Clock()
		b.mu.Unlock()
	}
	return b.sandbox(), nil
}

// admit takes the budget and the name, and returns the box with its turn held.
func (n *Node) admit(project string, s dsec.Spec, hash string, cancel context.CancelCauseFunc) (*box, error) {
	rt, err := n.runtimeOf(&s)
	if err != nil {
		return nil, err
	}
	if err := diskFailed(n.ctx, rt); err != nil {
		return nil, dsec.E(dsec.Unavailable, "admit sandbox", string(n.cfg.ID), err)
	}
	n.mu.RLock()
	draining := n.draining
	n.mu.RUnlock()
	if draining {
		return nil, dsec.Errorf(dsec.Unavailable, "admit sandbox", string(n.cfg.ID), "the node is draining")
	}
	n.cfg.fillSpec(&s)
	if err := s.Validate(); err != nil { // limits of phases, against those it gets
		return nil, err
	}
	id := dsec.NewSandboxID(n.cfg.ID)
	if s.Hostname == "" {
		s.Hostname = string(id)
	}
	s.Hostname = dsec.ShortHostname(s.Hostname)
	now := n.cfg.Clock().UTC()
	b := n.newBox(record{ID: id, Project: project, Spec: s, State: dsec.Pending, Intent: intentCreate, Created: now, Changed: now,
		Active: now, SpecHash: hash, Phase: firstPhase(&s, now)}, rt)
	b.cancel = cancel
	b.turn <- struct{}{}
	if err := n.takeName(project, s.Name, id); err != nil {
		return nil, err
	}
	if err := n.budget.take(s.Limits, &b.held, share{run: true, disk: true}); err != nil {
		n.freeName(b)
		return nil, err
	}
	n.mu.Lock()
	n.boxes[id] = b
	n.mu.Unlock()
	n.cfg.Metrics.moved("", dsec.Pending)
	return b, nil
}

// create does everything, or nothing but the record.
func (n *Node) create(ctx context.Context, b *box, key []byte) ([]dsec.Step, error) {
	var built []dsec.Step
	times, err := lifecycle.Run(ctx, "node.create",
		lifecycle.Step{Name: "ledger", Do: func(context.Context) error { return b.move(nil, nil) }},
		lifecycle.Step{Name: "queue", Do: n.starts.enter, Undo: func(context.Context) error { n.starts.leave(); return nil }},
		lifecycle.Step{Name: "build", Do: func(ctx context.Context) (err error) {
			b.applied(nil, []dsec.State{dsec.Creating}) // the ledger says pending: the same to whoever finds it
			built, err = n.buildTwice(ctx, b, key)
			return err
		}, Undo: func(ctx context.Context) error {
			return errors.Join(b.leaves(b.rt.Destroy(ctx, b.id)), n.release(ctx, b))
		}},
	)
	if err == nil {
		n.starts.leave()
	}
	for i, s := range times {
		if s.Name == "build" {
			times = append(times[:i], built...)
		}
	}
	if err == nil {
		b.applied(func(r *record) { n.setRunning(r, times) }, []dsec.State{dsec.Running})
		n.trackMain(ctx, b)
	}
	return times, err
}

// leaves notes that something was not undone.
func (b *box) leaves(err error) error {
	if err != nil {
		b.left = true
	}
	return err
}

// release ends the lease, on a context that outlives a cancelled one.
func (n *Node) release(ctx context.Context, b *box) error {
	rctx, stop := n.detached(ctx, lifecycle.UndoLimit)
	defer stop()
	return b.leaves(n.cfg.Store.Release(rctx, string(b.id)))
}

// ready writes that the sandbox runs, and the call that made it. In memory it
// runs when every step is done.
func (n *Node) ready(b *box, key []byte) error {
	b.mu.Lock()
	next := b.rec
	err := b.step(&next, func(r *record) { n.setRunning(r, nil) }, []dsec.State{dsec.Running})
	ops := []op{putLive(&next)}
	if b.blames != b.blamesIn { // by an attempt before this one
		put, _ := b.putBlame()
		ops = append(ops, put)
	}
	if key != nil {
		ops = append(ops, putCall(key, call{Verb: "create", Hash: b.rec.SpecHash, Answer: string(b.id), At: n.cfg.Clock().UTC()}))
	}
	b.mu.Unlock()
	if err != nil {
		return err
	}
	return n.ledger.commit(ops...)
}

func (n *Node) setRunning(r *record, steps []dsec.Step) {
	r.Intent, r.Started, r.Starts, r.Steps = intentNone, r.Changed, 1, steps
	if l := r.Spec.Lifetimes.Lifetime; l > 0 {
		r.Expires = r.Changed.Add(l)
	}
}
