package demand

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/bench"
	"github.com/opendsec/dsec/bench/images"
	"github.com/opendsec/dsec/blob/fault"
	"github.com/opendsec/dsec/blob/s3test"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/layer/store"
	"github.com/opendsec/dsec/process"
)

const (
	imagesEnv = "DSEC_DEMAND_IMAGES"
	prefix    = "burst" // in the bucket
	latency   = 20 * time.Millisecond
	within    = 20 * time.Minute // of one command
)

// env is one environment: its layers, bottom first, and what is run in it.
type env struct {
	images.Run
	refs []dsec.LayerRef
}

// world is a store full of layers that no machine has.
type world struct {
	*s3test.Server
	dir  string
	envs []env
}

// TestDemand runs the measurements, each of which can be run alone.
func TestDemand(t *testing.T) {
	w := newWorld(t)
	t.Run("burst", w.burst)
	t.Run("alone", w.alone)
	t.Run("never", w.neverSeen)
	t.Run("mounts", w.mounts)
}

func newWorld(t *testing.T) *world {
	dir := os.Getenv(imagesEnv)
	if dir == "" {
		t.Skipf("%s is empty: no images to measure with", imagesEnv)
	}
	found, err := images.Found(dir)
	must(t, err)
	runs, err := images.Runs(found)
	must(t, err)
	w := &world{Server: s3test.Start(t), dir: dir}
	m := boot(t, w.URL(prefix), how())
	made := map[string]dsec.LayerRef{}
	for _, r := range runs {
		e := env{Run: r}
		for i, name := range r.Layers {
			if made[name] == "" {
				made[name] = m.push(filepath.Join(dir, name+".tar"), i > 0)
			}
			e.refs = append(e.refs, made[name])
		}
		w.envs = append(w.envs, e)
	}
	m.Down()
	return w
}

// push makes a layer of a tar; with over, one that goes over others.
func (m *machine) push(tar string, over bool) dsec.LayerRef {
	m.t.Helper()
	f, err := os.Open(tar)
	must(m.t, err)
	defer f.Close()
	var l client.Layer
	if over {
		l, err = m.UploadTree(m.t.Context(), f, client.BuildOptions{})
	} else {
		l, err = m.UploadImage(m.t.Context(), f, "")
	}
	must(m.t, err)
	return dsec.LayerRef(l.Digest)
}

func how() string {
	if v := os.Getenv("DSEC_DEMAND_HOW"); v != "" {
		return v
	}
	return "fuse"
}

func number(t *testing.T, name string, or int) int {
	v := os.Getenv(name)
	if v == "" {
		return or
	}
	n, err := strconv.Atoi(v)
	if err != nil || n < 1 {
		t.Fatalf("%s=%q is not a number above 0", name, v)
	}
	return n
}

// outcome of a burst.
type outcome struct {
	way               string
	ready, done       []time.Duration // of each sandbox, sorted
	fetched, requests int64           // bytes of bodies and requests that left the S3 server
	written           int64           // bytes that reached the disk of the machine
	touched, plain    int64           // bytes in the page cache of the layers; bytes that the loader brought
	stalls            int64
	stalled           time.Duration
	idle, serving     time.Duration // of all CPUs; CPU time of the S3 server and of this process
}

// String is a line of a table.
func (o *outcome) String() string {
	last := func(d []time.Duration) float64 { return d[len(d)-1].Seconds() }
	return fmt.Sprintf("| %-26s | %6.2f | %6.2f | %7.2f | %6d | %7.1f | %7.1f | %7.1f | %7.1f | %5.2f | %6d | %7.2f | %6.1f | %6.1f |", o.way, bench.Quantile(o.ready, .5).Seconds(), last(o.ready),
		last(o.done), o.requests, mib(o.fetched), mib(o.written), mib(o.touched), mib(o.plain), float64(o.plain)/float64(max(o.touched, 1)), o.stalls, o.stalled.Seconds(),
		o.idle.Seconds(), o.serving.Seconds())
}

const head = "| way | ready: half s | all s | done: all s | requests | fetched MiB | written MiB | touched MiB | plain MiB | plain/touched | reads that waited | s in all | idle CPU s | S3 server's CPU s |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"

func mib(n int64) float64 { return float64(n) / (1 << 20) }

func spec(e env) dsec.Spec {
	return dsec.Spec{Tier: dsec.TierContainer, Image: e.refs[0], Layers: e.refs[1:], Network: dsec.NetworkNone,
		Limits: dsec.Limits{CPU: 1, Memory: 1 << 30, Pids: 512, Disk: 1 << 30}}
}

