package rootfs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/layer"
)

// keptPrefix is where the Keeper has the layer mounts.
const keptPrefix = "layer/"

// Options of Open.
type Options struct {
	Keeper Keeper
	// Devices of layers that are not whole; nil: those cannot be used.
	Devices Devices
	// Lives says whether what a device came by (Device.Session) is still there; nil:
	// all are. See LostBefore.
	Lives  func(ctx context.Context, d layer.Digest, session string) (bool, error)
	Plan   Plan          // nil: the one this kernel supports, found by trying; Close ends it
	Linger time.Duration // how long a layer without users stays mounted; 0: 1 minute
	Log    *slog.Logger  // nil: the default one

	forceLoop bool // mount layers as on kernels before 6.12
}

// Mounts are the layer mounts of a machine.
type Mounts struct {
	plan   Plan
	keeper Keeper
	opts   Options

	stop chan struct{}
	done chan struct{}

	mu     sync.Mutex
	mounts map[layer.Digest]*mounted // what new users get
	old    map[*mounted]struct{}     // used still, but not by anybody new
	// What is in neither any more and not gone yet; closed when it is.
	leaving map[*mounted]chan struct{}
	lost    []layer.Digest // see LostBefore
	serial  int
	users   map[string][]*mounted // what each name uses
}

// mounted is one layer mount. Making it is single-flight: ready is closed when
// file or err is set.
type mounted struct {
	digest  layer.Digest
	name    string // in the Keeper
	ready   chan struct{}
	file    *os.File
	err     error
	demand  bool      // its data come on demand; known when it is ready
	by      string    // Device.Session
	retired bool      // nobody new gets it; under Mounts.mu
	lost    bool      // and that because its session has ended; under Mounts.mu
	noted   bool      // and the Keeper knows; under Mounts.mu
	data    *os.File  // what it reads its data from; nil: none, or an earlier process made it
	users   int       // under Mounts.mu
	idle    time.Time // when users became 0
}

// name in the Keeper of a mount whose data come on demand: before what comes
// once only, and before the session they come by. There may be several of one
// layer: who has one keeps it when the layer has become whole.
const demandMark = "~"

func partsOf(name string) (d layer.Digest, demand bool, session string) {
	hex, rest, demand := strings.Cut(strings.TrimPrefix(name, keptPrefix), demandMark)
	_, session, _ = strings.Cut(rest, demandMark)
	return layer.Digest(hex), demand, session
}

