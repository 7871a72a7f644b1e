package bench

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/opendsec/dsec"
)

// Fill creates n sandboxes, so many at once, and returns those that live, also
// with an error.
func (r Runtime) Fill(ctx context.Context, n, atOnce int) ([]dsec.SandboxID, error) {
	ids := make([]dsec.SandboxID, n)
	for i := range ids {
		ids[i] = dsec.NewSandboxID(r.Node)
	}
	return ids, r.Each(ctx, ids, atOnce, r.Create)
}

// Drain destroys sandboxes.
func (r Runtime) Drain(ctx context.Context, ids []dsec.SandboxID) error {
	return r.Each(ctx, ids, 8, r.RT.Destroy)
}

// Each does something with sandboxes, so many at once.
func (r Runtime) Each(ctx context.Context, ids []dsec.SandboxID, atOnce int, do func(context.Context, dsec.SandboxID) error) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(max(atOnce, 1))
	for _, id := range ids {
		g.Go(func() error { return do(ctx, id) })
	}
	return g.Wait()
}

// IdleMemory is what each of many idle sandboxes costs, in bytes.
type IdleMemory struct {
	Live      int   `json:"live"`
	Available int64 `json:"available"` // fall of MemAvailable
	Kernel    int64 `json:"kernel"`    // growth of slab, stacks, page tables and per-CPU memory
	Slab      int64 `json:"slab"`
	User      int64 `json:"user"` // growth of anonymous memory
}

func (m IdleMemory) String() string {
	kib := func(n int64) string { return strconv.FormatInt(n>>10, 10) + " KiB" }
	return fmt.Sprintf("%d idle sandboxes, each: %s of host memory, %s of it kernel memory (slab %s), %s anonymous",
		m.Live, kib(m.Available), kib(m.Kernel), kib(m.Slab), kib(m.User))
}

// Idle creates n sandboxes and measures what they cost, then destroys them.
func (r Runtime) Idle(ctx context.Context, n, atOnce int) (IdleMemory, error) {
	warm, err := r.Fill(ctx, 2, 1)
	defer func() { _ = r.Drain(context.WithoutCancel(ctx), warm) }()
	if err != nil {
		return IdleMemory{}, err
	}
	before, err := memInfo()
	if err != nil {
		return IdleMemory{}, err
	}
	ids, err := r.Fill(ctx, n, atOnce)
	defer func() { _ = r.Drain(context.WithoutCancel(ctx), ids) }()
	if err != nil {
		return IdleMemory{}, err
	}
	after, err := memInfo()
	if err != nil {
		return IdleMemory{}, err
	}
	grew := func(keys ...string) (sum int64) {
		for _, k := range keys {
			sum += after[k] - before[k]
		}
		return sum / int64(n)
	}
	return IdleMemory{Live: n, Available: -grew("MemAvailable"), Kernel: grew("Slab", "KernelStack", "PageTables", "SecPageTables", "Percpu"),
		Slab: grew("Slab"), User: grew("AnonPages")}, nil
}

// memInfo reads /proc/meminfo, in bytes.
func memInfo() (map[string]int64, error) {
	text, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return nil, err
	}
	out := map[string]int64{}
	for line := range strings.Lines(string(text)) {
		f := strings.Fields(line)
		if len(f) >= 2 {
			n, err := strconv.ParseInt(f[1], 10, 64)
			if err == nil {
				out[strings.TrimSuffix(f[0], ":")] = n << 10
			}
		}
	}
	return out, nil
}
