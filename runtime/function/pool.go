package function

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/opendsec/dsec"
)

// key is what the calls of one pool have in common.
type key struct {
	project string
	refs    string
	network dsec.CallNetwork
	cpu     float64
	memory  int64
	pids    int64
	python  bool
	preload string
}

func keyOf(project string, c *dsec.Call) key {
	refs := []string{string(c.Image)}
	for _, l := range c.Layers {
		refs = append(refs, string(l))
	}
	return key{project: project, refs: strings.Join(refs, "\x00"), network: c.Network, cpu: c.Limits.CPU, memory: c.Limits.Memory, pids: c.Limits.Pids,
		python: c.Type == dsec.CallPython, preload: strings.Join(c.Preload, "\x00")}
}

// pool is the containers of one key.
type pool struct {
	key  key
	refs []dsec.LayerRef

	// Of the engine's lock:
	idle     []*box // the last one was used last
	live     int    // with those at work and being made
	settling int    // of those, whose call has its answer
	users    int    // calls that look for a container here
	made     int64
	layers   string    // that its containers have, so that a tag which has moved is noticed
	looked   time.Time // when that was
}

// waiter is a call that waits for a container.
type waiter struct {
	pool *pool
	full bool      // it was told that no more can be made
	turn chan turn // closed: the engine is
}

// turn is what a waiter waits for.
type turn struct {
	b     *box // it gets this one; nil: it is to look again
	freed bool // the node has more room than it had
}

// freshFor is how long it is believed that the references of a pool stand for the
// same layers.
const freshFor = 2 * time.Second

// take gets a container for a call: one that waits, a new one, or the next that is free.
func (e *Engine) take(ctx context.Context, project string, c *dsec.Call) (*box, error) {
	p := e.pool(project, c)
	defer e.leavePool(p)
	if err := e.refresh(ctx, p); err != nil {
		return nil, err
	}
	var full error // why no more can be made now; then what there is has to do
	for {
		b, w, err := e.tryTake(p, full)
		switch {
		case err != nil:
			return nil, err
		case b != nil:
			return b, nil
		case w == nil:
			b, err := e.make(ctx, p, c)
			if dsec.ClassOf(err) == dsec.ResourceExhausted {
				full = err
				continue
			}
			return b, err
		}
		select {
		case t, open := <-w.turn:
			if !open {
				return nil, dsec.E(dsec.Unavailable, "call", "", errClosed)
			}
			if t.b != nil {
				return t.b, nil
			}
			if t.freed {
				full = nil
			}
		case <-ctx.Done():
			e.leave(w)
			return nil, dsec.E(dsec.ClassOf(ctx.Err()), "wait for a container", "", context.Cause(ctx))
		}
	}
}

func (e *Engine) pool(project string, c *dsec.Call) *pool {
	k := keyOf(project, c)
	e.mu.Lock()
	defer e.mu.Unlock()
	p := e.pools[k]
	if p == nil {
		p = &pool{key: k, refs: append([]dsec.LayerRef{c.Image}, c.Layers...)}
		e.pools[k] = p
	}
	p.users++
	return p
}

func (e *Engine) leavePool(p *pool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	p.users--
}

// tryTake returns a container, or a place in the queue; neither: the caller is to make
// one, which is counted already.
func (e *Engine) tryTake(p *pool, full error) (*box, *waiter, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil, nil, dsec.E(dsec.Unavailable, "call", "", errClosed)
	}
	if n := len(p.idle); n > 0 {
		b := p.idle[n-1]
		p.idle = p.idle[:n-1]
		return b, nil, nil
	}
	// Without a container of its own to wait for it waits for what the others give up.
	if full != nil && p.live == 0 && e.going == 0 && !e.evictLocked() {
		return nil, nil, full
	}
	// Nobody else's container goes for a call that can have one of its own in a moment.
	if full == nil && p.live < e.cfg.PerPool && (e.live < e.cfg.Most || p.settling == 0 && e.evictLocked()) {
		p.live++
		e.live++
		return nil, nil, nil
	}
	w := &waiter{pool: p, full: full != nil, turn: make(chan turn, 1)}
	e.waiting = append(e.waiting, w)
	return nil, w, nil
}

// evictLocked removes the container that has waited longest, of whatever pool.
func (e *Engine) evictLocked() bool {
	var oldest *pool
	for _, p := range e.pools {
		if len(p.idle) > 0 && (oldest == nil || p.idle[0].since.Before(oldest.idle[0].since)) {
			oldest = p
		}
	}
	if oldest == nil {
		return false
	}
	b := oldest.idle[0]
	oldest.idle = slices.Delete(oldest.idle, 0, 1)
	e.dropLocked(b)
	return true
}

// empty removes all of a call's pool that wait: what has spoilt one container may have spoilt them.
func (e *Engine) empty(project string, c *dsec.Call) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if p := e.pools[keyOf(project, c)]; p != nil {
		e.dropIdleLocked(p)
	}
}