// Open finds what an earlier process left in the Keeper; mounts whose users
// are not named again by Use are idle and go away after the linger time.
func Open(ctx context.Context, o Options) (*Mounts, error) {
	if o.Linger == 0 {
		o.Linger = time.Minute
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	plan := o.Plan
	if plan == nil {
		var err error
		if plan, err = choose(ctx, o.Keeper); err != nil {
			return nil, err
		}
	}
	m := &Mounts{plan: plan, keeper: o.Keeper, opts: o, stop: make(chan struct{}), done: make(chan struct{}),
		mounts: map[layer.Digest]*mounted{}, old: map[*mounted]struct{}{}, leaving: map[*mounted]chan struct{}{}, users: map[string][]*mounted{}}
	if err := m.adopt(ctx); err != nil {
		return nil, errors.Join(err, plan.Close())
	}
	go m.sweep()
	return m, nil
}

// adopt takes over the layer mounts that are still good: a mount that this
// process can no longer clone, as after a change of mount namespace, is dropped.
func (m *Mounts) adopt(ctx context.Context) error {
	names, err := m.keeper.Names(ctx, keptPrefix)
	if err != nil {
		return err
	}
	retired, err := m.adoptRetired(ctx, names)
	if err != nil {
		return err
	}
	for _, name := range names {
		f, err := m.keeper.Get(ctx, name)
		if err != nil {
			return err
		}
		c, err := m.plan.Clone(f, nil)
		if err != nil {
			m.opts.Log.Warn("layer mount of an earlier process is not usable", "mount", name, "err", err)
			f.Close()
			if err := errors.Join(m.plan.Retire(name), m.keeper.Drop(ctx, name), m.keeper.Drop(ctx, retiredPrefix+name)); err != nil {
				return dsec.E(dsec.Internal, "drop layer mount", name, err)
			}
			continue
		}
		c.Close()
		d, demand, session := partsOf(name)
		e := &mounted{digest: d, name: name, ready: make(chan struct{}), file: f, demand: demand, by: session, idle: time.Now(), retired: retired[name], noted: retired[name]}
		close(e.ready)
		if err := m.adoptLost(ctx, e); err != nil {
			return err
		}
		if e.retired {
			m.old[e] = struct{}{}
			continue
		}
		if was := m.mounts[d]; was != nil {
			if demand { // names are in order: the one without the mark came before
				m.old[e] = struct{}{}
				continue
			}
			m.old[was] = struct{}{}
		}
		m.mounts[d] = e
	}
	m.serial = int(time.Now().UnixNano()) // no name is used twice
	return nil
}

// Plan says how mounts are kept.
func (m *Mounts) Plan() Plan { return m.plan }

// Use mounts what is not mounted yet and counts user as a user of each layer.
// A user that is known already has what it had before.
func (m *Mounts) Use(ctx context.Context, user string, layers []layer.Local) error {
	m.mu.Lock()
	if _, known := m.users[user]; known {
		m.mu.Unlock()
		return nil
	}
	entries := make([]*mounted, len(layers))
	for i, l := range layers {
		e := m.mounts[l.Digest]
		if e != nil && e.outdated(l) {
			m.old[e], e = struct{}{}, nil
		}
		if e == nil {
			m.serial++
			e = &mounted{digest: l.Digest, name: fmt.Sprintf("%s%s%s%x", keptPrefix, l.Digest, demandMark, m.serial), ready: make(chan struct{})}
			m.mounts[l.Digest] = e
			go m.mount(context.WithoutCancel(ctx), e, l)
		}
		e.users++
		entries[i] = e
	}
	m.users[user] = entries
	m.mu.Unlock()
	for _, e := range entries {
		select {
		case <-e.ready:
		case <-ctx.Done():
			m.Unuse(user)
			return dsec.E(dsec.ClassOf(ctx.Err()), "mount layers for", user, ctx.Err())
		}
		if e.err != nil {
			m.Unuse(user)
			return e.err
		}
	}
	return nil
}

func (e *mounted) close() {
	for _, f := range []*os.File{e.file, e.data} {
		if f != nil {
			f.Close()
		}
	}
}

// outdated says that the layer has become whole since it was mounted: who comes
// now reads plain files.
func (e *mounted) outdated(l layer.Local) bool {
	if !e.isReady() || !e.demand {
		return false
	}
	whole, err := l.Whole()
	return err == nil && whole
}

// mount fills e; the mount exists before it can be seen in the Keeper.
func (m *Mounts) mount(ctx context.Context, e *mounted, l layer.Local) {
	defer close(e.ready)
	f, err := m.mountLayer(ctx, e, l)
	m.awaitName(e.name)
	if err == nil {
		if err = m.plan.Admit(e.name, f); err == nil {
			if err = m.keeper.Put(ctx, e.name, f); err != nil {
				err = errors.Join(err, m.plan.Retire(e.name))
			}
		}
	}
	if err == nil {
		e.file = f
		return
	}
	if f != nil {
		f.Close()
	}
	e.close()
	e.data = nil
	e.err = dsec.E(classOfMount(err), "mount layer", string(l.Digest), err)
	m.mu.Lock()
	if m.mounts[l.Digest] == e {
		delete(m.mounts, l.Digest)
	}
	m.mu.Unlock()
}

// mountLayer mounts what the data are read from now.
func (m *Mounts) mountLayer(ctx context.Context, e *mounted, l layer.Local) (*os.File, error) {
	d := Device{Path: l.Data}
	var err error
	if m.opts.Devices != nil {
		d, err = m.opts.Devices.Device(ctx, l)
	} else if whole, werr := l.Whole(); werr != nil || !whole {
		err = errors.Join(werr, dsec.Errorf(dsec.Unsupported, "read layer", string(l.Digest), "its data are not all here, and nobody brings them"))
	}
	if err != nil {
		return nil, err
	}
	if d.Mount != nil {
		defer d.Mount.Close()
	}
	if e.demand, e.by = d.Kind != "", d.Session; !e.demand {
		e.name = keptPrefix + string(l.Digest)
	} else if e.by != "" {
		e.name += demandMark + e.by
	}
	if e.demand && e.by == "" && m.hasRetired(l.Digest) {
		if err := dropCache(d.Path); err != nil {
			return nil, err
		}
	}
	f, err := mountErofs(l.Meta, d, m.opts.forceLoop)
	if err == nil && d.Path != "" {
		e.data, err = openQuietly(d.Path)
		if err != nil {
			f.Close()
			f = nil
		}
	}
	return f, err
}

// giveBack drops what the page cache has of the files that layers are read from:
// the layers' own pages have the same bytes, and are the ones that are used
// again (bench/RESULTS.md).
func (m *Mounts) giveBack() {
	m.mu.Lock()
	var files []*os.File
	for _, e := range m.all() {
		if e.isReady() && e.data != nil {
			files = append(files, e.data)
		}
	}
	m.mu.Unlock() // creations wait for it, and much may be dropped
	for _, f := range files {
		if raw, err := f.SyscallConn(); err == nil { // one that was closed meanwhile has nothing to give back
			_ = raw.Control(func(fd uintptr) { _ = unix.Fadvise(int(fd), 0, 0, unix.FADV_DONTNEED) }) // only advice
		}
	}
}

// all are the mounts there are, under mu.
func (m *Mounts) all() []*mounted {
	return slices.AppendSeq(slices.Collect(maps.Values(m.mounts)), maps.Keys(m.old))
}

// isReady says that the mount was made, or could not be.
func (e *mounted) isReady() bool {
	select {
	case <-e.ready:
		return true
	default:
		return false
	}
}

func classOfMount(err error) dsec.Class {
	if e, ok := errors.AsType[*dsec.Error](err); ok {
		return e.Class
	}
	switch {
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.EUCLEAN), errors.Is(err, unix.EOPNOTSUPP):
		return dsec.Corrupt
	case errors.Is(err, os.ErrNotExist):
		return dsec.NotFound
	}
	return dsec.Internal
}

