package demand

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/opendsec/dsec/bench/plot"
	"github.com/opendsec/dsec/blob/fault"
)

// alone is experiment 4: each environment on a machine that has nothing, one
// sandbox, without a trace, with one, and with data in the order of it.
func (w *world) alone(t *testing.T) {
	w.Proxy.Set(fault.Faults{Latency: latency})
	rounds := number(t, "DSEC_DEMAND_ROUNDS", 1)
	text := "| program | way | done | requests | fetched MiB | plain/touched | reads that waited | s in all |\n|---|---|---|---|---|---|---|---|"
	var mid [][]outcome
	for _, e := range w.envs {
		t.Run(e.Name, func(t *testing.T) {
			var all []outcome
			for range rounds {
				all = append(all, once(t, w, e)...)
			}
			mid = append(mid, middle(all))
			for _, o := range mid[len(mid)-1] {
				text += fmt.Sprintf("\n| %s | %s | %.2f s | %d | %.1f | %.2f | %d | %.2f |", e.Name, o.way, o.last().Seconds(), o.requests, mib(o.fetched), float64(o.plain)/float64(max(o.touched, 1)), o.stalls, o.stalled.Seconds())
			}
		})
	}
	t.Logf("medians of %d:\n%s", rounds, text)
	w.drawAlone(t, mid)
}

// drawAlone draws the outcomes of each environment, where DSEC_DEMAND_PLOTS says.
func (w *world) drawAlone(t *testing.T, envs [][]outcome) {
	dir := os.Getenv("DSEC_DEMAND_PLOTS")
	if dir == "" || len(envs) != len(w.envs) {
		return
	}
	times, waits := make([]plot.Series, len(envs[0])), make([]plot.Series, len(envs[0]))
	var names []string
	for i, e := range w.envs {
		names = append(names, e.Name)
		for k, o := range envs[i] {
			times[k].Name, times[k].Y = o.way, append(times[k].Y, o.last().Seconds())
			waits[k].Name, waits[k].Y = o.way, append(waits[k].Y, float64(o.stalls))
		}
	}
	must(t, errors.Join(
		plot.File(filepath.Join(dir, "alone-time.svg"), plot.Bars{Title: "Until one sandbox is done, 20 ms to the store", Y: "seconds", Groups: names, Series: times}),
		plot.File(filepath.Join(dir, "alone-waits.svg"), plot.Bars{Title: "Reads that waited", Y: "reads", Groups: names, Series: waits[:3]})))
}

func once(t *testing.T, w *world, e env) (out []outcome) {
	forgetTraces(t, w.Server, e.refs)
	one, packed := []env{e}, []env(nil)
	with := func(way string, envs []env, after func(*machine)) {
		t.Run(way, func(t *testing.T) {
			m := boot(t, w.URL(prefix), how())
			out = append(out, m.burst(w, way, envs))
			if after != nil {
				after(m)
			}
		})
	}
	with("no trace", one, func(m *machine) {
		m.note(w, one)
		packed = m.repack(one)
	})
	with("trace", one, nil)
	with("trace, repacked", packed, nil)
	with("once more there", one, func(m *machine) {
		out[len(out)-1] = m.burst(w, "once more there", one)
	})
	return out
}

// last is when all were done.
func (o outcome) last() time.Duration { return slices.Max(o.done) }
