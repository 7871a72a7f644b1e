package demand

import (
	"slices"
	"testing"
	"time"
)

// meter counts from now on, until what it returns is called with what it was
// about.
func (w *world) meter(t *testing.T, m *machine) (end func(way string, ready, done []time.Duration) outcome) {
	t.Helper()
	read := func() (o outcome) {
		o.fetched, _ = w.Proxy.Bytes()
		o.requests, o.idle, o.serving = w.Proxy.Requests(), idle(t), serving(t)
		if m.Client == nil { // no dsec runs
			return o
		}
		demand, err := m.LayersOnDemand(t.Context())
		must(t, err)
		for _, d := range demand {
			o.touched += max(d.Touched, 0)
			o.plain, o.stalls, o.stalled = o.plain+d.Plain, o.stalls+d.Stalls, o.stalled+d.Stalled
		}
		return o
	}
	written := m.written()
	before := read()
	return func(way string, ready, done []time.Duration) outcome {
		o := read()
		o.way, o.ready, o.done = way, slices.Sorted(slices.Values(ready)), slices.Sorted(slices.Values(done))
		o.fetched, o.requests, o.plain = o.fetched-before.fetched, o.requests-before.requests, o.plain-before.plain
		o.stalls, o.stalled = o.stalls-before.stalls, o.stalled-before.stalled
		o.idle, o.serving = o.idle-before.idle, o.serving-before.serving
		o.written = m.written() - written
		return o
	}
}
