package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/bench/chunking"
	"github.com/opendsec/dsec/bench/images"
	"github.com/opendsec/dsec/bench/reads"
	"github.com/opendsec/dsec/layer"
)

// chunkFlags of the measurement of chunks.
type chunkFlags struct {
	*benchFlags
	only    []string
	share   float64
	latency time.Duration
	level   int
	saved   string
	plots   string
	reorder bool
}

func benchChunksVerb(b *benchFlags) *cobra.Command {
	f := chunkFlags{benchFlags: b}
	c := &cobra.Command{Use: "chunks", Short: "What ways to cut layers into chunks cost, on real images and real reads", Args: cobra.NoArgs,
		Example: "  sudo bench/images/build.sh && sudo dsec bench chunks\n  sudo dsec bench chunks --only 'blocks 128' --level 1",
		RunE: func(c *cobra.Command, _ []string) error {
			f.json = wantJSON(c)
			found, err := images.Found(f.images)
			if err != nil {
				return dsec.E(dsec.Invalid, "measure chunks", f.images, err)
			}
			for _, i := range found {
				f.sources = append(f.sources, source{"tar:" + i.Path, i.Name})
			}
			return withBed(c.Context(), b, func(ctx context.Context, _ *benchFlags, bed *bed) error { return benchChunks(ctx, &f, bed, found) })
		}}
	p := c.Flags()
	p.StringSliceVar(&f.only, "only", nil, "only these schemes; names may end in *")
	p.Float64Var(&f.share, "share", 0.05, "share of the files that is read in no order")
	p.DurationVar(&f.latency, "latency", 20*time.Millisecond, "of each request to the store")
	p.IntVar(&f.level, "level", 3, "zstd level")
	p.StringVar(&f.saved, "reads", "", "file for the recorded reads: taken from there if it exists, else written there")
	p.BoolVar(&f.reorder, "reorder", false, "also push each layer with its data in the order in which programs read it")
	p.StringVar(&f.plots, "plots", "", "directory for the plots; none if empty")
	return c
}

func benchChunks(ctx context.Context, f *chunkFlags, b *bed, found []images.Image) error {
	schemes := slices.DeleteFunc(chunking.Candidates(), func(s chunking.Scheme) bool {
		return len(f.only) > 0 && !slices.ContainsFunc(f.only, func(o string) bool {
			head, open := strings.CutSuffix(o, "*")
			return s.Name == o || open && strings.HasPrefix(s.Name, head)
		})
	})
	if len(schemes) == 0 {
		return dsec.Errorf(dsec.Invalid, "measure chunks", "--only", "names no scheme")
	}
	runs, err := b.runReads(ctx, f.saved, found)
	if err != nil {
		return err
	}
	s := chunking.Study{Dir: b.dir, Level: zstd.EncoderLevelFromZstd(f.level), Progress: progress,
		Line: chunking.Line{Latency: f.latency, Bandwidth: 125e6, Gap: 64 << 10, Most: 4 << 20}}
	random := chunking.Group{Name: fmt.Sprintf("%.0f %% of the files of an image", 100*f.share)}
	for _, i := range found {
		local, err := b.layer(ctx, i.Name)
		if err != nil {
			return err
		}
		d, err := chunking.Open(i.Name, local.Meta, local.Data, local.DataSize)
		if err != nil {
			return err
		}
		defer d.Close()
		s.Layers = append(s.Layers, d)
		if i.Kind == "root" {
			a, err := chunking.RandomFiles(d, f.share)
			if err != nil {
				return err
			}
			random.Accesses = append(random.Accesses, a)
		}
	}
	s.Groups = []chunking.Group{random, {Name: "what programs read", Accesses: runs, Waits: 2}}
	if f.reorder {
		s.Groups = append(s.Groups, reordered(&s, runs))
	}
	for _, g := range s.Groups {
		for _, a := range g.Accesses {
			progress(fmt.Sprintf("%s: %d reads, %.1f MiB", a.Name, len(a.Reads), float64(a.Wanted())/(1<<20)))
		}
	}
	rows, err := s.Run(ctx, schemes)
	if err != nil {
		return err
	}
	if f.json {
		return json.NewEncoder(os.Stdout).Encode(rows)
	}
	chunking.Print(os.Stdout, rows)
	if f.plots == "" {
		return nil
	}
	return chunking.Plot(f.plots, rows)
}

