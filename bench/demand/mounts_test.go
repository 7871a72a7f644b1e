package demand

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/bench"
	"github.com/opendsec/dsec/bench/images"
	"github.com/opendsec/dsec/layer/ondemand/precontent"
)

// reading is all of a root file system.
const reading = "find / -xdev -type f -print0 | xargs -0 cat >/dev/null"

// mounts is the part of experiment 3 that has a loader in the path: a layer
// all of whose data have come through a mount on demand that is still in use,
// beside the same layer fetched whole before it was mounted.
func (w *world) mounts(t *testing.T) {
	name := os.Getenv("DSEC_DEMAND_LAYER")
	if name == "" {
		name = "web"
	}
	i := slices.IndexFunc(w.envs, func(e env) bool { return e.Layers[0] == name })
	if i < 0 {
		t.Fatalf("no environment on %s", name)
	}
	e := w.envs[i]
	e.refs = e.refs[:1]
	lives := []int{1, number(t, "DSEC_DEMAND_LIVE", 1000)}
	text := "| mount | live | cold | warm | page cache after, times the contents | 5 s later |\n|---|---|---|---|---|---|"
	ways := []string{"off", "fuse"}
	if err := precontent.Supported("/var/tmp"); err != nil {
		t.Logf("skipped: pre-content: %v", err)
	} else {
		ways = append(ways, "pre-content")
	}
	for _, how := range ways {
		t.Run(how, func(t *testing.T) {
			m := boot(t, w.URL(prefix), how)
			first := m.live(e, 1, false)[0]
			must(t, m.command(t.Context(), first, images.Run{Command: reading}.Argv())) // brings all
			time.Sleep(10 * time.Second)                                                // the loader writes it to the disk every 5 s
			have := 1
			for _, n := range lives {
				m.live(e, n-have, true)
				have = n
				text += "\n" + m.readings(first, how, n, w.size(t, name))
			}
		})
	}
	t.Log("\n" + text)
}

// size of the files of an image, as its tar has them.
func (w *world) size(t *testing.T, name string) int64 {
	t.Helper()
	st, err := os.Stat(filepath.Join(w.dir, name+".tar"))
	must(t, err)
	return st.Size()
}

// live makes n sandboxes, each of which has done a small job; idle ones do no
// more.
func (m *machine) live(e env, n int, idle bool) (ids []dsec.SandboxID) {
	m.t.Helper()
	s := spec(e)
	if idle {
		s.Limits.CPU, s.Limits.Memory = 0.1, 64<<20 // so that many are admitted
	}
	for range n {
		sb, err := m.Create(m.t.Context(), s)
		must(m.t, err)
		must(m.t, m.command(m.t.Context(), sb.ID, images.Run{Command: "git --version >/dev/null && find /usr/share -name 'c*' >/dev/null"}.Argv()))
		ids = append(ids, sb.ID)
	}
	return ids
}

// readings are the medians of reading all, with nothing and with all in memory.
func (m *machine) readings(id dsec.SandboxID, how string, live int, size int64) string {
	m.t.Helper()
	var cold, warm []time.Duration
	var peak, settled []float64
	for range number(m.t, "DSEC_DEMAND_ROUNDS", 1) {
		dropCaches(m.t)
		before := cached(m.t)
		times := func() float64 { return float64(cached(m.t)-before) / float64(size) }
		for _, to := range []*[]time.Duration{&cold, &warm} {
			begin := time.Now()
			must(m.t, m.command(m.t.Context(), id, images.Run{Command: reading}.Argv()))
			*to = append(*to, time.Since(begin))
		}
		peak = append(peak, times())
		time.Sleep(5 * time.Second) // the agent gives back every 2 s what is there twice
		settled = append(settled, times())
	}
	slices.Sort(cold)
	slices.Sort(warm)
	slices.Sort(peak)
	slices.Sort(settled)
	return fmt.Sprintf("| %s | %d | %.2f s | %.2f s | %.2f | %.2f |", how, live, bench.Quantile(cold, .5).Seconds(), bench.Quantile(warm, .5).Seconds(),
		peak[len(peak)/2], settled[len(settled)/2])
}

// cached is how many bytes the page cache of this machine has.
func cached(t *testing.T) int64 {
	t.Helper()
	text, err := os.ReadFile("/proc/meminfo")
	must(t, err)
	for _, l := range strings.Split(string(text), "\n") {
		if f := strings.Fields(l); len(f) > 1 && f[0] == "Cached:" {
			n, err := strconv.ParseInt(f[1], 10, 64)
			must(t, err)
			return n << 10
		}
	}
	t.Fatal("no Cached in /proc/meminfo")
	return 0
}
