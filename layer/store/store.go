// Package store is the layer store of a node: a directory with the whole
// layers it has, the tags that point to them and the leases that keep them.
//
// # On disk
//
//	layers/<hex>/{manifest,meta,data,chunks,info}  one verified layer each; with index and
//	                present as long as its data are not whole, and with trace if what is
//	                read of it was recorded
//	stacks/<hex>/{stack,info}  one stack each; its layers may be elsewhere
//	oci/<key>       what became of an OCI layer, docs/formats/stack.md
//	refs/<key>      what an OCI reference meant when it was last resolved
//	parts/<hex>     what a download that broke has brought
//	id              names this store among those that share a blob store
//	tags/<tag>      the digest of a layer or a stack; in a second line the project the tag belongs to, if to any,
//	                in a third when it goes by itself
//	leases/<name>   the refs and digests that a lease keeps, as JSON
//	tmp/            work in progress; emptied at Open
//	id              names this store among those that share a blob store
//	checkpoints/<hex>  until when a checkpoint that was made here is kept, docs/formats/checkpoint.md
//	rooted          the key of the root that was written last, docs/formats/collect.md
//	lock            held while the store is open
//
// A layer is complete when its directory is under layers: it is built in tmp,
// synced, and moved there in one step, as are tags and (unsynced) leases. So a
// program killed at any moment leaves a store without half a layer, and Open
// sweeps the rest. A layer is removed the same way backwards. The files are
// described in docs/formats/layer.md.
//
// With a blob store, a layer that is made here is also put there, compressed,
// and one that is asked for by digest and not here is fetched from there. Every
// byte is checked against the layer's digest before the layer is complete.
//
// What keeps a layer: a lease, a tag, a stack that is kept, a packed layer with a
// tag or lease that stands on it, or that it was made or used within the grace time. Collect removes the others.
package store

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/internal/fault"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/layer/ondemand"
)

// Converter makes layers: image.Convert, or the worker process that calls it.
type Converter func(ctx context.Context, source image.Location, files image.Files, opts image.Options) (image.Result, error)

// DefaultSmall is how many bytes of data a layer may have that is fetched whole
// where it is needed, because asking for parts of it would take longer.
const DefaultSmall = 8 << 20

// Options of a store; zero values are the defaults.
type Options struct {
	Convert Converter     // default image.Convert, in this process
	Blobs   blob.Store    // nil: the layers are on this machine only; not closed by the store
	Grace   time.Duration // how long garbage collection spares a new layer; default 1 h
	Log     *slog.Logger
	Name    string // of this node, for people who look at what keeps an object

	// OnDemand says that somebody brings the data of layers as they are read:
	// those of more bytes than Small (default DefaultSmall) are then not waited for.
	OnDemand bool
	Small    int64

	// ClaimTTL is how long a machine that says nothing is taken to be alive;
	// default 15 s.
	ClaimTTL time.Duration
	// References, if not nil, has OCI references that name their registry
	// (registry/name:tag) made known when they are acquired. What one meant stays what
	// it means until Ensure looks again, or for MaxAge if that is above 0.
	References *EnsureOptions
	// Layers is how many layers are fetched and converted at a time, of all
	// images together; default the number of processors, at least 2.
	Layers int
}

// Store implements layer.Store, for everybody or, made by For, for a project.
type Store struct {
	*shared
	project string // whose tags are seen and made; "": everybody's
}

// shared is what the views of a store have in common.
type shared struct {
	dir  string
	opts Options
	lock *os.File

	lanes *ondemand.Lanes // of the fetches of this process

	mu     sync.Mutex
	leases map[string]lease
	jobs   map[string]*job              // running imports by what they make
	known  map[layer.Digest]layer.Local // layers that are here and were looked at
	// traces that are being changed; closed when they have been
	tracing map[layer.Digest]chan struct{}
	// layers that are being evicted; closed when they have been
	evicting map[layer.Digest]chan struct{}
	stacks   map[layer.Digest]layer.Info // stacks that are here
	inside   map[layer.Digest][]string   // layers to the digests of the stacks they are in
	claims   map[string]bool             // works that this store has claimed
	refs     map[string]reference        // references that were resolved, by themselves
	queue    queue                       // of images to make
	slots    slots                       // for layers to convert
	sends    sync.Mutex                  // one layer at a time is packed to be shared
	makings  map[string]*making          // images that are being made
	heres    map[string]*here
	sent     map[string]bool // notes that are known to be in the blob store
	pins     map[string]bool // keys of pins of work in progress

	id       string // of this store
	renewing sync.Mutex

	pull *image.Puller
	ctx  context.Context // of what is done behind
	stop context.CancelFunc
	wg   sync.WaitGroup
}