// reordered adds to the layers those that programs read, laid out anew.
func reordered(s *chunking.Study, runs []chunking.Access) chunking.Group {
	for _, d := range slices.Clone(s.Layers) {
		if slices.ContainsFunc(runs, func(a chunking.Access) bool {
			return slices.ContainsFunc(a.Reads, func(r chunking.Read) bool { return r.Layer == d.Name })
		}) {
			var anew *chunking.Data
			anew, runs = chunking.Reorder(d, d.Name+" anew", runs)
			s.Layers = append(s.Layers, anew)
		}
	}
	return chunking.Group{Name: "the same, data in the order of the reads", Accesses: runs, Waits: 2}
}

func progress(line string) { fmt.Fprintln(os.Stderr, line) }

// layer finds one of the imported layers.
func (b *bed) layer(ctx context.Context, tag string) (layer.Local, error) {
	set, err := b.store.Acquire(ctx, "bench."+tag, []dsec.LayerRef{dsec.LayerRef(tag)})
	if err != nil {
		return layer.Local{}, err
	}
	return set.Layers[0], nil
}

// runReads records what the commands of the table read, or takes it from a file.
func (b *bed) runReads(ctx context.Context, saved string, found []images.Image) (out []chunking.Access, err error) {
	if saved != "" {
		text, err := os.ReadFile(saved)
		if err == nil {
			return out, json.Unmarshal(text, &out)
		}
		if !errors.Is(err, os.ErrNotExist) {
			return nil, err
		}
	}
	runs, err := images.Runs(found)
	if err != nil {
		return nil, err
	}
	for _, r := range runs {
		a, err := b.record(ctx, r)
		if err != nil {
			return nil, fmt.Errorf("record %s: %w", r.Name, err)
		}
		out = append(out, a)
	}
	if saved == "" {
		return out, nil
	}
	text, err := json.Marshal(out)
	if err != nil {
		return nil, err
	}
	return out, os.WriteFile(saved, text, 0o644)
}

// record runs a command in a sandbox of layers that nobody has read yet.
func (b *bed) record(ctx context.Context, run images.Run) (a chunking.Access, err error) {
	a.Name = run.Name
	if err := b.mounts.Evict(ctx, 0); err != nil {
		return a, err
	}
	refs := make([]dsec.LayerRef, len(run.Layers))
	for i, l := range run.Layers {
		refs[i] = dsec.LayerRef(l)
	}
	r := b.ours
	if r.Layers, err = b.store.Acquire(ctx, "bench.run."+dsec.Random(8), refs); err != nil {
		return a, err
	}
	r.Argv = run.Argv()
	r.Spec.Limits.Memory, r.Spec.Limits.Disk, r.Spec.Limits.CPU = 4<<30, 4<<30, 2
	names := map[string]string{}
	var paths []string
	for i, l := range r.Layers.Layers {
		if l.Data != "" {
			names[l.Data] = run.Layers[i]
			paths = append(paths, l.Data)
		}
	}
	watch, err := reads.Watch(paths...)
	if err != nil {
		return a, err
	}
	defer func() { err = errors.Join(err, watch.Close()) }()
	id := dsec.NewSandboxID(r.Node)
	if err := r.Create(ctx, id); err != nil {
		return a, err
	}
	defer func() { err = errors.Join(err, r.RT.Destroy(context.WithoutCancel(ctx), id)) }()
	if err := r.Must(ctx, id, nil); err != nil {
		return a, err
	}
	got, err := watch.Take()
	for _, g := range got {
		a.Reads = append(a.Reads, chunking.Read{Layer: names[g.File], Extent: chunking.Extent{Off: g.Off, Len: g.Len}})
	}
	return a, err
}
