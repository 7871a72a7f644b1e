package node

import (
	"context"
	"sync"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/lifecycle"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/runtime"
)

// Caller makes stateless calls.
type Caller interface {
	// Call makes a call for a project. The same call id waits for the same call, or gets
	// its result as long as that is remembered; a call whose callers have all gone is
	// ended. Calls leave nothing, so none is in the ledger.
	Call(ctx context.Context, project string, c dsec.Call) (dsec.CallResult, error)
}

const (
	callBytes  = 64 << 20 // bytes of results that are remembered
	callsFor   = 10 * time.Minute
	callFrame  = 512 // bytes that a result counts for beside what is in it
	longerCall = time.Minute
)

// callMemory is the calls at work and the results of those before, by call key. It is
// in memory: to make a call again does no harm.
type callMemory struct {
	mu    sync.Mutex
	known map[string]*calling
	order []*calling // ended ones, oldest first
	bytes int
}

// calling is a call that callers may share.
type calling struct {
	key     string
	hash    string
	waiting int           // callers; of the memory's lock
	done    chan struct{} // closed when res and err are set
	ended   time.Time
	res     dsec.CallResult
	err     error
	cancel  context.CancelFunc
}

// Call implements Caller.
func (n *Node) Call(ctx context.Context, project string, c dsec.Call) (dsec.CallResult, error) {
	if n.functions == nil {
		return dsec.CallResult{}, dsec.Errorf(dsec.Unsupported, "call", string(n.cfg.ID), "this node has no function tier")
	}
	if err := c.Validate(); err != nil {
		return dsec.CallResult{}, err
	}
	n.mu.RLock()
	draining := n.draining
	n.mu.RUnlock()
	if draining {
		return dsec.CallResult{}, dsec.Errorf(dsec.Unavailable, "call", string(n.cfg.ID), "the node is draining")
	}
	hash := ""
	if c.CallID != "" {
		hash = hashOf(c)
	}
	c.Fill()
	if c.CallID == "" {
		return n.functions.Call(ctx, project, c)
	}
	k, first := n.calls.join(string(callKey(project, c.CallID)), hash)
	if k.hash != hash {
		n.calls.leave(k)
		return dsec.CallResult{}, conflict(c.CallID)
	}
	if first {
		run := func() {
			cctx, cancel := context.WithTimeout(n.ctx, c.Limits.Compile+c.Limits.Wall+longerCall+n.cfg.StartTime)
			defer cancel()
			n.calls.begin(k, cancel)
			k.res, k.err = n.functions.Call(cctx, project, c)
			n.calls.end(k, n.cfg.Clock())
		}
		if !n.spawn(run) {
			k.err = dsec.E(dsec.Unavailable, "call", "", ErrClosed)
			n.calls.end(k, n.cfg.Clock())
		}
	}
	defer n.calls.leave(k)
	select {
	case <-k.done:
		return k.res, k.err
	case <-ctx.Done():
		return dsec.CallResult{}, dsec.E(dsec.ClassOf(ctx.Err()), "call", "", context.Cause(ctx))
	}
}

// join finds the call of a key; the first caller has to make it.
func (m *callMemory) join(key, hash string) (k *calling, first bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if k = m.known[key]; k == nil {
		first = true
		k = &calling{key: key, hash: hash, done: make(chan struct{}), cancel: func() {}}
		if m.known == nil {
			m.known = map[string]*calling{}
		}
		m.known[key] = k
	}
	k.waiting++
	return k, first
}

func (m *callMemory) begin(k *calling, cancel context.CancelFunc) {
	m.mu.Lock()
	k.cancel = cancel
	gone := k.waiting == 0
	m.mu.Unlock()
	if gone {
		cancel()
	}
}

// leave ends a call that nobody waits for any more.
func (m *callMemory) leave(k *calling) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if k.waiting--; k.waiting > 0 {
		return
	}
	select {
	case <-k.done:
	default:
		k.cancel()
		if m.known[k.key] == k { // the same id begins anew
			delete(m.known, k.key)
		}
	}
}

// end has a result, which is kept unless another try may have another one.
func (m *callMemory) end(k *calling, now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	k.ended = now
	close(k.done)
	if m.known[k.key] != k {
		return
	}
	if k.err != nil && (dsec.ClassOf(k.err).Retryable() || dsec.ClassOf(k.err) == dsec.Canceled || dsec.ClassOf(k.err) == dsec.Internal) {
		delete(m.known, k.key)
		return
	}
	m.order = append(m.order, k)
	m.bytes += k.size()
	for len(m.order) > 0 && (m.bytes > callBytes || now.Sub(m.order[0].ended) > callsFor) {
		old := m.order[0]
		m.order[0], m.order = nil, m.order[1:]
		m.bytes -= old.size()
		delete(m.known, old.key)
	}
}

func (k *calling) size() int {
	n := callFrame + len(k.res.Stdout) + len(k.res.Stderr)
	for _, f := range k.res.Files {
		n += len(f.Data) + callFrame
	}
	return n
}

// functionSource gives the function tier layers and a budget.
type functionSource struct{ n *Node }

func (s *functionSource) Acquire(ctx context.Context, project, lease string, refs []dsec.LayerRef) (layer.Set, error) {
	set, err := s.n.cfg.Store.For(project).Acquire(ctx, lease, refs)
	if err != nil {
		rctx, stop := s.n.detached(ctx, lifecycle.UndoLimit)
		defer stop()
		_ = s.n.cfg.Store.Release(rctx, lease) // why there is no set is what counts
	}
	return set, err
}

func (s *functionSource) Release(ctx context.Context, lease string) error {
	return s.n.cfg.Store.Release(ctx, lease)
}

func (s *functionSource) Admit(l dsec.Limits) (func(), error) {
	var have share
	if err := s.n.budget.take(l, &have, share{run: true, disk: true}); err != nil {
		return nil, err
	}
	return sync.OnceFunc(func() { s.n.budget.give(l, &have, share{}) }), nil
}

var (
	_ Caller         = (*Node)(nil)
	_ runtime.Source = (*functionSource)(nil)
)
