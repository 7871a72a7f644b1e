package cluster

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
	"github.com/opendsec/dsec/scheduler"
)

// placement holds what choosing nodes needs between calls.
type placement struct {
	mu    sync.Mutex
	rnd   *rand.Rand
	tried map[string]dsec.NodeID // by project and call id, so that a retry asks the same node first
	order []string               // of tried, oldest first
}

const remembered = 1 << 16

func (p *placement) init(seed uint64) {
	p.rnd = rand.New(rand.NewPCG(seed, seed>>1))
	p.tried = map[string]dsec.NodeID{}
}

// Create places a sandbox and has it created. A node that refuses, or surely
// did not hear, is passed over for the next; after any other error the
// outcome may be unknown, and a retry with the same call id asks the same
// node first. A checkpoint that a node cannot go on from, because it has another
// monitor, kernel or processor, another one may.
func (c *Cluster) Create(ctx context.Context, project string, spec *dsecv1.Spec) (*dsecv1.Sandbox, error) {
	key := project + "/" + spec.CallId
	r := scheduler.Request{Tier: wire.SpecFrom(spec).Tier}
	var last error
	for range scheduler.MaxTries {
		id, err := c.choose(key, r, last == nil)
		if err != nil {
			if last != nil {
				return nil, last
			}
			return nil, err
		}
		resp := &dsecv1.CreateResponse{}
		err = c.Call(ctx, id, wire.VerbCreate, project, &dsecv1.NodeCreate{Spec: spec}, resp)
		if err == nil {
			c.index.put(id, resp.Sandbox)
			return resp.Sandbox, nil
		}
		other := dsec.ClassOf(err) == dsec.ResourceExhausted || spec.Checkpoint != "" && dsec.ClassOf(err) == dsec.Unsupported
		if !other && !errors.Is(err, errUnheard) {
			return nil, err
		}
		c.unplace(id)
		r.Exclude, last = append(r.Exclude, id), err
	}
	return nil, last
}

// choose returns the node for one try and counts it as placed there.
func (c *Cluster) choose(key string, r scheduler.Request, first bool) (dsec.NodeID, error) {
	nodes := c.snapshot()
	c.place.mu.Lock()
	defer c.place.mu.Unlock()
	id, known := c.place.tried[key]
	alive := slices.ContainsFunc(nodes, func(n scheduler.Node) bool { return n.ID == id && !n.Dead })
	if !known || !first || !alive {
		plan, err := scheduler.Place(nodes, r, c.place.rnd)
		if err != nil {
			return "", err
		}
		id = plan.Order[0]
	}
	c.place.remember(key, id)
	c.reg.mu.Lock()
	defer c.reg.mu.Unlock()
	c.member(id).inFlight++
	return id, nil
}

func (p *placement) remember(key string, id dsec.NodeID) {
	if _, ok := p.tried[key]; !ok {
		p.order = append(p.order, key)
		if len(p.order) > remembered {
			delete(p.tried, p.order[0])
			p.order = p.order[1:]
		}
	}
	p.tried[key] = id
}

func (c *Cluster) unplace(id dsec.NodeID) {
	c.reg.mu.Lock()
	defer c.reg.mu.Unlock()
	if m := c.member(id); m.inFlight > 0 {
		m.inFlight--
	}
}

// CallFunction has a node with the function tier make a stateless call. A node that
// refuses, or surely did not hear, is passed over for the next, as in Create.
func (c *Cluster) CallFunction(ctx context.Context, project string, req *dsecv1.CallRequest, resp *dsecv1.CallResponse) error {
	key := project + "/call/" + req.CallId
	r := scheduler.Request{Tier: dsec.TierFunction}
	var last error
	for range scheduler.MaxTries {
		id, err := c.choose(key, r, last == nil)
		if err != nil {
			if last != nil {
				return last
			}
			return err
		}
		err = c.Call(ctx, id, wire.VerbCall, project, req, resp)
		c.unplace(id)
		if err == nil || dsec.ClassOf(err) != dsec.ResourceExhausted && !errors.Is(err, errUnheard) {
			return err
		}
		r.Exclude, last = append(r.Exclude, id), err
	}
	return last
}
