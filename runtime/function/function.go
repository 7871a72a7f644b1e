// Package function makes stateless calls in pools of containers that are there before
// the call comes, and in a process of its own for WebAssembly modules.
//
// A container serves one call at a time, each in a cell: a place that is new, and that
// nothing outlives (runtime.Celler). A container that cannot be proved clean
// afterwards is destroyed. Pools are told apart by project, layers, limits, network and
// interpreter, so that what meets in one container is of one project. What is not used
// for a while is removed. docs/formats/function.md is the contract of a call.
package function

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	goruntime "runtime"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/runtime"
)

// Mechanism is a tier whose sandboxes can be made ones of cells.
type Mechanism interface {
	runtime.Runtime
	runtime.Celler
}

// Modules runs calls of WebAssembly modules.
type Modules interface {
	Call(ctx context.Context, c dsec.Call) (dsec.CallResult, error)
	Close() error
}

// Config of an Engine.
type Config struct {
	Mechanism Mechanism
	Source    runtime.Source
	Modules   Modules       // closed with the engine; nil: calls of type wasm are Unsupported
	Node      dsec.NodeID   // of the ids of containers
	Most      int           // containers, of all pools; 0: 4 for each CPU
	PerPool   int           // containers of one pool; 0: 2 for each CPU
	Idle      time.Duration // after which a container that waits is removed; 0: 1 min
	Log       *slog.Logger  // nil: the default one
}

// Engine is the function tier of one machine.
type Engine struct {
	cfg  Config
	life context.Context
	stop context.CancelCauseFunc
	work sync.WaitGroup

	calls, made, discarded atomic.Int64

	mu      sync.Mutex
	pools   map[key]*pool
	live    int       // containers, those being made included
	going   int       // those being removed, whose place nobody has yet
	waiting []*waiter // the one that came first is the first
	closed  bool
}

var _ runtime.Caller = (*Engine)(nil)

var errClosed = errors.New("the function tier is closed")

// New returns an engine without any container.
func New(c Config) *Engine {
	if c.Most <= 0 {
		c.Most = 4 * goruntime.NumCPU()
	}
	if c.PerPool <= 0 {
		c.PerPool = 2 * goruntime.NumCPU()
	}
	if c.Idle <= 0 {
		c.Idle = time.Minute
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
	e := &Engine{cfg: c, pools: map[key]*pool{}}
	e.life, e.stop = context.WithCancelCause(context.Background())
	e.work.Go(e.expire)
	return e
}

// Close ends the calls at work and removes every container.
func (e *Engine) Close() error {
	e.mu.Lock()
	if e.closed {
		e.mu.Unlock()
		e.work.Wait()
		return nil
	}
	e.closed = true
	var idle []*box
	for _, p := range e.pools {
		idle = append(idle, p.idle...)
		p.live -= len(p.idle)
		e.live -= len(p.idle)
		p.idle = nil
	}
	for _, w := range e.waiting {
		close(w.turn)
	}
	e.waiting = nil
	e.mu.Unlock()
	e.stop(errClosed)
	for _, b := range idle {
		e.work.Go(func() { e.destroy(b) })
	}
	e.work.Wait()
	if e.cfg.Modules != nil {
		return e.cfg.Modules.Close()
	}
	return nil
}

// begin counts a call that Close has to wait for.
func (e *Engine) begin() (done func(), err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil, dsec.E(dsec.Unavailable, "call", "", errClosed)
	}
	e.work.Add(1)
	e.calls.Add(1)
	return e.work.Done, nil
}

// Counts says how it is.
func (e *Engine) Counts() runtime.CallCounts {
	e.mu.Lock()
	defer e.mu.Unlock()
	return runtime.CallCounts{Calls: e.calls.Load(), Containers: int64(e.live), Made: e.made.Load(), Discarded: e.discarded.Load(), Waiting: int64(len(e.waiting))}
}

// Call makes a call. One that the platform spoilt is made a second time, as nothing of
// the first is anywhere.
func (e *Engine) Call(ctx context.Context, project string, c dsec.Call) (dsec.CallResult, error) {
	done, err := e.begin()
	if err != nil {
		return dsec.CallResult{}, err
	}
	defer done()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(e.life, func() { cancel(errClosed) })()
	if c.Type == dsec.CallWasm {
		if e.cfg.Modules == nil {
			return dsec.CallResult{}, dsec.Errorf(dsec.Unsupported, "call", string(c.Type), "this node has no place for modules")
		}
		res, err := e.cfg.Modules.Call(ctx, c)
		res.Node = e.cfg.Node
		return res, err
	}
	if c.Type == dsec.CallPython && (!utf8.Valid(c.Code) || bytes.IndexByte(c.Code, 0) >= 0) {
		return dsec.CallResult{}, dsec.Errorf(dsec.Invalid, "validate call", "code", "is not UTF-8, or holds a NUL")
	}
	res, err := e.once(ctx, project, &c)
	if err != nil && ctx.Err() == nil && spoilt(err) {
		e.cfg.Log.Warn("call made again", "err", err)
		e.empty(project, &c)
		if res, err = e.once(ctx, project, &c); err != nil && ctx.Err() == nil && spoilt(err) {
			err = dsec.E(dsec.Unavailable, "call", "", err)
		}
	}
	res.Node = e.cfg.Node
	return res, err
}

// spoilt reports whether the container is to blame.
func spoilt(err error) bool {
	switch dsec.ClassOf(err) {
	case dsec.SandboxGone, dsec.Internal, dsec.Corrupt:
		return true
	}
	return false
}

// beyond is what a call may take beyond its own limits before its container counts as
// one that does not answer.
const beyond = 30 * time.Second

// settle takes a container back when its cell is gone.
func (e *Engine) settle(b *box) {
	ctx, cancel := context.WithTimeout(e.life, beyond)
	defer cancel()
	clean := b.cells.Settle(ctx)
	e.mu.Lock()
	b.pool.settling--
	e.mu.Unlock()
	e.give(b, clean)
}

func (e *Engine) once(ctx context.Context, project string, c *dsec.Call) (dsec.CallResult, error) {
	came := time.Now()
	b, err := e.take(ctx, project, c)
	if err != nil {
		return dsec.CallResult{}, err
	}
	queued := time.Since(came)
	b.uses++
	use := b.uses
	rctx, cancel := context.WithTimeout(ctx, c.Limits.Compile+c.Limits.Wall+beyond)
	end, err := b.cells.Run(rctx, b.run(c))
	cancel()
	if err != nil {
		e.give(b, false)
		return dsec.CallResult{}, err
	}
	e.mu.Lock()
	b.pool.settling++
	e.mu.Unlock()
	e.work.Go(func() { e.settle(b) }) // what the call came to does not depend on it
	res, err := judge(c, &end)
	res.Backend = "cell"
	if c.Type == dsec.CallPython {
		res.Backend = "zygote"
	}
	res.Container, res.Generation, res.Use, res.Queued = b.id, b.generation, use, queued
	return res, err
}
