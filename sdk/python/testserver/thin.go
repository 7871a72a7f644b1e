package main

import (
	"context"
	"net"
	"sync"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/files"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/node"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/runtimetest"
)

// thinNode is a node without ledger or admission, over the fake tier.
type thinNode struct {
	rt *runtimetest.Fake

	mu     sync.Mutex
	boxes  map[dsec.SandboxID]*node.Sandbox
	byKey  map[string]dsec.SandboxID
	events []dsec.Event
	grew   chan struct{} // closed and replaced when events grew
	full   bool          // refuse to create
}

func newThinNode() *thinNode {
	return &thinNode{rt: runtimetest.NewFake(), boxes: map[dsec.SandboxID]*node.Sandbox{}, byKey: map[string]dsec.SandboxID{},
		grew: make(chan struct{})}
}

// moveLocked changes a state and says so.
func (n *thinNode) moveLocked(sb *node.Sandbox, to dsec.State) {
	n.events = append(n.events, dsec.Event{Sandbox: sb.ID, Seq: uint64(len(n.events) + 1), Time: time.Now(),
		Type: dsec.EventState, From: sb.State, To: to})
	sb.State = to
	close(n.grew)
	n.grew = make(chan struct{})
}

func (n *thinNode) Create(ctx context.Context, project string, s dsec.Spec) (node.Sandbox, error) {
	n.mu.Lock()
	if n.full {
		n.mu.Unlock()
		return node.Sandbox{}, dsec.Errorf(dsec.ResourceExhausted, "create sandbox", "", "the node is full")
	}
	if id, ok := n.byKey[project+s.CallID]; ok {
		defer n.mu.Unlock()
		return *n.boxes[id], nil
	}
	id := dsec.NewSandboxID("nodea")
	n.byKey[project+s.CallID] = id
	sb := &node.Sandbox{ID: id, Project: project, Spec: s, State: dsec.Creating, Created: time.Now(), Starts: 1}
	n.boxes[id] = sb
	n.mu.Unlock()
	if s.Image == "missing" {
		return node.Sandbox{}, dsec.Errorf(dsec.NotFound, "acquire layer", string(s.Image), "no such tag")
	}
	steps, err := n.rt.Create(ctx, runtime.Request{ID: id, Spec: s, Layers: layer.Set{Lease: string(id)}})
	if err != nil {
		return node.Sandbox{}, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	sb.Steps = steps
	n.moveLocked(sb, dsec.Running)
	return *sb, nil
}

func (n *thinNode) Get(_ context.Context, id dsec.SandboxID) (node.Sandbox, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if sb := n.boxes[id]; sb != nil {
		return *sb, nil
	}
	return node.Sandbox{}, dsec.Errorf(dsec.NotFound, "find sandbox", string(id), "no such sandbox")
}

func (n *thinNode) List(_ context.Context, f node.Filter) (out []node.Sandbox, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, sb := range n.boxes {
		if (f.Project == "" || f.Project == sb.Project) && (f.All || sb.State.Live()) {
			out = append(out, *sb)
		}
	}
	return out, nil
}

func (n *thinNode) change(id dsec.SandboxID, to dsec.State, fn func() error) (node.Sandbox, error) {
	if err := fn(); err != nil {
		return node.Sandbox{}, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.moveLocked(n.boxes[id], to)
	return *n.boxes[id], nil
}

func (n *thinNode) Start(ctx context.Context, id dsec.SandboxID, _ string) (node.Sandbox, error) {
	return n.change(id, dsec.Running, func() error { _, err := n.rt.Start(ctx, id); return err })
}

func (n *thinNode) Stop(ctx context.Context, id dsec.SandboxID, c dsec.Cause, _ string) (node.Sandbox, error) {
	n.mu.Lock()
	n.boxes[id].Result = dsec.NewResult(c, "stop", dsec.InducedBySelf)
	n.mu.Unlock()
	return n.change(id, dsec.Stopped, func() error { return n.rt.Stop(ctx, id, 0) })
}

func (n *thinNode) Delete(ctx context.Context, id dsec.SandboxID, _ string) (bool, error) {
	n.mu.Lock()
	existed := n.boxes[id].State != dsec.Deleted
	n.mu.Unlock()
	_, err := n.change(id, dsec.Deleted, func() error { return n.rt.Destroy(ctx, id) })
	return existed, err
}

func (n *thinNode) Pause(ctx context.Context, id dsec.SandboxID, _ string) (node.Sandbox, error) {
	return n.change(id, dsec.Paused, func() error { return n.rt.Pause(ctx, id) })
}

func (n *thinNode) Resume(ctx context.Context, id dsec.SandboxID, _ string) (node.Sandbox, error) {
	return n.change(id, dsec.Running, func() error { return n.rt.Resume(ctx, id) })
}

func (n *thinNode) Renew(ctx context.Context, id dsec.SandboxID, _ time.Duration, _ string) (node.Sandbox, error) {
	return n.Get(ctx, id)
}

func (n *thinNode) Commit(context.Context, dsec.SandboxID, string, string) (string, error) {
	return "sha256:0", nil
}

func (n *thinNode) Exec(ctx context.Context, id dsec.SandboxID, s process.Spec) (process.Process, error) {
	return n.rt.Exec(ctx, id, s)
}

func (n *thinNode) Process(ctx context.Context, id dsec.SandboxID, exec string) (process.Process, error) {
	return n.rt.Process(ctx, id, exec)
}

func (n *thinNode) Files(ctx context.Context, id dsec.SandboxID, user string) (files.FS, error) {
	return n.rt.Files(ctx, id, user)
}

func (n *thinNode) Dial(ctx context.Context, id dsec.SandboxID, port uint16) (net.Conn, error) {
	return n.rt.Dial(ctx, id, port)
}

func (n *thinNode) Stats(ctx context.Context, id dsec.SandboxID) (runtime.Stats, error) {
	return n.rt.Stats(ctx, id)
}

func (n *thinNode) Attach(dsec.SandboxID) func() { return func() {} }

func (n *thinNode) Events(ctx context.Context, f node.Filter, since time.Time, fn func(dsec.Event) error) error {
	for at := 0; ; {
		n.mu.Lock()
		news, grew := n.events[at:], n.grew
		at = len(n.events)
		n.mu.Unlock()
		for _, e := range news {
			sb, _ := n.Get(ctx, e.Sandbox)
			if e.Time.Before(since) || f.Project != "" && f.Project != sb.Project {
				continue
			}
			if err := fn(e); err != nil {
				return err
			}
		}
		select {
		case <-grew:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (n *thinNode) Load() node.Load {
	n.mu.Lock()
	defer n.mu.Unlock()
	live := 0
	for _, sb := range n.boxes {
		if sb.State.Live() {
			live++
		}
	}
	return node.Load{Live: live, MaxLive: 10_000, Tiers: []dsec.Tier{dsec.TierContainer}}
}
