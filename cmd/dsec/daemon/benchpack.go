package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	goruntime "runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/bench"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/layer/store"
	"github.com/opendsec/dsec/rootfs"
)

// The disks that benchPack saves.
const (
	manyFiles  = 50_000
	manyBytes  = 1 << 30
	lowerFiles = 20_000
	lowerBytes = 4 << 30
	fewFiles   = 100
	fewBytes   = 10 << 20
)

// benchPack measures how long saving a disk takes and stops its sandbox.
func benchPack(ctx context.Context, f *benchFlags, b *bed) error {
	many, err := b.saved(ctx, f, fmt.Sprintf("1 GiB in %d files", manyFiles), nil, func(id dsec.SandboxID) error {
		return bench.FillFiles(ctx, b.tier, id, "/srv/many", manyFiles, manyBytes)
	})
	if err != nil {
		return err
	}
	large, err := b.treeLayer(ctx, lowerFiles, lowerBytes)
	if err != nil {
		return err
	}
	few, err := b.saved(ctx, f, "10 MiB in a sandbox of 4 GiB", &large, func(id dsec.SandboxID) error {
		return bench.FillFiles(ctx, b.tier, id, "/srv/few", fewFiles, fewBytes)
	})
	if err != nil {
		return err
	}
	all := append(many, few...)
	if f.json {
		return json.NewEncoder(os.Stdout).Encode(all)
	}
	fmt.Printf("saving the disk of a running sandbox; medians of %d rounds, in turn; %d CPUs; disks: %s\n\n", f.rounds, goruntime.NumCPU(), b.disks.Mechanism())
	bench.SavedTable(os.Stdout, all)
	return b.chains(ctx, f)
}

// saved makes a sandbox, fills it and saves it in every way.
func (b *bed) saved(ctx context.Context, f *benchFlags, what string, on *layer.Local, fill func(dsec.SandboxID) error) (all []bench.Saved, err error) {
	r := b.ours
	r.Spec.Limits.Disk = 4 << 30
	if on != nil {
		r.Layers.Layers = append(r.Layers.Layers[:len(r.Layers.Layers):len(r.Layers.Layers)], *on)
	}
	id := dsec.NewSandboxID(r.Node)
	if err := r.Create(ctx, id); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.RT.Destroy(context.WithoutCancel(ctx), id)) }()
	if err := fill(id); err != nil {
		return nil, err
	}
	dir, err := b.disks.Open(ctx, string(id))
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	upper, err := linux.OpenBeneath(dir, rootfs.Upper, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return nil, err
	}
	defer upper.Close()
	savers := []bench.Saver{
		{How: "pack_diff, into the store", Save: b.packToStore},
		{How: "pack_diff, the two files", Save: b.packToFiles},
		{How: "tar of what changed", Save: func(ctx context.Context, id dsec.SandboxID) (time.Duration, int64, error) {
			return bench.GNUTar(ctx, b.tier, id, upper, b.dir)
		}},
	}
	if on != nil {
		whole, done, err := b.wholeTree(ctx, r.Layers, dir)
		if err != nil {
			return nil, err
		}
		defer done()
		savers = append(savers, bench.Saver{How: "tar of the whole tree", Save: func(ctx context.Context, id dsec.SandboxID) (time.Duration, int64, error) {
			return bench.GNUTar(ctx, b.tier, id, whole, b.dir)
		}})
	}
	return bench.Save(ctx, what, id, savers, f.rounds)
}

func (b *bed) wholeTree(ctx context.Context, set layer.Set, dir *os.File) (*os.File, func(), error) {
	const user = "bench.view"
	if err := b.mounts.Use(ctx, user, set.Layers); err != nil {
		return nil, nil, err
	}
	var digests []layer.Digest
	for _, l := range set.Layers {
		digests = append(digests, l.Digest)
	}
	v, err := b.mounts.View(rootfs.Root{User: user, Layers: digests, Dir: dir})
	if err != nil {
		b.mounts.Unuse(user)
		return nil, nil, err
	}
	return v, func() { v.Close(); b.mounts.Unuse(user) }, nil
}

func (b *bed) packToStore(ctx context.Context, id dsec.SandboxID) (pause time.Duration, n int64, err error) {
	info, err := b.store.Add(ctx, layer.New{Source: "bench"}, func(f image.Files) (dsec.Lineage, error) {
		p, err := b.tier.Pack(ctx, id, f, dsec.Scrub{})
		pause = p.Pause
		return dsec.Lineage{Sandbox: id, Time: time.Now()}, err
	})
	if err == nil {
		err = b.store.Remove(ctx, dsec.LayerRef(info.Digest)) // so that the next one is written again
	}
	return pause, info.MetaSize + info.DataSize, err
}

func (b *bed) packToFiles(ctx context.Context, id dsec.SandboxID) (pause time.Duration, n int64, err error) {
	var f image.Files
	for name, to := range map[string]**os.File{"meta": &f.Meta, "data": &f.Data} {
		file, err := os.Create(filepath.Join(b.dir, "pack-"+name))
		if err != nil {
			return 0, 0, err
		}
		defer func() { _ = file.Close(); _ = os.Remove(file.Name()) }()
		*to = file
	}
	p, err := b.tier.Pack(ctx, id, f, dsec.Scrub{})
	if err == nil {
		err = errors.Join(f.Meta.Sync(), f.Data.Sync())
	}
	return p.Pause, p.MetaSize + p.DataSize, err
}

// treeLayer makes a layer of so many files.
func (b *bed) treeLayer(ctx context.Context, count int, bytes int64) (layer.Local, error) {
	r, w := io.Pipe()
	go func() { w.CloseWithError(bench.TreeTar(w, count, bytes)) }()
	defer r.Close()
	info, err := b.store.ImportTar(ctx, store.Tar{R: r, Name: "bench"}, "large", image.Options{At: "/large", KeepWhiteouts: true})
	if err != nil {
		return layer.Local{}, err
	}
	set, err := b.store.Acquire(ctx, "bench.large", []dsec.LayerRef{dsec.LayerRef(info.Digest)})
	if err != nil {
		return layer.Local{}, err
	}
	return set.Layers[0], nil
}

// chains measures what each packed layer more costs a sandbox that is made of
// them.
func (b *bed) chains(ctx context.Context, f *benchFlags) error {
	var chain []layer.Local
	var contenders []bench.Contender
	for depth := 0; depth <= 20; depth++ {
		if depth > 0 {
			info, err := b.store.ImportTar(ctx, store.Tar{R: smallTar(depth), Name: "bench"}, "", image.Options{KeepWhiteouts: true})
			if err != nil {
				return err
			}
			set, err := b.store.Acquire(ctx, fmt.Sprint("bench.chain", depth), []dsec.LayerRef{dsec.LayerRef(info.Digest)})
			if err != nil {
				return err
			}
			chain = append(chain, set.Layers...)
		}
		switch depth {
		case 1, 2, 4, 8, 20:
			r := b.ours
			r.Name, r.Steps = fmt.Sprintf("%d packed", depth), nil
			r.Layers.Layers = append(r.Layers.Layers[:1:1], chain...)
			contenders = append(contenders, r.Contender())
		}
	}
	one := *f
	one.concurrency = []int{1}
	fmt.Println()
	return printBench(ctx, &one, contenders, "create, first command, destroy, by the number of packed layers over the image")
}

func smallTar(n int) io.Reader {
	r, w := io.Pipe()
	go func() { w.CloseWithError(bench.TreeTar(w, 10+n, int64(10+n)<<10)) }()
	return r
}
