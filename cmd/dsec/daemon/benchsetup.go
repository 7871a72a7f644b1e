package daemon

import (
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/bench"
	"github.com/opendsec/dsec/bench/images"
	"github.com/opendsec/dsec/bench/plot"
	"github.com/opendsec/dsec/internal/diskpool"
)

// setupFlags of the measurement of set-ups.
type setupFlags struct {
	*benchFlags
	base, workspace, toolkit string
	ready                    string
	n, atOnce                int
	plots                    string
}

func benchSetupVerb(b *benchFlags) *cobra.Command {
	f := setupFlags{benchFlags: b}
	c := &cobra.Command{Use: "setup", Short: "Workspace and toolkit as layers beside archives unpacked at start", Args: cobra.NoArgs,
		Example: "  sudo bench/images/build.sh && sudo dsec bench setup --n 32",
		RunE: func(c *cobra.Command, _ []string) error {
			f.json = wantJSON(c)
			found, err := images.Found(f.images)
			if err != nil {
				return dsec.E(dsec.Invalid, "measure set-up", f.images, err)
			}
			for _, name := range []string{f.base, f.workspace, f.toolkit} {
				i := slices.IndexFunc(found, func(i images.Image) bool { return i.Name == name })
				if i < 0 {
					return dsec.Errorf(dsec.NotFound, "measure set-up", name, "not in %s", f.images)
				}
				f.sources = append(f.sources, source{"tar:" + found[i].Path, name})
			}
			return withBed(c.Context(), b, func(ctx context.Context, _ *benchFlags, bed *bed) error { return benchSetup(ctx, &f, bed) })
		}}
	p := c.Flags()
	p.StringVar(&f.base, "base", "debian-b", "image that the sandboxes start on")
	p.StringVar(&f.workspace, "workspace", "sympy", "image with the workspace")
	p.StringVar(&f.toolkit, "toolkit", "pyweb", "image with the toolkit")
	p.StringVar(&f.ready, "ready", "test -e /repo/setup.py && test -d /usr/local/lib/python3.11/dist-packages/sympy", "command of a shell that succeeds when all is there")
	p.IntVar(&f.n, "n", 32, "sandboxes")
	p.IntVar(&f.atOnce, "at-once", 8, "sandboxes that are set up at one time")
	p.StringVar(&f.plots, "plots", "", "directory for the plot; none if empty")
	return c
}

func benchSetup(ctx context.Context, f *setupFlags, b *bed) error {
	ways, err := b.ways(ctx, f)
	if err != nil {
		return err
	}
	device, err := bench.LoopOf(b.dir)
	if err != nil {
		return dsec.E(dsec.Unsupported, "measure set-up", b.disks.Mechanism(), err)
	}
	disks := bench.Disks{
		Used: func(ctx context.Context, id dsec.SandboxID) (int64, error) {
			u, err := b.disks.Usage(ctx, string(id))
			return u.Used, err
		},
		Written: func(ctx context.Context) (int64, error) {
			return b.written(ctx, device)
		},
	}
	var all []bench.SetUp
	for round := range f.rounds {
		for i := range ways {
			s, err := ways[(i+round)%len(ways)].Fresh(ctx, f.n, f.atOnce, disks)
			if err != nil {
				return err
			}
			s.Round = round
			all = append(all, s)
			progress(fmt.Sprintf("%-9s round %d: %d ready in %s, p50 %s, %d KiB each, %.1f MiB written", s.Way, round, s.N,
				s.Wall.Round(time.Millisecond), s.P50.Round(time.Millisecond), s.Each>>10, float64(s.Written)/(1<<20)))
		}
	}
	if f.json {
		return json.NewEncoder(os.Stdout).Encode(all)
	}
	var once making
	for _, s := range f.sources[1:] {
		once.bytes += b.made[s.tag].bytes
		once.took += b.made[s.tag].took
	}
	return printSetup(f, all, ways, once)
}

