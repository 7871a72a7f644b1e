package cluster

import (
	"context"
	"sync"
	"time"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
)

// index is a projection of the nodes' ledgers: which live sandboxes there are
// and whose. It can be thrown away at any moment; it rebuilds itself when a
// node comes alive and every refreshEvery after that.
type index struct {
	mu     sync.Mutex
	byNode map[dsec.NodeID]map[string]entry
}

type entry struct {
	project string
	at      time.Time // when put; a refresh that was asked before does not drop it
}

const (
	refreshEvery  = 30 * time.Second
	refreshWithin = 20 * time.Second
)

// put takes in what a node said about a sandbox.
func (x *index) put(node dsec.NodeID, s *dsecv1.Sandbox) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if !dsec.State(s.GetState()).Live() {
		delete(x.byNode[node], s.GetId())
		return
	}
	if x.byNode[node] == nil {
		x.byNode[node] = map[string]entry{}
	}
	x.byNode[node][s.GetId()] = entry{s.GetProject(), time.Now()}
}

func (x *index) drop(node dsec.NodeID, sandbox string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	delete(x.byNode[node], sandbox)
}

// replace takes in a whole list that was asked for at the given time.
func (x *index) replace(node dsec.NodeID, asked time.Time, list []*dsecv1.Sandbox) {
	x.mu.Lock()
	defer x.mu.Unlock()
	fresh := map[string]entry{}
	for id, e := range x.byNode[node] {
		if e.at.After(asked) {
			fresh[id] = e
		}
	}
	for _, s := range list {
		if dsec.State(s.GetState()).Live() {
			fresh[s.GetId()] = entry{s.GetProject(), asked}
		}
	}
	x.byNode[node] = fresh
}

// Live counts the live sandboxes of a project.
func (c *Cluster) Live(project string) int {
	c.index.mu.Lock()
	defer c.index.mu.Unlock()
	n := 0
	for _, m := range c.index.byNode {
		for _, e := range m {
			if e.project == project {
				n++
			}
		}
	}
	return n
}

// Saw takes in what an answer of a node said about a sandbox.
func (c *Cluster) Saw(s *dsecv1.Sandbox) {
	if id := dsec.SandboxID(s.GetId()).Node(); id != "" {
		c.index.put(id, s)
	}
}

// indexNode keeps the index of one node right for the length of its life.
func (c *Cluster) indexNode(life context.Context, id dsec.NodeID) {
	c.wg.Go(func() { c.indexEvents(life, id) })
	tick := time.NewTicker(refreshEvery)
	defer tick.Stop()
	for {
		if err := c.refresh(life, id); err != nil && life.Err() == nil {
			c.log.Warn("index not refreshed", "node", id, "err", err)
			select {
			case <-life.Done():
				return
			case <-time.After(time.Second):
				continue
			}
		}
		select {
		case <-life.Done():
			return
		case <-tick.C:
		}
	}
}

func (c *Cluster) refresh(ctx context.Context, id dsec.NodeID) error {
	ctx, cancel := context.WithTimeout(ctx, refreshWithin)
	defer cancel()
	asked := time.Now()
	list := &dsecv1.NodeListReply{}
	if err := c.Call(ctx, id, wire.VerbList, "", &dsecv1.NodeList{}, list); err != nil {
		return err
	}
	c.index.replace(id, asked, list.Sandboxes)
	return nil
}

// indexEvents drops sandboxes from the index as soon as they end.
func (c *Cluster) indexEvents(life context.Context, id dsec.NodeID) {
	for life.Err() == nil {
		r, closer, err := c.Stream(life, id, wire.PathSession, "", &dsecv1.NodeSession{
			Session: "index_" + dsec.Random(20), Events: &dsecv1.EventFilter{Types: []string{string(dsec.EventState)}}})
		for err == nil {
			f := &dsecv1.Frame{}
			if _, err = r.Message(f); err == nil {
				if e := f.GetEvent(); e != nil && !dsec.State(e.To).Live() {
					c.index.drop(id, e.Sandbox)
				}
			}
		}
		if closer != nil {
			_ = closer.Close()
		}
		select {
		case <-life.Done():
		case <-time.After(time.Second):
		}
	}
}

// List asks every living node and returns what they have, and which nodes did
// not answer.
func (c *Cluster) List(ctx context.Context, project string, q *dsecv1.NodeList) (list []*dsecv1.Sandbox, unreachable []string) {
	up, down := c.alive()
	for _, id := range down {
		unreachable = append(unreachable, string(id))
	}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, id := range up {
		wg.Add(1)
		go func() {
			defer wg.Done()
			reply := &dsecv1.NodeListReply{}
			err := c.Call(ctx, id, wire.VerbList, project, q, reply)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				c.log.Warn("node not listed", "node", id, "err", err)
				unreachable = append(unreachable, string(id))
				return
			}
			list = append(list, reply.Sandboxes...)
		}()
	}
	wg.Wait()
	return list, unreachable
}
