package daemon

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/bench"
	"github.com/opendsec/dsec/bench/images"
	"github.com/opendsec/dsec/bench/plot"
)

// cacheFlags of the measurement of mount options.
type cacheFlags struct {
	*benchFlags
	image   string
	command string
	lives   []int
	plots   string
}

func benchCacheVerb(b *benchFlags) *cobra.Command {
	f := cacheFlags{benchFlags: b}
	c := &cobra.Command{Use: "cache", Short: "Layers mounted with directio beside buffered: memory and speed", Args: cobra.NoArgs,
		Example: "  sudo bench/images/build.sh python && sudo dsec bench cache --lives 1,1000",
		RunE: func(c *cobra.Command, _ []string) error {
			f.json = wantJSON(c)
			found, err := images.Found(f.images)
			if err != nil {
				return dsec.E(dsec.Invalid, "measure mounts", f.images, err)
			}
			i := slices.IndexFunc(found, func(i images.Image) bool { return i.Name == f.image })
			if i < 0 {
				return dsec.Errorf(dsec.NotFound, "measure mounts", f.image, "not in %s", f.images)
			}
			f.sources = []source{{"tar:" + found[i].Path, f.image}}
			return benchCache(c.Context(), &f)
		}}
	p := c.Flags()
	p.StringVar(&f.image, "layer", "python", "image that the sandboxes run on")
	p.StringVar(&f.command, "work", "python3 -c 'import json, unittest, email'", "what each sandbox runs once")
	p.IntSliceVar(&f.lives, "lives", []int{1, 1000}, "live sandboxes")
	p.StringVar(&f.plots, "plots", "", "directory for the plots; none if empty")
	return c
}

// mounted is a machine whose layer is mounted in one way.
type mounted struct {
	*bed
	way   string
	drop  bool // what is cached of the data file is given back while it is read
	mount *os.File
	data  string // what the file system reads
	ids   []dsec.SandboxID
}

// cacheRow is what one way costs with so many live.
type cacheRow struct {
	Way    string        `json:"way"`
	Live   int           `json:"live"`
	Bytes  int64         `json:"bytes"` // of the data file
	Work   time.Duration `json:"work"`  // of all that are new, each once
	New    int           `json:"new"`   // how many those are
	After  bench.Cached  `json:"after"` // their work
	Cold   time.Duration `json:"cold"`  // the whole tree read once; the median of the rounds, as the rest
	Warm   time.Duration `json:"warm"`  // and again
	Cached bench.Cached  `json:"cached"`
}

// benchCache has a machine for each way at the same time, so that rounds can be interleaved.
func benchCache(ctx context.Context, f *cacheFlags) error {
	return withMounts(ctx, f, nil, []mounted{{way: "buffered"}, {way: "directio"}, {way: "buffered, given back", drop: true}}, func(all []*mounted) error {
		var rows []cacheRow
		for _, live := range f.lives {
			r, err := cacheRounds(ctx, f, all, live)
			if err != nil {
				return err
			}
			rows = append(rows, r...)
		}
		return printCache(f, rows)
	})
}

// withMounts makes a machine for each way, all alive together.
func withMounts(ctx context.Context, f *cacheFlags, have []*mounted, ways []mounted, run func([]*mounted) error) error {
	if len(ways) == 0 {
		return run(have)
	}
	return withMount(ctx, f, ways[0], func(m *mounted) error { return withMounts(ctx, f, append(have, m), ways[1:], run) })
}

// withMount makes a machine with the layer already mounted, where it looks for
// what an earlier process has left.
func withMount(ctx context.Context, f *cacheFlags, way mounted, run func(*mounted) error) error {
	m := &way
	flags := *f.benchFlags
	flags.mount = func(ctx context.Context, b *bed) (err error) {
		l := b.layers.Layers[0]
		m.data = l.Data
		if m.mount, err = bench.MountLayer(l, m.way == "directio"); err != nil {
			return dsec.E(dsec.Unsupported, "mount layer", m.way, err)
		}
		return b.hold.Put(ctx, "layer/"+string(l.Digest), m.mount)
	}
	return withBed(ctx, &flags, func(ctx context.Context, _ *benchFlags, b *bed) error {
		defer m.mount.Close()
		if name := b.mounts.Plan().Name(); !strings.HasPrefix(name, "detached") {
			return dsec.Errorf(dsec.Unsupported, "measure mounts", m.way, "this kernel needs mounts to be %s; Linux 6.15 is the first that does not", name)
		}
		m.bed = b
		return run(m)
	})
}

// cacheRounds measures each way with so many live, rounds interleaved.
func cacheRounds(ctx context.Context, f *cacheFlags, ways []*mounted, live int) ([]cacheRow, error) {
	all := map[string][]cacheRow{}
	for _, m := range ways {
		r, err := m.grow(ctx, f, live)
		if err != nil {
			return nil, err
		}
		all[m.way] = []cacheRow{r}
	}
	for round := range f.rounds {
		for i := range ways {
			m := ways[(i+round)%len(ways)]
			r := all[m.way][0]
			if err := m.readAll(ctx, &r); err != nil {
				return nil, err
			}
			all[m.way] = append(all[m.way], r)
			progress(fmt.Sprintf("%-20s %4d live, round %d: cold %s, warm %s, %d MiB cached", m.way, live, round, r.Cold.Round(time.Millisecond),
				r.Warm.Round(time.Millisecond), r.Cached.Sum()>>20))
		}
	}
	var out []cacheRow
	for _, m := range ways {
		rounds := all[m.way][1:]
		mid := func(of func(cacheRow) time.Duration) cacheRow {
			slices.SortFunc(rounds, func(a, b cacheRow) int { return cmp.Compare(of(a), of(b)) })
			return rounds[len(rounds)/2]
		}
		warm := mid(func(r cacheRow) time.Duration { return r.Warm }).Warm
		r := mid(func(r cacheRow) time.Duration { return r.Cold })
		r.Warm = warm
		out = append(out, r)
	}
	return out, nil
}

