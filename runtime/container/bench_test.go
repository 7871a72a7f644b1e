package container

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/opendsec/dsec/bench"
	"github.com/opendsec/dsec/process"
)

// BenchmarkCreateExecDestroy reports, besides the whole, the median of each
// step in microseconds.
func BenchmarkCreateExecDestroy(b *testing.B) {
	w := newWorld(b)
	steps := map[string][]time.Duration{}
	add := func(name string, since time.Time) {
		steps[name] = append(steps[name], time.Since(since))
	}
	ctx := context.Background()
	for i := 0; b.Loop(); i++ {
		req := request(b)
		began := time.Now()
		took, err := w.r.Create(ctx, req)
		must(b, err)
		add("create", began)
		for k, s := range took {
			name := fmt.Sprintf("%02d-%s", k, s.Name)
			steps[name] = append(steps[name], s.Took)
		}
		at := time.Now()
		p, err := w.r.Exec(ctx, req.ID, process.Spec{Argv: []string{"/bin/true"}})
		must(b, err)
		_, err = p.Wait(ctx)
		must(b, err)
		add("exec", at)
		at = time.Now()
		must(b, w.r.Destroy(ctx, req.ID))
		add("destroy", at)
	}
	for name, d := range steps {
		slices.Sort(d)
		b.ReportMetric(float64(d[len(d)/2].Microseconds()), name+"-us")
	}
}

// BenchmarkParallel is the rate at a concurrency of 8.
func BenchmarkParallel(b *testing.B) {
	w := newWorld(b)
	b.SetParallelism(4) // of two CPUs
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			id := w.create(b)
			w.run(b, id, process.Spec{Argv: []string{"/bin/true"}})
			must(b, w.r.Destroy(context.Background(), id))
		}
	})
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "sandboxes/s")
}

// BenchmarkIdle reports what an idle sandbox costs.
func BenchmarkIdle(b *testing.B) {
	const live = 200
	w := newWorld(b)
	for b.Loop() {
		r := bench.Runtime{Name: "dsec", RT: w.r, Spec: request(b).Spec, Layers: request(b).Layers, Node: "t"}
		m, err := r.Idle(context.Background(), live, 2)
		must(b, err)
		b.ReportMetric(float64(m.Kernel>>10), "kernel-KiB")
		b.ReportMetric(float64(m.Slab>>10), "slab-KiB")
		b.ReportMetric(float64(m.Available>>10), "host-KiB")
	}
}