// Unuse ends the use of all layers by user. Unknown users are no error.
func (m *Mounts) Unuse(user string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, e := range m.users[user] {
		if e.users--; e.users == 0 {
			e.idle = time.Now()
		}
	}
	delete(m.users, user)
}

// Users counts those of a layer; isMounted says whether it is mounted.
func (m *Mounts) Users(d layer.Digest) (users int, isMounted bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e := m.mounts[d]
	if e == nil {
		return 0, false
	}
	return e.users, true
}

// Stack returns a detached mount of a writable root.
func (m *Mounts) Stack(r Root) (*os.File, error) {
	return m.overlay(r, Overlay{UserNS: r.UserNS, Dir: r.Dir})
}

// View returns a detached, read-only mount of what a root with that upper
// shows, with ids as they are on the disk. It may be made while the root is in
// use; what is written there then shows or not.
func (m *Mounts) View(r Root) (*os.File, error) {
	return m.overlay(r, Overlay{Dir: r.Dir, View: true})
}

func (m *Mounts) overlay(r Root, o Overlay) (*os.File, error) {
	o.Lowers = make([]*os.File, len(r.Layers))
	m.mu.Lock()
	used := m.users[r.User]
	for i, d := range r.Layers {
		var e *mounted
		if j := slices.IndexFunc(used, func(e *mounted) bool { return e.digest == d }); j >= 0 {
			e = used[j]
		}
		if e == nil || e.file == nil {
			m.mu.Unlock()
			return nil, dsec.Errorf(dsec.Internal, "stack root on layer", string(d), "not in use")
		}
		o.Lowers[i] = e.file
	}
	m.mu.Unlock()
	f, err := m.plan.Overlay(o)
	if err != nil {
		return nil, diskError("stack root in", r.Dir.Name(), err)
	}
	return f, nil
}

