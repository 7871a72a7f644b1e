package bench

import (
	"context"
	_ "embed" // a module
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/opendsec/dsec"
	dsecruntime "github.com/opendsec/dsec/runtime"
)

// HelloModule is a WebAssembly module that prints a line.
//
//go:embed hello.wasm
var HelloModule []byte

// Calls is a contender that makes the same call again and again. A cycle is one call.
type Calls struct {
	Name   string
	Caller dsecruntime.Caller
	Call   dsec.Call
	Times  int // see Contender
}

// Contender of c.
func (c Calls) Contender() Contender {
	c.Call.Fill()
	return Contender{Name: c.Name, Worker: func(int) (Worker, error) { return callWorker{c}, nil }, Times: c.Times, Warm: 4}
}

type callWorker struct{ c Calls }

func (w callWorker) Cycle(ctx context.Context, _ int) (time.Duration, error) {
	begin := time.Now()
	r, err := w.c.Caller.Call(ctx, "bench", w.c.Call)
	if err == nil && r.Verdict != dsec.VerdictOK {
		err = fmt.Errorf("bench call %s: %s: %s: %s", w.c.Name, r.Verdict, r.Detail, r.Stderr)
	}
	return time.Since(begin), err
}

func (w callWorker) Close() error { return nil }

// CallTable prints, per concurrency, the median round of each contender, how many times
// the rate of what it is compared with it has, and its p99 by its median.
func CallTable(w io.Writer, samples []Sample, contenders []Contender, against map[string]string) {
	tw := tabwriter.NewWriter(w, 2, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "CONCURRENCY\tWHAT\tRATE\tP50\tP99\tP99/P50\tFAILED\tRATIO")
	for _, c := range concurrencies(samples) {
		for _, k := range contenders {
			m := median(samples, k.Name, c)
			if m.Cycles == 0 {
				continue
			}
			ratio := ""
			for _, base := range []string{contenders[0].Name, against[k.Name]} {
				if b := median(samples, base, c); b.Rate() > 0 && base != k.Name {
					ratio += fmt.Sprintf("%.1fx of %s  ", m.Rate()/b.Rate(), base)
				}
			}
			fmt.Fprintf(tw, "%d\t%s\t%.1f/s\t%s\t%s\t%.1f\t%d\t%s\n", c, k.Name, m.Rate(), m.P50.Round(10*time.Microsecond), m.P99.Round(10*time.Microsecond),
				m.P99.Seconds()/m.P50.Seconds(), m.Failures, ratio)
		}
	}
	tw.Flush()
}
