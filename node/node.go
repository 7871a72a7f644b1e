package node

import (
	"context"
	"errors"
	"sort"
	"sync"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/runtime"
)

// Node implements Service, Inside and Watcher for one machine.
type Node struct {
	cfg      Config
	ledger   *ledger
	budget   *budget
	starts   *starts
	subs     *subscriptions
	packs    *places
	judgings *places
	work     chan struct{} // bounds what the node does on its own behalf at once
	ctx      context.Context
	cancel   context.CancelCauseFunc
	wg       sync.WaitGroup // every goroutine

	crashed bool // the agent before this one did not close; written by New only

	functions runtime.Caller // nil: there is none; written by New only
	calls     callMemory

	mu        sync.RWMutex
	boxes     map[dsec.SandboxID]*box
	names     map[string]dsec.SandboxID // project, name → live sandbox
	creations map[string]*creation      // by call key
	gradings  map[string]*grading       // by call key
	draining  bool
	pruned    time.Time
}

// ErrClosed is why the calls of a closed node end.
var ErrClosed = errors.New("the node is closed")

const ownWork = 16 // expiries and clean-ups at once

// New opens a node: it reads the ledger, compares it with what the runtimes and
// the layer store hold, adopts what lives, finishes or undoes what was begun,
// and removes what nobody knows. The runtimes and the store stay the caller's.
func New(cfg Config) (*Node, error) {
	if err := cfg.fill(); err != nil {
		return nil, err
	}
	l, err := openLedger(cfg.Dir, cfg.Metrics, cfg.Log, cfg.Clock)
	if err != nil {
		return nil, err
	}
	n := &Node{cfg: cfg, ledger: l, budget: &budget{lim: cfg.Budgets}, starts: newStarts(cfg.StartLimit, cfg.StartQueue),
		subs: &subscriptions{metrics: cfg.Metrics, all: map[*subscriber]struct{}{}}, work: make(chan struct{}, ownWork), packs: newPlaces(packsAtOnce, projectPacks), judgings: newPlaces(judgingsAtOnce, projectJudgings),
		boxes: map[dsec.SandboxID]*box{}, names: map[string]dsec.SandboxID{}, creations: map[string]*creation{}, gradings: map[string]*grading{}}
	n.ctx, n.cancel = context.WithCancelCause(context.Background())
	if err := n.recover(n.ctx); err != nil {
		n.cancel(ErrClosed)
		n.wg.Wait()
		return nil, errors.Join(err, l.close())
	}
	if cfg.Functions != nil {
		n.functions = cfg.Functions(&functionSource{n})
	}
	for _, rt := range cfg.runtimes() {
		n.wg.Go(func() { n.receiveExits(rt) })
	}
	n.wg.Go(n.tick)
	return n, nil
}

// Close ends the calls in flight, undoes half-made creations and closes the
// ledger. No sandbox ends by it.
func (n *Node) Close() error {
	n.mu.Lock()
	n.draining = true
	n.cancel(ErrClosed) // under the lock: spawn starts nothing after it
	n.mu.Unlock()
	var err error
	if n.functions != nil {
		err = n.functions.Close()
	}
	n.wg.Wait()
	err = errors.Join(err, n.flush(putClean))
	return errors.Join(err, n.ledger.close())
}

// Drain makes the node refuse new sandboxes, or take them again.
func (n *Node) Drain(on bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.draining = on
}

// LastAlive is when an agent before this one last wrote something, ends of
// sandboxes included; zero if there was none.
func (n *Node) LastAlive() time.Time { return n.ledger.alive }

// Load implements Watcher.
func (n *Node) Load() Load {
	l := n.budget.load()
	l.Starting = n.starts.count()
	for t := range n.cfg.Runtimes {
		l.Tiers = append(l.Tiers, t)
	}
	if n.functions != nil {
		l.Tiers = append(l.Tiers, dsec.TierFunction)
	}
	sort.Slice(l.Tiers, func(i, j int) bool { return l.Tiers[i] < l.Tiers[j] })
	n.mu.RLock()
	defer n.mu.RUnlock()
	l.Draining = n.draining
	return l
}

// find returns a sandbox that is not deleted, or nil.
func (n *Node) find(id dsec.SandboxID) *box {
	n.mu.RLock()
	defer n.mu.RUnlock()
	return n.boxes[id]
}

func (n *Node) all() []*box {
	n.mu.RLock()
	defer n.mu.RUnlock()
	out := make([]*box, 0, len(n.boxes))
	for _, b := range n.boxes {
		out = append(out, b)
	}
	return out
}

func nameKey(project, name string) string { return project + "\x00" + name }