// burst asks for all sandboxes at once; each runs its command as soon as it is
// there. They live until what is in memory of the
// layers has been looked at.
func (m *machine) burst(w *world, way string, envs []env) outcome {
	m.t.Helper()
	dropCaches(m.t)
	end := w.meter(m.t, m)
	ctx, cancel := context.WithTimeout(m.t.Context(), within)
	defer cancel()
	var mu sync.Mutex
	var ids []dsec.SandboxID
	var ready, done []time.Duration
	specs := make([]dsec.Spec, len(envs))
	for i, e := range envs {
		specs[i] = spec(e)
	}
	g, gctx := errgroup.WithContext(ctx)
	begin := time.Now()
	err := m.CreateMany(ctx, specs, "", func(c client.Created) error {
		if c.Err != nil {
			return c.Err
		}
		mu.Lock()
		ids = append(ids, c.Sandbox.ID)
		mu.Unlock()
		g.Go(func() error {
			err := m.command(gctx, c.Sandbox.ID, []string{"/bin/true"})
			first := time.Since(begin)
			if err == nil {
				err = m.command(gctx, c.Sandbox.ID, envs[c.Index].Argv())
			}
			if err != nil {
				return fmt.Errorf("%s: %w", envs[c.Index].Name, err)
			}
			mu.Lock()
			defer mu.Unlock()
			ready, done = append(ready, first), append(done, time.Since(begin))
			return nil
		})
		return nil
	})
	must(m.t, err)
	must(m.t, g.Wait())
	o := end(way, ready, done)
	for _, id := range ids {
		_, err := m.Delete(ctx, id)
		must(m.t, err)
	}
	return o
}

func (m *machine) command(ctx context.Context, id dsec.SandboxID, argv []string) error {
	var out bytes.Buffer
	r, err := m.Run(ctx, id, process.Spec{Argv: argv, Timeout: within}, &out, &out)
	if err == nil && (r.Status != process.Exited || r.ExitCode != 0) {
		err = fmt.Errorf("%s, exit code %d: %s", r.Status, r.ExitCode, out.Bytes()[max(0, out.Len()-1000):])
	}
	return err
}

// note has the machine tell the store what was read first, by letting go of the
// layers.
func (m *machine) note(w *world, envs []env) {
	m.t.Helper()
	for _, ref := range m.large(envs) {
		_, err := m.EvictLayer(m.t.Context(), ref)
		must(m.t, err)
		if _, err := os.Stat(filepath.Join(w.Data(), s3test.BucketName, prefix, layer.TraceKey(layer.Digest(ref)))); err != nil {
			m.t.Fatalf("no trace of %s: %v", ref, err)
		}
	}
}

// large are the layers that do not come whole at once because they are small.
func (m *machine) large(envs []env) []dsec.LayerRef {
	m.t.Helper()
	return slices.DeleteFunc(distinct(envs), func(r dsec.LayerRef) bool {
		l, err := m.InspectLayer(m.t.Context(), r)
		must(m.t, err)
		return l.DataSize <= store.DefaultSmall
	})
}

func distinct(envs []env) (out []dsec.LayerRef) {
	for _, e := range envs {
		for _, r := range e.refs {
			if !slices.Contains(out, r) {
				out = append(out, r)
			}
		}
	}
	return out
}

// repack lays the layers out in the order of their traces.
func (m *machine) repack(envs []env) []env {
	m.t.Helper()
	made := map[dsec.LayerRef]dsec.LayerRef{}
	for _, ref := range m.large(envs) {
		l, err := m.RepackLayer(m.t.Context(), ref, "", nil)
		must(m.t, err)
		made[ref] = dsec.LayerRef(l.Digest)
	}
	out := slices.Clone(envs)
	for i, e := range envs {
		out[i].refs = nil
		for _, r := range e.refs {
			out[i].refs = append(out[i].refs, cmp.Or(made[r], r))
		}
	}
	return out
}

// many is n environments, in turns.
func many(envs []env, n int) []env {
	out := make([]env, n)
	for i := range out {
		out[i] = envs[i%len(envs)]
	}
	return out
}

// burst is experiment 1.
func (w *world) burst(t *testing.T) {
	n := number(t, "DSEC_DEMAND_N", 48)
	archives := w.archives(t)
	w.Proxy.Set(fault.Faults{Latency: latency, Bandwidth: int64(number(t, "DSEC_DEMAND_BANDWIDTH", 0)) << 20})
	envs := many(w.envs, n)
	var packed []env
	way := map[string]func(*testing.T) []outcome{
		"whole": func(t *testing.T) []outcome {
			m := boot(t, w.URL(prefix), "off")
			first := m.burst(w, "layers fetched whole first", envs)
			return []outcome{first, m.burst(w, "all is there", envs)}
		},
		"demand": func(t *testing.T) []outcome {
			forgetTraces(t, w.Server, distinct(w.envs))
			m := boot(t, w.URL(prefix), how())
			first := m.burst(w, "on demand", envs)
			m.note(w, w.envs)
			if packed == nil {
				packed = m.repack(w.envs)
			}
			return []outcome{first}
		},
		"trace": func(t *testing.T) []outcome {
			return []outcome{boot(t, w.URL(prefix), how()).burst(w, "on demand, trace", envs)}
		},
		"packed": func(t *testing.T) []outcome {
			if packed == nil {
				t.Fatal("no layer was repacked")
			}
			return []outcome{boot(t, w.URL(prefix), how()).burst(w, "on demand, trace, repacked", many(packed, n))}
		},
		"archives": func(t *testing.T) []outcome { return []outcome{w.unpacked(t, archives, envs)} },
	}
	var all []outcome
	for round := range number(t, "DSEC_DEMAND_ROUNDS", 1) {
		for _, name := range strings.Fields("demand trace whole packed archives") {
			t.Run(fmt.Sprintf("%s %d", name, round), func(t *testing.T) {
				before := load()
				got := way[name](t)
				all = append(all, got...)
				for i := range got {
					t.Logf("load %s\n%s", before, got[i].String())
				}
			})
		}
	}
	report(t, n, all)
}
