package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/bench"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/internal/diskpool"
	"github.com/opendsec/dsec/internal/lifecycle"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/layer/store"
	"github.com/opendsec/dsec/rootfs"
)

// benchFlags say what is measured and on what.
type benchFlags struct {
	image       string
	images      string // directory of the images of bench/images
	sources     []source
	mount       func(context.Context, *bed) error // if set, mounts layers in its own way, before anything else does
	dir         string
	concurrency []int
	rounds      int
	cycles      int
	live        int
	network     string
	peers       []string
	argv        []string
	eyes        *eyes // if set, what sandboxes do is seen by them
	json        bool
}

// Bench is the verb that measures this machine.
func Bench() *cobra.Command {
	var f benchFlags
	c := &cobra.Command{
		Use:   "bench",
		Short: "Measure sandboxes on this machine beside other runtimes",
		Long: `Measures on a machine of its own (data under --dir, removed at the end), with every
wall and limit on. Rounds of the contenders are interleaved; read the ratios.`,
		Example: "  sudo dsec bench create --image rootfs.tar\n  sudo dsec bench idle --image rootfs.tar --live 1000",
	}
	p := c.PersistentFlags()
	p.StringVar(&f.image, "image", "", "root file system: tar, directory, OCI layout or reference (of what measures sandboxes)")
	p.StringVar(&f.images, "images", ".cache/images", "where bench/images/build.sh put the images (of what measures layers)")
	p.StringVar(&f.dir, "dir", "/var/tmp", "where the data of the measurement goes")
	p.IntSliceVar(&f.concurrency, "concurrency", []int{1, 8, 32}, "workers at once")
	p.IntVar(&f.rounds, "rounds", 3, "rounds of each contender")
	p.IntVar(&f.cycles, "cycles", 200, "cycles in a round")
	p.IntVar(&f.live, "live", 0, "idle sandboxes that live meanwhile")
	p.StringVar(&f.network, "network", string(dsec.NetworkNone), "network mode: none, open")
	p.StringSliceVar(&f.peers, "peers", []string{"runc", "crun"}, "runtimes to measure beside")
	p.StringSliceVar(&f.argv, "command", []string{"/bin/true"}, "first command")
	for _, v := range []struct {
		use, short, example string
		run                 func(context.Context, *benchFlags, *bed) error
	}{
		{"create", "Create, first command, destroy, in a loop", "sudo dsec bench create --image rootfs.tar --concurrency 8", benchCreate},
		{"idle", "Memory of idle sandboxes", "sudo dsec bench idle --image rootfs.tar --live 3000", benchIdle},
		{"bytes", "Streamed output, files up and down, beside a pipe and a file", "sudo dsec bench bytes --image rootfs.tar", benchBytes},
		{"parts", "What a creation and its end ask of the kernel, each part alone", "sudo dsec bench parts --image rootfs.tar --concurrency 8", benchParts},
		{"pack", "Save the disk of a running sandbox, beside tar; chains of packed disks", "sudo dsec bench pack --image rootfs.tar", benchPack},
		{"exec", "Round trip of a command beside a plain setns", "sudo dsec bench exec --image rootfs.tar", benchExec},
	} {
		c.AddCommand(&cobra.Command{Use: v.use, Short: v.short, Example: "  " + v.example, Args: cobra.NoArgs,
			RunE: func(c *cobra.Command, _ []string) error {
				f.json = wantJSON(c)
				if f.image == "" {
					return dsec.Errorf(dsec.Invalid, "measure", "--image", "is required")
				}
				f.sources = []source{{f.image, "bench"}}
				return withBed(c.Context(), &f, v.run)
			}})
	}
	c.AddCommand(benchChunksVerb(&f), benchSetupVerb(&f), benchCacheVerb(&f), benchAuditVerb(&f), benchFunctionVerb(&f))
	return c
}

// source is what a layer of a measurement is made of, and its tag.
type source struct{ from, tag string }

// bed is a machine made for a measurement.
type bed struct {
	machine
	dir    string
	store  *store.Store
	layers layer.Set // of the first source
	made   map[string]making
	ours   bench.Runtime
	idle   []dsec.SandboxID
}