// takeName reserves the name of a sandbox, if it has one.
func (n *Node) takeName(project, name string, id dsec.SandboxID) error {
	if name == "" {
		return nil
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	k := nameKey(project, name)
	if owner, taken := n.names[k]; taken && owner != id {
		return dsec.Errorf(dsec.AlreadyExists, "name sandbox", dsec.Quote(name), "is taken by %s", owner)
	}
	n.names[k] = id
	return nil
}

func (n *Node) freeName(b *box) {
	n.mu.Lock()
	defer n.mu.Unlock()
	k := nameKey(b.rec.Project, b.rec.Spec.Name) // neither ever changes
	if n.names[k] == b.id {
		delete(n.names, k)
	}
}

// settle frees what a sandbox without processes does not need. The turn is
// held.
func (n *Node) settle(b *box) {
	n.budget.give(b.rec.Spec.Limits, &b.held, share{disk: true})
	n.freeName(b)
}

// forget removes a deleted sandbox from memory. The turn is held.
func (n *Node) forget(b *box) {
	n.settle(b)
	n.budget.give(b.rec.Spec.Limits, &b.held, share{})
	n.mu.Lock()
	delete(n.boxes, b.id)
	n.mu.Unlock()
	b.mu.Lock()
	b.gone = true
	b.mu.Unlock()
}

// Get implements Service.
func (n *Node) Get(_ context.Context, id dsec.SandboxID) (Sandbox, error) {
	if b := n.find(id); b != nil {
		return b.sandbox(), nil
	}
	r, err := n.ledger.ended(id)
	if err != nil {
		return Sandbox{}, err
	}
	if r == nil {
		return Sandbox{}, dsec.E(dsec.NotFound, "get sandbox", string(id), nil)
	}
	return r.sandbox(), nil
}

const maxListed = 100_000 // ended sandboxes in one List

// List implements Service: sandboxes that are not deleted, oldest first, and
// with f.All the records of deleted ones before them.
func (n *Node) List(_ context.Context, f Filter) ([]Sandbox, error) {
	var out []Sandbox
	listed := map[dsec.SandboxID]bool{}
	for _, b := range n.all() {
		b.mu.Lock()
		if f.matches(&b.rec) {
			out = append(out, b.rec.sandbox())
			listed[b.id] = true
		}
		b.mu.Unlock()
	}
	sort.Slice(out, func(i, j int) bool { return out[i].Created.Before(out[j].Created) })
	if !f.All {
		return out, nil
	}
	var ended []Sandbox
	err := n.ledger.eachEnded(time.Time{}, func(r *record) bool {
		if !listed[r.ID] && f.matches(r) {
			ended = append(ended, r.sandbox())
		}
		return len(ended) < maxListed
	})
	return append(ended, out...), err
}

// Record is what is kept of a sandbox for people who ask why it ended.
type Record struct {
	Sandbox
	Events  []dsec.Event
	Outputs []Output
}

// Output is the end of what an ended command wrote.
type Output struct {
	Exec, Argv, Status string
	Phase              string // that it began in; "": there were none
	Code               int
	OOM                bool
	Started            time.Time
	Wall               time.Duration
	Stdout, Stderr     []byte
	Total              int64
}

// Record returns the last events and outputs of a sandbox too.
func (n *Node) Record(ctx context.Context, id dsec.SandboxID) (Record, error) {
	var r record
	if b := n.find(id); b != nil {
		b.mu.Lock()
		r = b.rec
		r.Events, r.Outputs = append([]dsec.Event(nil), b.ring...), append([]output(nil), b.rec.Outputs...)
		b.mu.Unlock()
	} else {
		found, err := n.ledger.ended(id)
		if err != nil {
			return Record{}, err
		}
		if found == nil {
			return Record{}, dsec.E(dsec.NotFound, "read record", string(id), nil)
		}
		r = *found
	}
	out := Record{Sandbox: r.sandbox(), Events: r.Events}
	for _, o := range r.Outputs {
		out.Outputs = append(out.Outputs, Output{Exec: o.Exec, Argv: o.Argv, Status: o.Status, Code: o.Code, OOM: o.OOM, Started: o.Started,
			Wall: time.Duration(o.Wall * float64(time.Second)), Stdout: o.Stdout, Stderr: o.Stderr, Total: o.Total, Phase: o.Phase})
	}
	return out, nil
}

// own runs fn on the node's own behalf, if there is room.
func (n *Node) own(fn func()) bool {
	select {
	case n.work <- struct{}{}:
		n.wg.Go(func() {
			defer func() { <-n.work }()
			fn()
		})
		return true
	default:
		return false
	}
}

// detached outlives the caller's context, but not for ever: what was begun has
// to be finished.
func (n *Node) detached(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), limit)
}
