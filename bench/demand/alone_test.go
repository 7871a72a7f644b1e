package demand

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/opendsec/dsec/blob/fault"
)

// alone is experiment 4: each environment on a machine that has nothing, one
// sandbox, without a trace, with one, and with data in the order of it.
func (w *world) alone(t *testing.T) {
	w.Proxy.Set(fault.Faults{Latency: latency})
	rounds := number(t, "DSEC_DEMAND_ROUNDS", 1)
	text := "| program | way | done | requests | fetched MiB | plain/touched | reads that waited | s in all |\n|---|---|---|---|---|---|---|---|"
	for _, e := range w.envs {
		t.Run(e.Name, func(t *testing.T) {
			var all []outcome
			for range rounds {
				all = append(all, once(t, w, e)...)
			}
			for _, o := range middle(all) {
				text += fmt.Sprintf("\n| %s | %s | %.2f s | %d | %.1f | %.2f | %d | %.2f |", e.Name, o.way, o.last().Seconds(), o.requests, mib(o.fetched), float64(o.plain)/float64(max(o.touched, 1)), o.stalls, o.stalled.Seconds())
			}
		})
	}
	t.Logf("medians of %d:\n%s", rounds, text)
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
