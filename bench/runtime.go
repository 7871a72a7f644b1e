package bench

import (
	"context"
	"fmt"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/process"
	dsecruntime "github.com/opendsec/dsec/runtime"
)

// Runtime is a contender for a dsec tier, measured at the runtime contract:
// Create, one command, Destroy, with every wall and limit on.
type Runtime struct {
	Name   string
	RT     dsecruntime.Runtime
	Layers layer.Set
	Spec   dsec.Spec // limits and network of every sandbox
	Argv   []string
	Node   dsec.NodeID
	Steps  *Steps // where creations note the time of each step; may be nil
}

// Contender of r.
func (r Runtime) Contender() Contender {
	return Contender{Name: r.Name, Worker: func(int) (Worker, error) { return &runtimeWorker{r}, nil }}
}

type runtimeWorker struct{ r Runtime }

// Create makes one sandbox.
func (r Runtime) Create(ctx context.Context, id dsec.SandboxID) error {
	steps, err := r.RT.Create(ctx, dsecruntime.Request{ID: id, Spec: r.Spec, Layers: r.Layers})
	if err == nil && r.Steps != nil {
		r.Steps.add(steps...)
	}
	return err
}

func (w *runtimeWorker) Cycle(ctx context.Context, _ int) (time.Duration, error) {
	id := dsec.NewSandboxID(w.r.Node)
	begin := time.Now()
	if err := w.r.Create(ctx, id); err != nil {
		return 0, err
	}
	took, err := w.r.Exec(ctx, id)
	first := time.Since(begin)
	ending := time.Now()
	if derr := w.r.RT.Destroy(context.WithoutCancel(ctx), id); err == nil {
		err = derr
	}
	if w.r.Steps != nil {
		w.r.Steps.add(dsec.Step{Name: "= first command", Took: took}, dsec.Step{Name: "= destroy", Took: time.Since(ending)})
	}
	return first, err
}

// Exec runs the command once and returns how long that took.
func (r Runtime) Exec(ctx context.Context, id dsec.SandboxID) (time.Duration, error) {
	ex, ok := r.RT.(dsecruntime.Execer)
	if !ok {
		return 0, dsec.Errorf(dsec.Unsupported, "bench exec", r.Name, "the tier cannot run commands")
	}
	begin := time.Now()
	p, err := ex.Exec(ctx, id, process.Spec{Argv: r.Argv})
	if err != nil {
		return 0, err
	}
	res, err := p.Wait(ctx)
	if err != nil {
		return 0, err
	}
	if res.ExitCode != 0 || res.Status != process.Exited {
		return 0, fmt.Errorf("bench exec: status %s, exit code %d", res.Status, res.ExitCode)
	}
	return time.Since(begin), p.Release(ctx)
}

func (w *runtimeWorker) Close() error { return nil }

// ExecContender measures one command after the other in a live sandbox.
func (r Runtime) ExecContender(id dsec.SandboxID) Contender {
	return Contender{Name: r.Name, Worker: func(int) (Worker, error) { return execWorker{r, id}, nil }}
}

type execWorker struct {
	r  Runtime
	id dsec.SandboxID
}

func (w execWorker) Cycle(ctx context.Context, _ int) (time.Duration, error) {
	return w.r.Exec(ctx, w.id)
}
func (w execWorker) Close() error { return nil }
