package cluster

import (
	"context"
	"net/http"
	"sort"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
	"github.com/opendsec/dsec/scheduler"
)

// registry is every node that ever registered.
type registry struct {
	mu    sync.Mutex
	nodes map[dsec.NodeID]*member
}

// member is one node. Its life is a context that ends when its heartbeats do, or
// when its agent has started again.
type member struct {
	id       dsec.NodeID
	reg      *dsecv1.Registration // nil until seen
	beat     *dsecv1.Heartbeat    // nil until seen
	seen     time.Time            // when the last heartbeat came, by our clock
	inFlight int                  // placed since the last heartbeat
	life     context.Context      // nil: dead
	end      context.CancelCauseFunc
	data     *http.Transport // to the address of reg
}

func (c *Cluster) member(id dsec.NodeID) *member {
	m := c.reg.nodes[id]
	if m == nil {
		m = &member{id: id}
		c.reg.nodes[id] = m
	}
	return m
}

// follow watches both buckets until Close.
func (c *Cluster) follow() error {
	for _, w := range []struct {
		kv jetstream.KeyValue
		fn func(id dsec.NodeID, value []byte)
	}{{c.nodes, c.registered}, {c.hb, c.beat}} {
		watcher, err := w.kv.WatchAll(c.ctx, jetstream.IgnoreDeletes())
		if err != nil {
			return dsec.E(dsec.Unavailable, "watch bucket", w.kv.Bucket(), err)
		}
		c.wg.Go(func() { c.watch(watcher, w.fn) })
	}
	c.wg.Go(c.reap)
	return nil
}

func (c *Cluster) watch(w jetstream.KeyWatcher, fn func(id dsec.NodeID, value []byte)) {
	defer func() { _ = w.Stop() }()
	for {
		select {
		case <-c.ctx.Done():
			return
		case e, ok := <-w.Updates():
			if !ok {
				return
			}
			if e == nil { // end of what was there at the start
				continue
			}
			if id, err := dsec.ParseNodeID(e.Key()); err == nil {
				fn(id, e.Value())
			}
		}
	}
}

func (c *Cluster) registered(id dsec.NodeID, value []byte) {
	r := &dsecv1.Registration{}
	if err := proto.Unmarshal(value, r); err != nil || r.Node != string(id) {
		c.log.Warn("bad registration", "node", id, "err", err)
		return
	}
	c.reg.mu.Lock()
	defer c.reg.mu.Unlock()
	m := c.member(id)
	if m.reg != nil && r.Epoch < m.reg.Epoch {
		return
	}
	if m.reg != nil && r.Epoch > m.reg.Epoch && m.life != nil {
		// Who waits for an answer of the process before would wait for ever.
		m.end(dsec.Errorf(dsec.Unavailable, "call node", string(id), "its agent has started again"))
		c.live(m, r.Epoch)
	}
	if m.data != nil {
		m.data.CloseIdleConnections()
	}
	m.reg, m.data = r, dataTransport(r)
	c.log.Info("node registered", "node", id, "epoch", r.Epoch)
}

func (c *Cluster) beat(id dsec.NodeID, value []byte) {
	h := &dsecv1.Heartbeat{}
	if err := proto.Unmarshal(value, h); err != nil || h.Node != string(id) {
		c.log.Warn("bad heartbeat", "node", id, "err", err)
		return
	}
	c.reg.mu.Lock()
	defer c.reg.mu.Unlock()
	m := c.member(id)
	if m.beat != nil && h.Epoch < m.beat.Epoch {
		return
	}
	m.beat, m.seen, m.inFlight = h, time.Now(), 0
	if m.life == nil {
		c.live(m, h.Epoch)
	}
}

// live begins a life of a node. reg.mu is held.
func (c *Cluster) live(m *member, epoch uint64) {
	m.life, m.end = context.WithCancelCause(c.ctx)
	m.seen = time.Now()
	c.log.Info("node alive", "node", m.id, "epoch", epoch)
	life, id := m.life, m.id
	c.wg.Go(func() { c.indexNode(life, id) })
}