func withBed(ctx context.Context, f *benchFlags, run func(context.Context, *benchFlags, *bed) error) (err error) {
	if err := needRoot("measure"); err != nil {
		return err
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	slog.SetDefault(log)
	takeCredentials() // the hold must not inherit them
	s, remove, err := temporary("bm", f.dir)
	if err != nil {
		return err
	}
	defer func() { err = joinAfter(ctx, err, s, remove) }()
	b := &bed{dir: filepath.Dir(s.Data), made: map[string]making{}, machine: machine{eyes: f.eyes}}
	steps := append([]lifecycle.Step{
		{Name: "layers", Do: func(ctx context.Context) (err error) {
			if b.store, err = store.Open(s.layerDir(), store.Options{Log: log}); err != nil {
				return err
			}
			return b.importAll(ctx, f.sources)
		}, Undo: func(context.Context) error { return b.store.Close() }},
	}, b.steps(s, log)...)
	if f.mount != nil {
		i := slices.IndexFunc(steps, func(s lifecycle.Step) bool { return s.Name == "mounts" })
		steps = slices.Insert(steps, i, lifecycle.Step{Name: "own mounts", Do: func(ctx context.Context) error { return f.mount(ctx, b) }})
	}
	stack, err := lifecycle.Open(ctx, "bench", steps...)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.end(context.WithoutCancel(ctx), s, stack)) }()
	b.ours = bench.Runtime{Name: "dsec", RT: b.tier, Layers: b.layers, Spec: benchSpec(f), Argv: f.argv, Node: "bench", Steps: &bench.Steps{}}
	return run(ctx, f, b)
}

// making is what it took to make a layer: bytes of its files, and time.
type making struct {
	bytes int64
	took  time.Duration
}

// importAll makes the layers and takes the first.
func (b *bed) importAll(ctx context.Context, sources []source) (err error) {
	for _, src := range sources {
		if len(sources) > 1 {
			fmt.Fprintln(os.Stderr, "making layer", src.tag)
		}
		begin := time.Now()
		l, err := b.store.Import(ctx, src.from, src.tag, image.Options{})
		if err != nil {
			return err
		}
		b.made[src.tag] = making{l.MetaSize + l.DataSize, time.Since(begin)}
	}
	b.layers, err = b.store.Acquire(ctx, "bench", []dsec.LayerRef{dsec.LayerRef(sources[0].tag)})
	return err
}

func benchSpec(f *benchFlags) dsec.Spec {
	return dsec.Spec{Tier: dsec.TierContainer, Image: "bench", Network: dsec.NetworkMode(f.network), Profile: "build", OOM: dsec.OOMExec,
		Limits: dsec.Limits{CPU: 1, CPUWeight: 100, Memory: 1 << 30, Pids: 512, Disk: 1 << 30, Output: 64 << 20}}
}

// fill makes the idle sandboxes.
func (b *bed) fill(ctx context.Context, f *benchFlags) error {
	ids, err := b.ours.Fill(ctx, f.live, 2*runtime.NumCPU())
	b.idle = ids
	return err
}

// end takes the machine apart.
func (b *bed) end(ctx context.Context, s *settings, stack *lifecycle.Stack) error {
	err := b.ours.Drain(ctx, b.idle)
	return errors.Join(err, b.teardown(ctx, s, stack))
}

func benchCreate(ctx context.Context, f *benchFlags, b *bed) error {
	if err := b.fill(ctx, f); err != nil {
		return err
	}
	contenders := []bench.Contender{b.ours.Contender()}
	if len(f.peers) > 0 {
		root, unmount, err := b.peerRoot()
		if err != nil {
			return err
		}
		defer unmount()
		for _, p := range f.peers {
			c, err := bench.OCI(p, root, b.dir, f.argv)
			if err != nil {
				return err
			}
			contenders = append(contenders, c)
		}
	}
	if err := printBench(ctx, f, contenders, "one live sandbox after the other: create, first command, destroy"); err != nil || f.json {
		return err
	}
	fmt.Println()
	b.ours.Steps.Print(os.Stdout)
	return nil
}

func printBench(ctx context.Context, f *benchFlags, contenders []bench.Contender, title string) error {
	_, err := measure(ctx, f, contenders, title)
	return err
}

func measure(ctx context.Context, f *benchFlags, contenders []bench.Contender, title string) ([]bench.Sample, error) {
	samples, err := bench.Run(ctx, contenders, bench.Options{Concurrency: f.concurrency, Rounds: f.rounds, Cycles: f.cycles,
		Progress: func(line string) { fmt.Fprintln(os.Stderr, line) }})
	if err != nil {
		return nil, err
	}
	if f.json {
		return samples, json.NewEncoder(os.Stdout).Encode(samples)
	}
	fmt.Printf("%s\nnetwork %s, %d idle sandboxes live, %d cycles × %d rounds, %d CPUs\n\n", title, f.network, f.live, f.cycles, f.rounds, runtime.NumCPU())
	bench.Table(os.Stdout, samples, contenders)
	return samples, nil
}

