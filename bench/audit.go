package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// Cost is what a workload took in one round, seen or not.
type Cost struct {
	Seen    bool          `json:"seen"`
	Round   int           `json:"round"`
	Wall    time.Duration `json:"wall"`    // until the workload ended
	Sandbox time.Duration `json:"sandbox"` // CPU time of its processes, with what the kernel does in them to see it
	Agent   time.Duration `json:"agent"`   // CPU time of this process, until the sandbox was removed
	Records int           `json:"records"` // of evidence
	Lost    int64         `json:"lost"`    // that are missing, at least
}

// CPU is all that the workload asked of the machine.
func (c Cost) CPU() time.Duration { return c.Sandbox + c.Agent }

// Cost runs the command of r in a sandbox of its own and removes that.
func (r Runtime) Cost(ctx context.Context) (c Cost, err error) {
	id := dsec.NewSandboxID(r.Node)
	before, err := ownCPU()
	if err != nil {
		return c, err
	}
	defer func() {
		err = errors.Join(err, r.RT.Destroy(context.WithoutCancel(ctx), id))
		after, cerr := ownCPU()
		c.Agent, err = after-before, errors.Join(err, cerr)
	}()
	if err := r.Create(ctx, id); err != nil {
		return c, err
	}
	begin := time.Now()
	if err := r.Must(ctx, id, nil); err != nil {
		return c, err
	}
	c.Wall = time.Since(begin)
	s, err := r.RT.Stats(ctx, id)
	c.Sandbox = s.CPU
	return c, err
}

func ownCPU() (time.Duration, error) {
	var u unix.Rusage
	err := unix.Getrusage(unix.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()), err
}

// CostTable prints what being seen costs: the ratios are of the two runs of a round,
// which follow each other.
func CostTable(w io.Writer, all []Cost) {
	tw := tabwriter.NewWriter(w, 2, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "RATIO OF SEEN TO UNSEEN\tMEDIAN\tQUARTILES\tALL\tUNSEEN TOOK")
	for _, m := range []struct {
		name string
		of   func(Cost) time.Duration
	}{{"wall", func(c Cost) time.Duration { return c.Wall }}, {"CPU, with the agent's", Cost.CPU}, {"CPU of the sandbox", func(c Cost) time.Duration { return c.Sandbox }}} {
		ratios, took := ratiosOf(all, m.of)
		if len(ratios) == 0 {
			continue
		}
		at := func(q float64) float64 { return ratios[min(int(q*float64(len(ratios))), len(ratios)-1)] }
		fmt.Fprintf(tw, "%s\t%.3f\t%.3f-%.3f\t%.3f-%.3f\t%s\n", m.name, at(.5), at(.25), at(.75), at(0), at(1), Quantile(took, .5).Round(time.Millisecond))
	}
	tw.Flush()
	var records int
	var lost int64
	var seen int
	for _, c := range all {
		if c.Seen {
			records, lost, seen = records+c.Records, lost+c.Lost, seen+1
		}
	}
	if seen > 0 {
		fmt.Fprintf(w, "%d records in a run, %d lost in all\n", records/seen, lost)
	}
}

// ratiosOf pairs the runs of each round; both results are sorted.
func ratiosOf(all []Cost, of func(Cost) time.Duration) (ratios []float64, unseen []time.Duration) {
	seen := map[int]time.Duration{}
	for _, c := range all {
		if c.Seen {
			seen[c.Round] = of(c)
		}
	}
	for _, c := range all {
		if s, ok := seen[c.Round]; ok && !c.Seen && of(c) > 0 {
			ratios, unseen = append(ratios, float64(s)/float64(of(c))), append(unseen, of(c))
		}
	}
	slices.Sort(ratios)
	slices.Sort(unseen)
	return ratios, unseen
}