// grow makes sandboxes until so many live, and has each new one do its work.
func (m *mounted) grow(ctx context.Context, f *cacheFlags, live int) (cacheRow, error) {
	r := cacheRow{Way: m.way, Live: live, Bytes: m.layers.Layers[0].DataSize, New: live - len(m.ids)}
	if err := bench.DropCached(m.mount, m.data); err != nil {
		return r, err
	}
	rt := m.ours
	rt.Argv = images.Run{Command: f.command}.Argv()
	begin := time.Now()
	ids, err := rt.Fill(ctx, r.New, 4)
	m.ids, m.idle = append(m.ids, ids...), append(m.idle, ids...)
	if err == nil {
		err = rt.Each(ctx, ids, 4, func(ctx context.Context, id dsec.SandboxID) error { return rt.Must(ctx, id, nil) })
	}
	if err != nil {
		return r, err
	}
	r.Work = time.Since(begin)
	r.After, err = bench.CachedOf(m.mount, m.data)
	return r, err
}

// readAll reads the whole tree in a sandbox, twice, after all of it was dropped.
func (m *mounted) readAll(ctx context.Context, r *cacheRow) error {
	if err := bench.DropCached(m.mount, m.data); err != nil {
		return err
	}
	rt := m.ours
	rt.Argv = images.Run{Command: "find / -xdev -type f -print0 | xargs -0 cat >/dev/null"}.Argv()
	for _, took := range []*time.Duration{&r.Cold, &r.Warm} {
		stop := m.givingBack()
		begin := time.Now()
		err := rt.Must(ctx, m.ids[0], nil)
		*took = time.Since(begin)
		if err := errors.Join(err, stop()); err != nil {
			return err
		}
	}
	var err error
	r.Cached, err = bench.CachedOf(m.mount, m.data)
	return err
}

// givingBack drops what is cached of the data file again and again until it is
// stopped, and then once more.
func (m *mounted) givingBack() (stop func() error) {
	if !m.drop {
		return func() error { return nil }
	}
	end, done := make(chan struct{}), make(chan error, 1)
	go func() {
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				if err := bench.DropDevice(m.data); err != nil {
					done <- err
					return
				}
			case <-end:
				done <- bench.DropDevice(m.data)
				return
			}
		}
	}()
	return func() error {
		close(end)
		return <-done
	}
}

func printCache(f *cacheFlags, rows []cacheRow) error {
	if f.json {
		return json.NewEncoder(os.Stdout).Encode(rows)
	}
	fmt.Printf("layer %s, %d MiB of contents; %d rounds\n\n", f.image, rows[0].Bytes>>20, f.rounds)
	tw := tabwriter.NewWriter(os.Stdout, 2, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "MOUNT\tLIVE\tWORK OF NEW ONES\tCACHED BY IT MiB (FILES + DEVICE)\tTREE COLD\tMiB/s\tTREE WARM\tMiB/s\tCACHED MiB (FILES + DEVICE)\tx OF THE CONTENTS")
	for _, r := range rows {
		rate := func(d time.Duration) float64 { return float64(r.Bytes) / (1 << 20) / d.Seconds() }
		fmt.Fprintf(tw, "%s\t%d\t%d in %s\t%d + %d\t%s\t%.0f\t%s\t%.0f\t%d + %d\t%.2f\n", r.Way, r.Live, r.New, r.Work.Round(10*time.Millisecond),
			r.After.Files>>20, r.After.Device>>20, r.Cold.Round(time.Millisecond), rate(r.Cold), r.Warm.Round(time.Millisecond), rate(r.Warm),
			r.Cached.Files>>20, r.Cached.Device>>20, float64(r.Cached.Sum())/float64(r.Bytes))
	}
	if err := tw.Flush(); err != nil || f.plots == "" {
		return err
	}
	return plotCache(f.plots, rows)
}

func plotCache(dir string, rows []cacheRow) error {
	var groups []string
	cold, warm, cached := plot.Series{Name: "cold"}, plot.Series{Name: "warm"}, plot.Series{}
	for _, r := range rows {
		groups = append(groups, fmt.Sprintf("%s: %d live", r.Way, r.Live))
		rate := func(d time.Duration) float64 { return float64(r.Bytes) / (1 << 20) / d.Seconds() }
		cold.Y, warm.Y = append(cold.Y, rate(r.Cold)), append(warm.Y, rate(r.Warm))
		cached.Y = append(cached.Y, float64(r.Cached.Sum())/float64(r.Bytes))
	}
	return errors.Join(
		plot.File(filepath.Join(dir, "mount-speed.svg"), plot.Bars{Title: "A whole layer read in a sandbox", Y: "MiB/s", Groups: groups, Series: []plot.Series{cold, warm}}),
		plot.File(filepath.Join(dir, "mount-memory.svg"), plot.Bars{Title: "Page cache after that", Y: "times the contents of the layer", Groups: groups,
			Series: []plot.Series{cached}}))
}
