// Package gvisor is the container tier behind a kernel of its own: the commands of a
// sandbox run under gVisor's sentry, which answers their system calls itself. It is for
// tasks that may attack the kernel, on machines without hardware virtualisation.
//
// # What a sandbox is made of
//
// A shell of the hold, as a container has it: namespaces, a uid range of its own,
// control groups. In it, instead of an image, is what runsc needs: the program, the
// image as one file (see Images), the disk, and a directory for state. runsc and what
// it starts are the sandbox's root there and nobody on the machine. The names of all
// begin with Prefix, so that the container tier, which shares the hold, the groups and
// the disks, knows that they are not its own.
//
//	<Dir>/<id>/state    record of what was asked for; written first, removed last
//	<Dir>/<id>/b/       the bundle, and sockets on which helpers dial
//	<Dir>/<id>/*.out    kept output of its commands, *.err likewise
//	disk pool gv.<id>   what the sandbox writes, while it runs and after
//	control group and hold gv.<id>; gv.<id>.disk for the files of a stopped one
//
// # Commands
//
// A command is a process of the hold, in the role gvisor-exec of package inside: so its
// output, its terminal, its deadline and its end are kept where those of a container's
// are, and outlive the agent.
//
// # The disk
//
// What is written goes into a file on the disk pool that has no name, and only the
// sentry knows which byte of it is which file. A stop has the sentry write the upper
// layer down as an archive, a start reads it. A sentry that is killed takes along what
// was written since the last start.
package gvisor

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	goruntime "runtime"
	"sync"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/accounts"
	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/internal/diskpool"
	"github.com/opendsec/dsec/internal/hold"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/netpolicy"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/tier"
)

// Prefix of the names of what sandboxes are made of.
const Prefix = "gv."

// Config of a Runtime. What it names is used, not owned: Close closes none of it.
type Config struct {
	Dir       string            // state, one directory for each sandbox
	Images    string            // directory of images in one file
	Runsc     string            // the program
	Helper    *os.File          // dsec-hold, see package inside
	UIDBase   uint32            // first uid of the first range
	UIDRanges int               // how many
	Parallel  int               // creations at a time; 0: 2 for each CPU
	Hold      *hold.Client      // the process that outlives us
	Cgroups   *cgroup.Root      //
	Disks     diskpool.Pool     //
	Network   netpolicy.Network // nil: only network "none"
	Log       *slog.Logger      // nil: the default one
	// Complete has all data of a layer brought here; nil: a layer that is not whole cannot
	// be used.
	Complete func(context.Context, layer.Local) error
	// Unseen is told of every sandbox that begins: what programs do in it is seen by
	// nobody; nil: nobody wants to see it.
	Unseen func(dsec.SandboxID, error)
}

// Runtime is the container tier with isolation "gvisor"; see package runtime for what
// it promises.
type Runtime struct {
	cfg    Config
	hold   *hold.Client
	groups *cgroup.Root
	disks  diskpool.Pool
	log    *slog.Logger
	uids   *accounts.Ranges
	images *Images
	runsc  program

	missing error // why there is no runsc; nil: there is
	tried   sync.Mutex
	works   bool // a sentry was started here, under tried

	slots chan struct{}

	boxes  *tier.Table[*sandbox]
	ends   *tier.Ends
	events <-chan hold.Event
	leave  func()
	stop   context.CancelCauseFunc
	life   context.Context
	tasks  sync.WaitGroup
}

var errClosed = errors.New("the runtime is closed")

var (
	_ runtime.Runtime   = (*Runtime)(nil)
	_ runtime.Execer    = (*Runtime)(nil)
	_ runtime.Filer     = (*Runtime)(nil)
	_ runtime.Pauser    = (*Runtime)(nil)
	_ runtime.Resumer   = (*Runtime)(nil)
	_ runtime.Dialer    = (*Runtime)(nil)
	_ runtime.Networker = (*Runtime)(nil)
)

// Open finds the sandboxes of an earlier process, undoes what that had not finished and
// removes what belongs to nobody. Without runsc it does that, too, and every creation is
// Unsupported and says why.
func Open(ctx context.Context, c Config) (*Runtime, error) {
	if c.Parallel <= 0 {
		c.Parallel = 2 * goruntime.NumCPU()
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
	if c.UIDBase < accounts.IDs || c.UIDRanges <= 0 {
		return nil, dsec.Errorf(dsec.Invalid, "open gvisor runtime", c.Dir, "no uids")
	}
	for _, dir := range []string{c.Dir, c.Images} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, dsec.E(dsec.Internal, "open gvisor runtime", dir, err)
		}
	}
	r := &Runtime{cfg: c, hold: c.Hold, groups: c.Cgroups, disks: c.Disks, log: c.Log, uids: accounts.NewRanges(c.UIDBase, c.UIDRanges),
		slots: make(chan struct{}, c.Parallel), boxes: tier.NewTable(newSandbox), ends: tier.NewEnds()}
	var err error
	if r.images, err = OpenImages(c.Images); err != nil {
		return nil, err
	}
	r.images.complete = c.Complete
	if r.runsc, err = r.install(ctx); dsec.ClassOf(err) == dsec.Unsupported {
		r.missing = err
	} else if err != nil {
		return nil, err
	}
	if err := r.makeRoot(); err != nil {
		return nil, err
	}
	r.events, r.leave = c.Hold.Route(Prefix)
	r.life, r.stop = context.WithCancelCause(context.WithoutCancel(ctx))
	if err := r.adopt(ctx); err != nil {
		_ = r.Close()
		return nil, err
	}
	r.tasks.Go(r.watchHold)
	r.tasks.Go(func() { r.ends.Send(r.life) })
	return r, nil
}

// Close lets go of everything and ends no sandbox.
func (r *Runtime) Close() error {
	r.stop(errClosed)
	r.leave()
	r.tasks.Wait()
	for _, sb := range r.boxes.All() {
		sb.services.Close()
	}
	return nil
}

// Images are those it makes of layers.
func (r *Runtime) Images() *Images { return r.images }

// Tier is "container": gvisor is a way to isolate one.
func (r *Runtime) Tier() dsec.Tier { return dsec.TierContainer }

func (r *Runtime) dir(id dsec.SandboxID) string { return filepath.Join(r.cfg.Dir, string(id)) }

// name is what a sandbox's things are called.
func name(id dsec.SandboxID) string { return Prefix + string(id) }

// List tells of every sandbox, those being made or removed included.
func (r *Runtime) List(ctx context.Context) ([]runtime.Status, error) {
	all := r.boxes.All()
	known, err := r.hold.List(ctx)
	if err != nil {
		return nil, err
	}
	execs := map[string][]string{}
	for _, s := range known {
		for _, e := range s.Execs {
			if !isOwn(e.Spec.ID) {
				execs[s.ID] = append(execs[s.ID], e.Spec.ID)
			}
		}
	}
	list := make([]runtime.Status, 0, len(all))
	for _, sb := range all {
		if st, ok := sb.Status(); ok {
			st.Execs = execs[name(sb.ID)]
			list = append(list, st)
		}
	}
	return list, nil
}