// reap ends the lives of nodes whose heartbeats stopped.
func (c *Cluster) reap() {
	tick := time.NewTicker(c.cfg.DeadAfter / 10)
	defer tick.Stop()
	for {
		select {
		case <-c.ctx.Done():
			return
		case now := <-tick.C:
			c.bury(now)
		}
	}
}

func (c *Cluster) bury(now time.Time) {
	c.reg.mu.Lock()
	defer c.reg.mu.Unlock()
	for id, m := range c.reg.nodes {
		if m.life == nil || now.Sub(m.seen) <= c.cfg.DeadAfter {
			continue
		}
		c.log.Warn("node dead", "node", id, "silent", now.Sub(m.seen))
		m.end(dsec.Errorf(dsec.Unavailable, "call node", string(id), "no heartbeat for %v", c.cfg.DeadAfter))
		m.life, m.end = nil, nil
	}
}

func (r *registry) closeAll() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, m := range r.nodes {
		if m.data != nil {
			m.data.CloseIdleConnections()
		}
	}
}

// Nodes lists the nodes, by id.
func (c *Cluster) Nodes() []*dsecv1.Node {
	c.reg.mu.Lock()
	defer c.reg.mu.Unlock()
	var out []*dsecv1.Node
	for id, m := range c.reg.nodes {
		b := m.beat
		out = append(out, &dsecv1.Node{Id: string(id), Epoch: m.reg.GetEpoch(), Alive: m.life != nil,
			Draining: b.GetDraining(), Live: b.GetLive(), Starting: b.GetStarting(), MaxLive: b.GetMaxLive(),
			Cpu: b.GetCpu(), Memory: b.GetMemory(), Disk: b.GetDisk(), Tiers: b.GetTiers(), Seen: wire.Stamp(m.seen),
			Version: m.reg.GetVersion()})
	}
	sort.Slice(out, func(i, j int) bool { return out[i].Id < out[j].Id })
	return out
}

// alive lists the ids of nodes with a heartbeat.
func (c *Cluster) alive() (up, down []dsec.NodeID) {
	for _, n := range c.Nodes() {
		if n.Alive {
			up = append(up, dsec.NodeID(n.Id))
		} else {
			down = append(down, dsec.NodeID(n.Id))
		}
	}
	return up, down
}

// snapshot is what the scheduler sees.
func (c *Cluster) snapshot() []scheduler.Node {
	c.reg.mu.Lock()
	defer c.reg.mu.Unlock()
	var out []scheduler.Node
	for id, m := range c.reg.nodes {
		n := scheduler.Node{ID: id, Live: int(m.beat.GetLive()), MaxLive: int(m.beat.GetMaxLive()), InFlight: m.inFlight,
			CPU: m.beat.GetCpu(), Memory: m.beat.GetMemory(), Disk: m.beat.GetDisk(), Draining: m.beat.GetDraining(),
			Dead: m.life == nil || m.reg == nil}
		for _, t := range m.beat.GetTiers() {
			n.Tiers = append(n.Tiers, dsec.Tier(t))
		}
		out = append(out, n)
	}
	sort.Slice(out, func(i, j int) bool { return out[i].ID < out[j].ID })
	return out
}

// reach returns what is needed to call a node, or why it cannot be.
func (c *Cluster) reach(id dsec.NodeID) (life context.Context, reg *dsecv1.Registration, rt *http.Transport, err error) {
	c.reg.mu.Lock()
	defer c.reg.mu.Unlock()
	m := c.reg.nodes[id]
	switch {
	case m == nil:
		return nil, nil, nil, dsec.Errorf(dsec.NotFound, "find node", string(id), "no such node")
	case m.life == nil:
		return nil, nil, nil, dsec.Errorf(dsec.Unavailable, "call node", string(id), "no heartbeat")
	case m.reg == nil:
		return nil, nil, nil, dsec.Errorf(dsec.Unavailable, "call node", string(id), "not registered yet")
	}
	return m.life, m.reg, m.data, nil
}