// ways are the two that are compared.
func (b *bed) ways(ctx context.Context, f *setupFlags) ([]bench.Way, error) {
	argv := []string{"/bin/sh", "-c", f.ready}
	spec := b.ours.Spec
	spec.Limits.Disk = 8 << 30
	layers := bench.Way{Name: "layers", Runtime: b.ours}
	archives := bench.Way{Name: "archives", Runtime: b.ours, Unpack: []string{"/bin/tar", "-xzf", "-", "-C", "/", "--no-same-owner"}}
	layers.Runtime.Argv, archives.Runtime.Argv = argv, argv
	layers.Runtime.Spec, archives.Runtime.Spec = spec, spec
	var err error
	if layers.Runtime.Layers, err = b.store.Acquire(ctx, "bench.layers", []dsec.LayerRef{dsec.LayerRef(f.base), dsec.LayerRef(f.workspace), dsec.LayerRef(f.toolkit)}); err != nil {
		return nil, err
	}
	for _, s := range f.sources[1:] {
		out := filepath.Join(b.dir, s.tag+".tar.gz")
		if err := zip(s.from[len("tar:"):], out); err != nil {
			return nil, err
		}
		archives.Archive = append(archives.Archive, out)
	}
	return []bench.Way{layers, archives}, nil
}

func zip(from, to string) (err error) {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.Create(to)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	z := gzip.NewWriter(out)
	_, err = io.Copy(z, in)
	return errors.Join(err, z.Close())
}

// written is how many bytes the pool has written to its device when all are there.
func (b *bed) written(ctx context.Context, device string) (int64, error) {
	const probe = "bench.sync"
	dir, err := b.disks.Create(ctx, probe, 1<<20, diskpool.Owner{})
	if err != nil {
		return 0, err
	}
	err = os.NewSyscallError("syncfs", unix.Syncfs(int(dir.Fd())))
	if err = errors.Join(err, dir.Close(), b.disks.Remove(ctx, probe)); err != nil {
		return 0, err
	}
	return bench.SectorsWritten(device)
}

// printSetup writes the medians of the rounds and their ratios.
func printSetup(f *setupFlags, all []bench.SetUp, ways []bench.Way, once making) error {
	var mid []bench.SetUp
	for _, w := range ways {
		of := slices.DeleteFunc(slices.Clone(all), func(s bench.SetUp) bool { return s.Way != w.Name })
		slices.SortFunc(of, func(a, b bench.SetUp) int { return int(a.Wall - b.Wall) })
		mid = append(mid, of[len(of)/2])
	}
	fmt.Printf("%d sandboxes, %d at once, %d rounds, the median round of each\n\n", f.n, f.atOnce, f.rounds)
	for _, s := range mid {
		fmt.Printf("%-9s ready in %s; one: p50 %s, p99 %s; %d KiB count on the disk of each; %.1f MiB written to the device of the disks\n", s.Way,
			s.Wall.Round(time.Millisecond), s.P50.Round(time.Millisecond), s.P99.Round(time.Millisecond), s.Each>>10, float64(s.Written)/(1<<20))
	}
	l, a := mid[0], mid[1]
	fmt.Printf("making the layers, once for the machine: %s, %.1f MiB\n", once.took.Round(time.Millisecond), float64(once.bytes)/(1<<20))
	fmt.Printf("layers: %.1fx faster, %.1fx fewer bytes written; with making them: %.1fx and %.1fx\n", a.Wall.Seconds()/l.Wall.Seconds(),
		float64(a.Written)/float64(max(l.Written, 1)), a.Wall.Seconds()/(l.Wall+once.took).Seconds(), float64(a.Written)/float64(l.Written+once.bytes))
	if f.plots == "" {
		return nil
	}
	groups := []string{"layers", "layers, and making them", "archives unpacked at start"}
	mib := func(n int64) float64 { return float64(n) / (1 << 20) }
	return errors.Join(
		plot.File(filepath.Join(f.plots, "setup-time.svg"), plot.Bars{Title: fmt.Sprintf("Until %d sandboxes have workspace and toolkit", f.n), Y: "seconds",
			Groups: groups, Series: []plot.Series{{Y: []float64{l.Wall.Seconds(), (l.Wall + once.took).Seconds(), a.Wall.Seconds()}}}}),
		plot.File(filepath.Join(f.plots, "setup-bytes.svg"), plot.Bars{Title: "Bytes written for them", Y: "MiB",
			Groups: groups, Series: []plot.Series{{Y: []float64{mib(l.Written), mib(l.Written + once.bytes), mib(a.Written)}}}}))
}