// Shared returns the admitted mount of that name, made by make if the Keeper
// has none; for mounts that all sandboxes clone, as /dev.
func (m *Mounts) Shared(ctx context.Context, name string, make func() (*os.File, error)) (*os.File, error) {
	f, err := m.keeper.Get(ctx, name)
	if err == nil {
		c, err := m.plan.Clone(f, nil)
		if err == nil {
			c.Close()
			return f, nil
		}
		f.Close()
		if err := m.plan.Retire(name); err != nil {
			return nil, dsec.E(dsec.Internal, "retire mount", name, err)
		}
	} else if !errors.Is(err, dsec.NotFound.Err()) {
		return nil, err
	}
	if f, err = make(); err != nil {
		return nil, dsec.E(dsec.Internal, "make mount", name, err)
	}
	if err = m.plan.Admit(name, f); err == nil {
		err = m.keeper.Put(ctx, name, f)
	}
	if err != nil {
		f.Close()
		return nil, dsec.E(dsec.Internal, "keep mount", name, err)
	}
	return f, nil
}

// Keeper returns a Keeper for others whose mounts shall be usable as Root.Dir:
// what is put there is admitted first.
func (m *Mounts) Keeper() Keeper { return admitting{m.keeper, m.plan} }

type admitting struct {
	Keeper
	plan Plan
}

func (a admitting) Put(ctx context.Context, name string, f *os.File) error {
	if err := a.plan.Admit(name, f); err != nil {
		return dsec.E(dsec.Internal, "admit mount", name, err)
	}
	return a.Keeper.Put(ctx, name, f)
}

func (a admitting) Drop(ctx context.Context, name string) error {
	if err := a.plan.Retire(name); err != nil {
		return dsec.E(dsec.Internal, "retire mount", name, err)
	}
	return a.Keeper.Drop(ctx, name)
}

const giveBackEvery = 2 * time.Second

// sweep evicts, and gives memory back, until Close.
func (m *Mounts) sweep() {
	defer close(m.done)
	tick, back := time.NewTicker(max(m.opts.Linger/2, time.Millisecond)), time.NewTicker(giveBackEvery)
	defer tick.Stop()
	defer back.Stop()
	for {
		select {
		case <-m.stop:
			return
		case <-back.C:
			m.giveBack()
		case <-tick.C:
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			if err := m.Evict(ctx, m.opts.Linger); err != nil {
				m.opts.Log.Warn("evict unused layers", "err", err)
			}
			cancel()
		}
	}
}

// Close lets go of everything and unmounts nothing.
func (m *Mounts) Close() error {
	close(m.stop)
	<-m.done
	m.mu.Lock()
	entries := m.all()
	m.mu.Unlock()
	for _, e := range entries {
		<-e.ready
		e.close()
	}
	return m.plan.Close()
}

// choose tries the newer plan on a small tmpfs and takes the older one if the
// kernel refuses.
func choose(ctx context.Context, k Keeper) (Plan, error) {
	if err := tryDetached(); err != nil {
		return Attached(ctx, k)
	}
	return Detached(), nil
}

// tryDetached reports why the detached plan does not work here, nil if it does.
func tryDetached() error {
	m, err := linux.NewFS("tmpfs").String("mode", "0700").Mount(unix.MOUNT_ATTR_NODEV)
	if err != nil {
		return err
	}
	defer m.Close()
	for _, d := range []string{"lower", Upper, workName} {
		if err := unix.Mkdirat(int(m.Fd()), d, 0o700); err != nil {
			return os.NewSyscallError("mkdir", err)
		}
	}
	fs := linux.NewFS("overlay")
	defer fs.Discard()
	for _, d := range []struct{ key, name string }{{"lowerdir+", "lower"}, {"upperdir", Upper}, {"workdir", workName}} {
		f, err := linux.OpenBeneath(m, d.name, unix.O_PATH|unix.O_DIRECTORY)
		if err != nil {
			return err
		}
		defer f.Close()
		fs.FD(d.key, f)
	}
	o, err := fs.Mount(unix.MOUNT_ATTR_NODEV)
	if err != nil {
		return err
	}
	o.Close()
	c, err := linux.Clone(m, false)
	if err != nil {
		return err
	}
	return c.Close()
}