// benchParts measures what no implementation can do without, as long as it
// gives a sandbox all that ours has.
func benchParts(ctx context.Context, f *benchFlags, b *bed) error {
	const user = "bench.parts"
	if err := b.mounts.Use(ctx, user, b.layers.Layers); err != nil {
		return err
	}
	defer b.mounts.Unuse(user)
	limits := benchSpec(f).Limits
	parts := []bench.Contender{
		bench.Part("groups", func(ctx context.Context, _, n int) error {
			name := fmt.Sprint("part", n)
			_, err := b.groups.Create(name, cgroup.Limits{CPU: limits.CPU, Visible: 1, Memory: limits.Memory, Pids: limits.Pids, Devices: cgroup.DefaultDevices()})
			return errors.Join(err, b.groups.Remove(ctx, name))
		}),
		bench.Part("disk+overlay", b.stackOnce(user, limits.Disk)),
		bench.Part("namespaces", bench.Process([]string{"/bin/true"}, true)),
		bench.Part("process", bench.Process([]string{"/bin/true"}, false)),
	}
	names := make([]string, len(parts))
	for i, p := range parts {
		names[i] = p.Name
	}
	samples, err := measure(ctx, f, append([]bench.Contender{b.ours.Contender()}, parts...), "a whole cycle beside its parts alone")
	if err == nil && !f.json {
		fmt.Printf("\n%s\n", bench.Sum(samples, b.ours.Name, names))
	}
	return err
}

// stackOnce makes a disk with a limit, an overlay on it, and removes both.
func (b *bed) stackOnce(user string, limit int64) func(context.Context, int, int) error {
	return func(ctx context.Context, _, n int) error {
		name := fmt.Sprint("part", n)
		dir, err := b.disks.Create(ctx, name, limit, diskpool.Owner{})
		if err != nil {
			return err
		}
		err = rootfs.PrepareDir(dir, 0, 0)
		if err == nil {
			var root *os.File
			if root, err = b.mounts.Stack(rootfs.Root{User: user, Layers: []layer.Digest{b.layers.Layers[0].Digest}, Dir: dir}); err == nil {
				err = root.Close()
			}
		}
		return errors.Join(err, dir.Close(), b.disks.Remove(ctx, name))
	}
}

// peerRoot is the same root file system for the peers: the layer under an
// overlay, mounted once and shared by all of their containers.
func (b *bed) peerRoot() (root string, unmount func(), err error) {
	lower, root := filepath.Join(b.dir, "lower"), filepath.Join(b.dir, "root")
	up := filepath.Join(b.dir, "up")
	for _, d := range []string{lower, root, up, up + "/u", up + "/w"} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return "", nil, err
		}
	}
	l := b.layers.Layers[0]
	if err := unix.Mount(l.Meta, lower, "erofs", unix.MS_RDONLY, "device="+l.Data); err != nil {
		return "", nil, dsec.E(dsec.Internal, "mount layer", l.Meta, err)
	}
	opts := "volatile,lowerdir=" + lower + ",upperdir=" + up + "/u,workdir=" + up + "/w"
	if err := unix.Mount("overlay", root, "overlay", 0, opts); err != nil {
		_ = unix.Unmount(lower, unix.MNT_DETACH)
		return "", nil, dsec.E(dsec.Internal, "mount overlay", root, err)
	}
	return root, func() {
		_ = unix.Unmount(root, unix.MNT_DETACH)
		_ = unix.Unmount(lower, unix.MNT_DETACH)
	}, nil
}

func benchIdle(ctx context.Context, f *benchFlags, b *bed) error {
	if f.live == 0 {
		return dsec.Errorf(dsec.Invalid, "measure idle sandboxes", "--live", "is 0")
	}
	m, err := b.ours.Idle(ctx, f.live, 2*runtime.NumCPU())
	if err != nil {
		return err
	}
	if f.json {
		return json.NewEncoder(os.Stdout).Encode(m)
	}
	fmt.Println(m)
	return nil
}

func benchExec(ctx context.Context, f *benchFlags, b *bed) error {
	id := dsec.NewSandboxID(b.ours.Node)
	if err := b.ours.Create(ctx, id); err != nil {
		return err
	}
	b.idle = append(b.idle, id)
	known, err := b.hold.List(ctx)
	if err != nil {
		return err
	}
	for _, k := range known {
		if strings.Contains(k.ID, string(id)) {
			return printBench(ctx, f, []bench.Contender{b.ours.ExecContender(id), bench.PlainExec(k.PID, f.argv)},
				"one command in a live sandbox, beside a plain fork, setns and exec of the same program")
		}
	}
	return dsec.Errorf(dsec.Internal, "measure exec", string(id), "the hold does not know it")
}

// Bytes of the measurement of throughput.
const (
	streamed = 1 << 30
	inFile   = 256 << 20
)

func benchBytes(ctx context.Context, f *benchFlags, b *bed) error {
	id := dsec.NewSandboxID(b.ours.Node)
	if err := b.ours.Create(ctx, id); err != nil {
		return err
	}
	b.idle = append(b.idle, id)
	stream, err := b.ours.Stream(ctx, id, streamed)
	if err != nil {
		return err
	}
	up, down, err := b.ours.Files(ctx, id, inFile, b.dir)
	if err != nil {
		return err
	}
	all := []bench.Throughput{stream, up, down}
	if f.json {
		return json.NewEncoder(os.Stdout).Encode(all)
	}
	for _, t := range all {
		fmt.Println(t)
	}
	return nil
}