func (e *Engine) dropIdleLocked(p *pool) {
	for _, b := range p.idle {
		e.dropLocked(b)
	}
	p.idle = nil
}

// dropLocked has a container removed that nobody will use any more.
func (e *Engine) dropLocked(b *box) {
	b.pool.live--
	e.live--
	e.going++
	e.work.Go(func() {
		e.destroy(b)
		e.mu.Lock()
		defer e.mu.Unlock()
		e.going--
		e.wakeAllLocked(true)
	})
}

// leave takes a call out of the queue. What it was given meanwhile goes on.
func (e *Engine) leave(w *waiter) {
	e.mu.Lock()
	e.waiting = slices.DeleteFunc(e.waiting, func(o *waiter) bool { return o == w })
	e.mu.Unlock()
	select {
	case t, open := <-w.turn:
		if t.b != nil {
			e.give(t.b, true)
		} else if open {
			e.mu.Lock()
			e.wakeLocked(t.freed)
			e.mu.Unlock()
		}
	default:
	}
}

// give takes a container back.
func (e *Engine) give(b *box, clean bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	b.since = time.Now()
	if !clean {
		e.discarded.Add(1)
	}
	if !clean || e.closed || b.layers != b.pool.layers {
		e.dropLocked(b)
		e.wakeLocked(false)
		return
	}
	// Who came first and has no container at all goes before the next of this pool.
	if len(e.waiting) > 0 && e.waiting[0].pool != b.pool && e.waiting[0].pool.live == 0 {
		e.dropLocked(b)
		e.wakeLocked(false)
		return
	}
	if i := slices.IndexFunc(e.waiting, func(w *waiter) bool { return w.pool == b.pool }); i >= 0 {
		w := e.waiting[i]
		e.waiting = slices.Delete(e.waiting, i, i+1)
		w.turn <- turn{b: b}
		return
	}
	b.pool.idle = append(b.pool.idle, b)
	e.wakeLocked(false)
}

// wakeLocked has the first in the queue look again that could make a container now: who was told
// that there is no room does not ask again before there is more, but may have another's removed.
func (e *Engine) wakeLocked(freed bool) {
	i := slices.IndexFunc(e.waiting, func(w *waiter) bool {
		return w.pool.live < e.cfg.PerPool && (freed || !w.full || w.pool.live == 0)
	})
	if i < 0 {
		return
	}
	w := e.waiting[i]
	e.waiting = slices.Delete(e.waiting, i, i+1)
	w.turn <- turn{freed: freed}
}

// wakeAllLocked has all look again that have no container of their own to wait for, and the first of
// the others.
func (e *Engine) wakeAllLocked(freed bool) {
	e.waiting = slices.DeleteFunc(e.waiting, func(w *waiter) bool {
		if w.pool.live > 0 {
			return false
		}
		w.turn <- turn{freed: freed}
		return true
	})
	e.wakeLocked(freed)
}

// failed takes back the place of a container that was not made.
func (e *Engine) failed(p *pool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	p.live--
	e.live--
	e.wakeAllLocked(false)
}

// refresh looks now and then whether the references still mean what they did; what has
// other layers serves no call that comes after.
func (e *Engine) refresh(ctx context.Context, p *pool) error {
	e.mu.Lock()
	if p.layers == "" || time.Since(p.looked) < freshFor {
		e.mu.Unlock()
		return nil
	}
	p.looked = time.Now() // one looks, the others go on
	e.mu.Unlock()
	lease := string(dsec.NewSandboxID(e.cfg.Node))
	set, err := e.cfg.Source.Acquire(ctx, p.key.project, lease, p.refs)
	if err != nil {
		return err
	}
	if err := e.cfg.Source.Release(context.WithoutCancel(ctx), lease); err != nil {
		e.cfg.Log.Warn("release layers", "lease", lease, "err", err)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.setLayersLocked(p, layersOf(set))
	return nil
}

func (e *Engine) setLayersLocked(p *pool, layers string) {
	if p.layers == layers {
		return
	}
	p.layers, p.looked = layers, time.Now()
	e.dropIdleLocked(p)
}

// expire removes what nobody has used for a while.
func (e *Engine) expire() {
	tick := time.NewTicker(max(e.cfg.Idle/4, 10*time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-e.life.Done():
			return
		}
		e.mu.Lock()
		for k, p := range e.pools {
			for len(p.idle) > 0 && time.Since(p.idle[0].since) > e.cfg.Idle {
				b := p.idle[0]
				p.idle = slices.Delete(p.idle, 0, 1)
				e.dropLocked(b)
			}
			if p.live == 0 && p.users == 0 {
				delete(e.pools, k)
			}
		}
		e.mu.Unlock()
	}
}
