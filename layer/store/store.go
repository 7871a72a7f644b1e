// Package store is the layer store of a node: a directory with the whole
// layers it has, the tags that point to them and the leases that keep them.
//
// # On disk
//
//	layers/<hex>/{manifest,meta,data,chunks,info}  one verified layer each; with index and
//	                present as long as its data are not whole
//	tags/<tag>      a digest; in a second line the project the tag belongs to, if to any
//	leases/<name>   the refs and digests that a lease keeps, as JSON
//	tmp/            work in progress; emptied at Open
//	id              names this store among those that share a blob store
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
// What keeps a layer: a lease, a tag, or that it was made or used within the
// grace time. Collect removes the others.
package store

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
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

// Options of a store; zero values are the defaults.
type Options struct {
	Convert Converter     // default image.Convert, in this process
	Blobs   blob.Store    // nil: the layers are on this machine only; not closed by the store
	Grace   time.Duration // how long garbage collection spares a new layer; default 1 h
	Log     *slog.Logger
	Name    string // of this node, for people who look at what keeps an object

	// OnDemand says that somebody brings the data of layers as they are read:
	// those of more bytes than Small (default 8 MiB) are then not waited for.
	OnDemand bool
	Small    int64
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
	pins   map[string]bool              // keys of pins of work in progress

	id       string // of this store
	root     string // the key of what it keeps; another each time it is opened
	renewing sync.Mutex
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
		opts.Small = 8 << 20
	}
	if opts.Log == nil {
		opts.Log = slog.Default()
	}
	for _, d := range []string{"layers", "tags", "leases", "tmp"} {
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
		known: map[layer.Digest]layer.Local{}, pins: map[string]bool{}}}
	if err := errors.Join(s.sweep(), s.loadLeases(), s.identify()); err != nil {
		lock.Close()
		return nil, diskError(op, dir, err)
	}
	return s, nil
}

// Close lets another program open the store. Leases stay.
func (s *Store) Close() error { return s.lock.Close() }

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
	s.root = layer.RootPrefix + s.id + "/" + dsec.Random(20)
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
