package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/bench"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/runtime/function"
	"github.com/opendsec/dsec/runtime/function/wasm"
)

func benchFunctionVerb(f *benchFlags) *cobra.Command {
	return &cobra.Command{Use: "function", Short: "Stateless calls beside create, command, destroy", Args: cobra.NoArgs,
		Example: "  sudo dsec bench function --image debian-with-python.tar --concurrency 8 --rounds 3 --cycles 200",
		RunE: func(c *cobra.Command, _ []string) error {
			f.json = wantJSON(c)
			if f.image == "" {
				return dsec.Errorf(dsec.Invalid, "measure", "--image", "is required")
			}
			f.sources = []source{{f.image, "bench"}}
			return withBed(c.Context(), f, benchFunction)
		}}
}

// bedSource gives calls the layer of the measurement, and no budget.
type bedSource struct{ b *bed }

func (s bedSource) Acquire(ctx context.Context, _, lease string, refs []dsec.LayerRef) (layer.Set, error) {
	return s.b.store.Acquire(ctx, lease, refs)
}
func (s bedSource) Release(ctx context.Context, lease string) error {
	return s.b.store.Release(ctx, lease)
}
func (s bedSource) Admit(dsec.Limits) (func(), error) { return func() {}, nil }

// benchFunction measures calls of each kind, beside what the container tier does for the
// same command, with the same limits, in the same run.
func benchFunction(ctx context.Context, f *benchFlags, b *bed) (err error) {
	e := function.New(function.Config{Mechanism: b.tier, Source: bedSource{b}, Node: "bench", Modules: wasm.New(wasm.Options{Exe: self, Cgroups: b.groups})})
	defer func() { err = errors.Join(err, e.Close()) }()
	sandbox := func(name string, argv ...string) bench.Contender {
		r := b.ours
		r.Name, r.Argv, r.Steps = name, argv, nil
		r.Spec.Limits.Memory, r.Spec.Limits.Pids, r.Spec.Limits.Disk = 256<<20, 64, 64<<20
		return r.Contender()
	}
	const snippet = "print(sum(range(10)))"
	native := dsec.Call{Type: dsec.CallExec, Image: "bench", Command: []string{"/bin/true"}}
	loopback := native
	loopback.Network = dsec.CallLoopback
	calls := []bench.Calls{
		{Name: "native", Caller: e, Call: native, Times: 5},
		{Name: "native, loopback", Caller: e, Call: loopback, Times: 2},
		{Name: "python", Caller: e, Call: dsec.Call{Type: dsec.CallPython, Image: "bench", Code: []byte(snippet)}, Times: 5},
		{Name: "native python3 -c", Caller: e, Call: dsec.Call{Type: dsec.CallExec, Image: "bench", Command: []string{"python3", "-c", snippet}}},
		{Name: "wasm", Caller: e, Call: dsec.Call{Type: dsec.CallWasm, Code: bench.HelloModule}, Times: 50},
	}
	contenders := []bench.Contender{sandbox("sandbox", "/bin/true"), sandbox("sandbox, python3 -c", "python3", "-c", snippet)}
	for _, c := range calls {
		k := c.Contender()
		w, err := k.Worker(0)
		if err == nil {
			_, err = w.Cycle(ctx, 0) // its first container and its module are made
		}
		if err != nil {
			return err
		}
		contenders = append(contenders, k)
	}
	samples, err := bench.Run(ctx, contenders, bench.Options{Concurrency: f.concurrency, Rounds: f.rounds, Cycles: f.cycles, Progress: progress})
	if err != nil {
		return err
	}
	if f.json {
		return json.NewEncoder(os.Stdout).Encode(samples)
	}
	fmt.Printf("stateless calls beside create, command, destroy; %d rounds in turn, %d CPUs\n\n", f.rounds, runtime.NumCPU())
	bench.CallTable(os.Stdout, samples, contenders, map[string]string{"python": "sandbox, python3 -c", "native python3 -c": "sandbox, python3 -c"})
	fmt.Printf("\n%+v\n", e.Counts())
	return nil
}
