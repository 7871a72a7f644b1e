package bench

import (
	"context"
	"fmt"
	"io"
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

// Must runs the command of r, which must succeed, and tells what it printed if
// it does not. It reads stdin, if there is one, to its end.
func (r Runtime) Must(ctx context.Context, id dsec.SandboxID, stdin io.Reader) error {
	ex, ok := r.RT.(dsecruntime.Execer)
	if !ok {
		return dsec.Errorf(dsec.Unsupported, "bench exec", r.Name, "the tier cannot run commands")
	}
	p, err := ex.Exec(ctx, id, process.Spec{Argv: r.Argv, Stdin: stdin != nil})
	if err != nil {
		return err
	}
	defer func() { _ = p.Release(context.WithoutCancel(ctx)) }()
	if stdin != nil {
		if err := feed(ctx, p, stdin); err != nil {
			return err
		}
	}
	res, err := p.Wait(ctx)
	if err != nil || res.Status == process.Exited && res.ExitCode == 0 {
		return err
	}
	var said []byte
	for _, s := range []process.Stream{process.Stdout, process.Stderr} {
		head, tail, _, err := p.Kept(ctx, s)
		if err != nil {
			return err
		}
		said = append(append(said, head...), tail...)
	}
	return fmt.Errorf("bench exec %q: status %s, exit code %d: %s", r.Argv, res.Status, res.ExitCode, said[max(0, len(said)-2000):])
}

// feed writes all of r to the stdin of a command and closes it. A command that
// ends before has an exit code that says why.
func feed(ctx context.Context, p process.Process, r io.Reader) error {
	b := make([]byte, 256<<10)
	for {
		n, err := r.Read(b)
		for left := b[:n]; len(left) > 0; {
			wrote, err := p.Write(ctx, left)
			if err != nil {
				return nil
			}
			left = left[wrote:]
		}
		if err == io.EOF {
			return p.CloseStdin(ctx)
		}
		if err != nil {
			return err
		}
	}
}

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
