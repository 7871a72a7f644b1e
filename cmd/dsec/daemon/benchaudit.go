package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/audit"
	"github.com/opendsec/dsec/bench"
	"github.com/opendsec/dsec/internal/linux"
)

func benchAuditVerb(f *benchFlags) *cobra.Command {
	return &cobra.Command{Use: "audit", Short: "A workload with and without evidence of what it does", Args: cobra.NoArgs,
		Example: "  bench/audit.sh root && sudo dsec bench audit --image root --rounds 15 --command /bin/sh,/build.sh",
		RunE: func(c *cobra.Command, _ []string) error {
			f.json, f.eyes = wantJSON(c), &eyes{}
			if f.image == "" {
				return dsec.Errorf(dsec.Invalid, "measure", "--image", "is required")
			}
			f.sources = []source{{f.image, "bench"}}
			return withBed(c.Context(), f, benchAudit)
		}}
}

// benchAudit measures what it costs a workload that what it does is seen. Between the
// runs that are seen, nothing of it is in the kernel.
func benchAudit(ctx context.Context, f *benchFlags, b *bed) error {
	r := b.ours
	r.Spec.Limits = dsec.Limits{CPU: 2, CPUWeight: 100, Memory: 4 << 30, Pids: 512, Disk: 1 << 30, Output: 64 << 20}
	if _, err := r.Cost(ctx); err != nil { // its files are in memory from now on
		return err
	}
	var all []bench.Cost
	for round := range f.rounds {
		for i := range 2 {
			c, err := b.cost(ctx, r, (i+round)%2 == 1)
			if err != nil {
				return err
			}
			c.Round = round
			all = append(all, c)
			progress(fmt.Sprintf("round %d seen %-5v wall %s cpu %s agent %s records %d lost %d", round, c.Seen, c.Wall.Round(time.Millisecond),
				c.Sandbox.Round(time.Millisecond), c.Agent.Round(time.Millisecond), c.Records, c.Lost))
		}
	}
	if f.json {
		return json.NewEncoder(os.Stdout).Encode(all)
	}
	fmt.Printf("%q with and without evidence, %d rounds in turn\n\n", f.argv, f.rounds)
	bench.CostTable(os.Stdout, all)
	return nil
}

func (b *bed) cost(ctx context.Context, r bench.Runtime, seen bool) (c bench.Cost, err error) {
	if !seen {
		return r.Cost(ctx)
	}
	e, k := &evidence{}, linux.NewKeeper()
	defer k.Close()
	var mu sync.Mutex
	var records int
	var lost int64
	if err := e.openFor(ctx, k, b, func(a dsec.AuditRecord) {
		mu.Lock()
		defer mu.Unlock()
		if records++; a.Kind == dsec.AuditLost {
			lost += max(1, a.Count)
		}
	}); err != nil {
		return c, err
	}
	b.eyes.open(e.witness())
	c, err = r.Cost(ctx)
	b.eyes.open(nil)
	err = errors.Join(err, e.close(), os.RemoveAll(b.auditDir()))
	c.Seen, c.Records, c.Lost = true, records, lost
	return c, err
}

func (b *bed) auditDir() string { return filepath.Join(b.dir, "audit") }

// openFor has both witnesses, or errs: half of the cost is no answer.
func (e *evidence) openFor(ctx context.Context, k *linux.Keeper, b *bed, count func(dsec.AuditRecord)) (err error) {
	defer func() {
		if err != nil {
			err = errors.Join(err, e.close())
		}
	}()
	if e.store, err = audit.Open(audit.Config{Dir: b.auditDir(), Log: slog.Default(), Count: count}); err != nil {
		return err
	}
	if err = e.witnesses(ctx, witnessed{k, "bench", b.uidBase, b.disks}, slog.Default()); err != nil {
		return err
	}
	return e.start().Do(ctx)
}

// eyes are the witnesses of a measurement, which come and go.
type eyes struct {
	mu  sync.Mutex
	now audit.Witness // nil: closed
}

func (e *eyes) open(w audit.Witness) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.now = w
}

func (e *eyes) get() audit.Witness {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.now == nil {
		return audit.Witnesses(nil)
	}
	return e.now
}

// Add implements audit.Witness.
func (e *eyes) Add(ctx context.Context, s audit.Subject, adopted bool) error {
	return e.get().Add(ctx, s, adopted)
}

// Remove implements audit.Witness.
func (e *eyes) Remove(ctx context.Context, id dsec.SandboxID, disk *os.File) {
	e.get().Remove(ctx, id, disk)
}