var _ layer.Store = (*Store)(nil)

// For implements layer.Store.
func (s *Store) For(project string) layer.Store { return s.View(project) }

// View is For with all that the store can.
func (s *Store) View(project string) *Store { return &Store{shared: s.shared, project: project} }

// Open opens the store in the directory, which it makes if there is none. A
// store has one opener at a time.
func Open(dir string, opts Options) (*Store, error) {
	const op = "open layer store"
	if opts.Convert == nil {
		opts.Convert = image.Convert
	}
	if opts.Grace == 0 {
		opts.Grace = time.Hour
	}
	if opts.Small == 0 {
		opts.Small = DefaultSmall
	}
	if opts.Log == nil {
		opts.Log = slog.Default()
	}
	if opts.ClaimTTL == 0 {
		opts.ClaimTTL = 15 * time.Second
	}
	if opts.Layers == 0 {
		opts.Layers = max(2, runtime.NumCPU())
	}
	for _, d := range []string{"layers", "stacks", "oci", "parts", "refs", "tags", "leases", "tmp"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o700); err != nil {
			return nil, diskError(op, dir, err)
		}
	}
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, diskError(op, dir, err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		lock.Close()
		return nil, dsec.Errorf(dsec.Unavailable, op, dir, "another program has it open: %w", err)
	}
	s := &Store{shared: &shared{dir: dir, opts: opts, lock: lock, lanes: ondemand.NewLanes(0), leases: map[string]lease{}, jobs: map[string]*job{},
		known: map[layer.Digest]layer.Local{}, pins: map[string]bool{}, tracing: map[layer.Digest]chan struct{}{}, evicting: map[layer.Digest]chan struct{}{}, stacks: map[layer.Digest]layer.Info{}, inside: map[layer.Digest][]string{},
		claims: map[string]bool{}, refs: map[string]reference{}, makings: map[string]*making{}, sent: map[string]bool{}, heres: map[string]*here{}, pull: image.NewPuller()}}
	s.ctx, s.stop = context.WithCancel(context.Background())
	if err := errors.Join(s.sweep(), s.loadStacks(), s.loadRefs(), s.loadLeases(), s.identify(), s.promoteAll()); err != nil {
		lock.Close()
		return nil, diskError(op, dir, err)
	}
	return s, nil
}

// Close ends what is done behind and lets another program open the store.
// Leases stay.
func (s *Store) Close() error {
	s.stop()
	s.wg.Wait()
	return s.lock.Close()
}

// identify names the store, once.
func (s *Store) identify() error {
	b, err := s.readOptional("id")
	if err != nil {
		return err
	}
	if s.id = strings.TrimSpace(string(b)); s.id == "" {
		s.id = dsec.Random(20)
		err = s.writeFile("id", []byte(s.id+"\n"), true)
	}
	return err
}

// sweep removes what a killed program left half-made.
func (s *Store) sweep() error {
	left, err := os.ReadDir(s.path("tmp"))
	if err != nil {
		return err
	}
	for _, e := range left {
		if err := os.RemoveAll(s.path("tmp", e.Name())); err != nil {
			return err
		}
	}
	return nil
}

func (s *Store) path(parts ...string) string {
	return filepath.Join(append([]string{s.dir}, parts...)...)
}

// diskError classes an error of the local file system; nil stays nil.
func diskError(op, object string, err error) error {
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*dsec.Error](err); ok {
		return e
	}
	return dsec.E(fault.Class(err, dsec.Internal), op, object, err)
}
