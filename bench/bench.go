// Package bench measures dsec beside its peers in the same run: rounds of the
// contenders are interleaved, so that a noisy machine is noisy for all, and
// results are read as ratios within a round, never as absolute times.
package bench

import (
	"context"
	"fmt"
	"io"
	"slices"
	"sync"
	"text/tabwriter"
	"time"
)

// Worker runs cycles on one goroutine. A cycle is create → first command →
// destroy; first is the time until the first command has answered.
type Worker interface {
	Cycle(ctx context.Context, n int) (first time.Duration, err error)
	Close() error
}

// Contender makes workers.
type Contender struct {
	Name   string
	Worker func(index int) (Worker, error)
	// Times as many cycles make a round of it that is not over at once; 0: once.
	Times int
	// Warm times the number of workers cycles come before a round, and do not count: what others have
	// pushed out of a pool meanwhile is there again. It is an error if all of them fail.
	Warm int
}

// Options of Run.
type Options struct {
	Concurrency []int
	Rounds      int
	Cycles      int // per round and contender, over all workers
	Progress    func(line string)
}

// Sample is one contender's round.
type Sample struct {
	Contender   string        `json:"contender"`
	Concurrency int           `json:"concurrency"`
	Round       int           `json:"round"`
	Cycles      int           `json:"cycles"`
	Failures    int           `json:"failures"`
	Wall        time.Duration `json:"wall"`
	P50         time.Duration `json:"p50"`
	P99         time.Duration `json:"p99"`
}

// Rate in cycles per second; failed ones do not count.
func (s Sample) Rate() float64 {
	if s.Wall <= 0 {
		return 0
	}
	return float64(s.Cycles-s.Failures) / s.Wall.Seconds()
}

// Run measures every contender at every concurrency, rounds interleaved.
func Run(ctx context.Context, contenders []Contender, o Options) ([]Sample, error) {
	var out []Sample
	for _, c := range o.Concurrency {
		for round := range o.Rounds {
			for i := range contenders {
				// The order turns each round: what runs first has a quieter machine.
				k := contenders[(i+round)%len(contenders)]
				s, err := oneRound(ctx, k, c, o.Cycles*max(k.Times, 1))
				if err != nil {
					return out, fmt.Errorf("bench %s at concurrency %d: %w", k.Name, c, err)
				}
				s.Round = round
				out = append(out, s)
				if o.Progress != nil {
					o.Progress(fmt.Sprintf("%-8s c=%-3d round %d  %7.1f/s  p50 %s  failures %d",
						k.Name, c, round, s.Rate(), s.P50.Round(10*time.Microsecond), s.Failures))
				}
			}
		}
	}
	return out, nil
}

func oneRound(ctx context.Context, k Contender, concurrency, cycles int) (Sample, error) {
	workers := make([]Worker, concurrency)
	for i := range workers {
		w, err := k.Worker(i)
		if err != nil {
			return Sample{}, err
		}
		defer w.Close()
		workers[i] = w
	}
	if _, _, err := turns(ctx, workers, k.Warm*concurrency); err != nil {
		return Sample{}, err
	}
	begin := time.Now()
	firsts, failures, err := turns(ctx, workers, cycles)
	wall := time.Since(begin)
	if err != nil {
		return Sample{}, err
	}
	return Sample{Contender: k.Name, Concurrency: concurrency, Cycles: cycles, Failures: failures, Wall: wall,
		P50: Quantile(firsts, 0.50), P99: Quantile(firsts, 0.99)}, nil
}

// turns has workers take cycles as they are free. It is an error if all failed.
func turns(ctx context.Context, workers []Worker, cycles int) (firsts []time.Duration, failures int, _ error) {
	var (
		mu       sync.Mutex
		firstErr error
		wg       sync.WaitGroup
	)
	next := make(chan int)
	for _, w := range workers {
		wg.Go(func() {
			for n := range next {
				d, err := w.Cycle(ctx, n)
				mu.Lock()
				if err != nil {
					failures++
					firstErr = cmpErr(firstErr, err)
				} else {
					firsts = append(firsts, d)
				}
				mu.Unlock()
			}
		})
	}
	for n := range cycles {
		select {
		case next <- n:
		case <-ctx.Done():
		}
	}
	close(next)
	wg.Wait()
	if err := ctx.Err(); err != nil {
		return nil, failures, err
	}
	if len(firsts) == 0 {
		return nil, failures, firstErr
	}
	slices.Sort(firsts)
	return firsts, failures, nil
}

func cmpErr(have, got error) error {
	if have != nil {
		return have
	}
	return got
}

// Quantile of sorted durations; 0 for none.
func Quantile(sorted []time.Duration, q float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	i := int(q * float64(len(sorted)))
	return sorted[min(i, len(sorted)-1)]
}

// Table prints, per concurrency, the median round of each contender and its
// ratio to the first contender's.
func Table(w io.Writer, samples []Sample, contenders []Contender) {
	tw := tabwriter.NewWriter(w, 2, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "CONCURRENCY\tCONTENDER\tCYCLES/S\tP50\tP99\tFAILED\tRATE RATIO\tP50 RATIO")
	for _, c := range concurrencies(samples) {
		base := median(samples, contenders[0].Name, c)
		for _, k := range contenders {
			m := median(samples, k.Name, c)
			if m.Cycles == 0 {
				continue
			}
			fmt.Fprintf(tw, "%d\t%s\t%.1f\t%s\t%s\t%d\t%.1fx\t1/%.1f\n", c, k.Name, m.Rate(), m.P50.Round(10*time.Microsecond),
				m.P99.Round(10*time.Microsecond), m.Failures, base.Rate()/m.Rate(), m.P50.Seconds()/base.P50.Seconds())
		}
	}
	tw.Flush()
}

func concurrencies(samples []Sample) (out []int) {
	for _, s := range samples {
		if !slices.Contains(out, s.Concurrency) {
			out = append(out, s.Concurrency)
		}
	}
	return out
}

func median(samples []Sample, name string, c int) Sample {
	var of []Sample
	for _, s := range samples {
		if s.Contender == name && s.Concurrency == c {
			of = append(of, s)
		}
	}
	if len(of) == 0 {
		return Sample{}
	}
	slices.SortFunc(of, func(a, b Sample) int { return int(a.Rate()*1000) - int(b.Rate()*1000) })
	return of[len(of)/2]
}
