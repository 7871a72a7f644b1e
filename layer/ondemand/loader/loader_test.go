package loader

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/blob/bucket"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/layer/ondemand/precontent"
	"github.com/opendsec/dsec/layer/store"
)

// world is an agent with a store, and the socket of its loaders.
type world struct {
	t      *testing.T
	blobs  blob.Store
	store  *store.Store
	layer  layer.Local
	noise  []byte // one file in it
	dir    string
	tree   string // what it was made of
	shelf  *linux.Keeper
	client *Client
	socket string
	lis    *os.File // outlives loaders
	whole  chan layer.Digest
	config Config
}

func newWorld(t *testing.T, mechanism string, plant ...func(tree string)) *world {
	t.Helper()
	// Not where temporary files are: that may be a file system without events.
	dir, err := os.MkdirTemp("/var/tmp", "dsec-loader-")
	must(t, err)
	t.Cleanup(func() { must(t, os.RemoveAll(dir)) })
	if err := precontent.Supported(dir); mechanism == PreContent && err != nil {
		t.Skip(err)
	}
	ctx := t.Context()
	w := &world{t: t, dir: dir, shelf: linux.NewKeeper(), socket: filepath.Join(dir, "s"), whole: make(chan layer.Digest, 8)}
	if w.blobs, err = bucket.Open(ctx, "file://"+filepath.Join(dir, "blobs")); err != nil {
		t.Fatal(err)
	}
	w.tree = filepath.Join(dir, "tree")
	w.noise = make([]byte, 12<<20)
	for i := range w.noise {
		w.noise[i] = byte(i>>9) ^ byte(i*7)
	}
	must(t, os.Mkdir(w.tree, 0o755))
	must(t, os.WriteFile(filepath.Join(w.tree, "big"), w.noise, 0o644))
	for _, p := range plant {
		p(w.tree)
	}
	first, err := store.Open(filepath.Join(dir, "first"), store.Options{Blobs: w.blobs})
	must(t, err)
	info, err := first.Import(ctx, w.tree, "", image.Options{})
	must(t, errors.Join(err, first.Close()))
	w.store, err = store.Open(filepath.Join(dir, "second"), store.Options{Blobs: w.blobs, OnDemand: true, Small: 1})
	must(t, err)
	set, err := w.store.Acquire(ctx, "sb", []dsec.LayerRef{dsec.LayerRef(info.Digest)})
	must(t, err)
	w.layer = set.Layers[0]
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: w.socket, Net: "unixpacket"})
	must(t, err)
	l.SetUnlinkOnClose(false)
	w.lis, err = l.File()
	must(t, errors.Join(err, l.Close()))
	w.config = Config{Socket: w.socket, Layers: filepath.Join(dir, "second", "layers"), Keeper: w.shelf, Mechanism: mechanism,
		Whole: func(_ context.Context, d layer.Digest) {
			select {
			case w.whole <- d:
			default: // told again by another loader, and nobody asks
			}
		}}
	w.client, err = Open(ctx, w.config)
	must(t, err)
	t.Cleanup(func() {
		must(t, errors.Join(w.client.Close(), w.store.Close(), w.lis.Close(), w.blobs.Close()))
		w.shelf.Close()
	})
	return w
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// serve runs a loader until stop.
func (w *world) serve() (stop func()) { _, stop = w.serveWith(Options{Blobs: w.blobs}); return stop }

func (w *world) serveWith(o Options) (s *Server, stop func()) {
	w.t.Helper()
	l, err := net.FileListener(w.lis)
	must(w.t, err)
	done := make(chan error, 1)
	s = NewServer(o)
	go func() { done <- s.Run(l.(*net.UnixListener)) }()
	return s, func() { must(w.t, errors.Join(l.Close(), <-done)) }
}

// eventually asks until it is so: what is awaited is another goroutine's.
func (w *world) eventually(what string, ok func() bool) {
	w.t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			w.t.Fatalf("not within 20 s: %s", what)
		}
	}
}

func (w *world) status() []Status {
	st, err := w.client.Status(w.t.Context())
	if err != nil {
		return nil
	}
	return st
}

// TestALayerIsHandedOverAndBecomesWhole: to a loader that is there, to the one
// after it, and to one that comes when the layer is whole already.
func TestALayerIsHandedOverAndBecomesWhole(t *testing.T) {
	for _, mechanism := range []string{FUSE, PreContent} {
		t.Run(mechanism, func(t *testing.T) {
			w := newWorld(t, mechanism)
			stop := w.serve()
			w.eventually("the loader answers", func() bool { _, err := w.client.Status(t.Context()); return err == nil })
			d, err := w.client.Device(t.Context(), w.layer)
			if err != nil || d.Kind != mechanism {
				t.Fatalf("%+v, %v", d, err)
			}
			if st := w.status(); len(st) != 1 || st[0].Digest != w.layer.Digest || st[0].Here != 0 {
				t.Errorf("status: %+v", st)
			}
			stop()
			stop = w.serve()
			w.eventually("the next loader has it", func() bool { return len(w.status()) == 1 })
			must(t, w.client.Fetch(t.Context(), w.layer.Digest, []layer.Range{{Off: 4096, Len: 1}}))
			if st := w.status(); st[0].Here == 0 || st[0].Here == st[0].Chunks {
				t.Errorf("after one byte: %+v", st)
			}
			w.eventually("the request is counted, when it is over", func() bool { return w.status()[0].Fetched > 0 })
			must(t, w.client.Fetch(t.Context(), w.layer.Digest, nil))
			if got := <-w.whole; got != w.layer.Digest {
				t.Errorf("whole: %s", got)
			}
			must(t, w.store.Promote(w.layer.Digest))
			must(t, w.store.Verify(t.Context(), dsec.LayerRef(w.layer.Digest)))
			stop()
			stop = w.serve()
			defer func() { stop() }()
			again, err := w.client.Device(t.Context(), w.layer)
			if err != nil || again.Kind != "" || again.Path != w.layer.Data {
				t.Errorf("whole: %+v, %v", again, err)
			}
			if mechanism == FUSE {
				w.eventually("who has it mounted has it still", func() bool { st := w.status(); return len(st) == 1 && st[0].Whole })
				must(t, d.Mount.Close())
			}
			w.eventually("nothing is kept of what nobody reads", func() bool {
				names, err := w.shelf.Names(t.Context(), prefix+w.layer.Digest.Hex())
				return err == nil && len(names) == 0
			})
		})
	}
}

// TestWithoutALoader: what needs one says so, and what does not is served when
// one comes.
func TestWithoutALoader(t *testing.T) {
	w := newWorld(t, FUSE)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	if err := w.client.Fetch(ctx, w.layer.Digest, nil); dsec.ClassOf(err) != dsec.Unavailable && dsec.ClassOf(err) != dsec.Timeout {
		t.Errorf("fetch: %v", err)
	}
	defer w.serve()()
	w.eventually("the loader answers", func() bool { _, err := w.client.Status(t.Context()); return err == nil })
	if _, err := w.client.Trace(t.Context(), w.layer.Digest); dsec.ClassOf(err) != dsec.NotFound {
		t.Errorf("trace of a layer that is not served: %v", err)
	}
}

func FuzzFrame(f *testing.F) {
	for _, x := range []frame{{V: version, ID: 1, Op: opHello}, {V: version, Op: opServe, Digest: "sha256:" + layer.Digest(strings.Repeat("0a", 32)), Whole: true, Size: 5},
		{V: version, Op: opTrouble, Error: &trouble{Class: dsec.Corrupt, Text: "x"}, Session: "ondemand/0a/1", Number: 3, Generation: 1 << 63, At: time.Unix(1, 0).UTC()}, {V: 1, Op: opHello}} {
		b, err := json.Marshal(x)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var x frame
		if x.decode(b) != nil {
			return
		}
		if x.V != version {
			t.Errorf("accepted version %d", x.V)
		}
		if err := x.err(); err != nil && (len(err.Error()) > maxText+200 || !slices.Contains(dsec.Classes, dsec.ClassOf(err))) {
			t.Errorf("accepted the error %v", err)
		}
		for _, d := range []layer.Digest{x.Digest, x.Table} {
			if _, err := layer.ParseDigest(string(d)); d != "" && err != nil {
				t.Errorf("accepted %q", d)
			}
		}
		s := NewServer(Options{})
		defer s.stop(nil)
		if x.Op == opServe || x.Op == opEvents { // without descriptors
			if err := s.serve(&x); err == nil {
				t.Error("serves nothing")
			}
		}
	})
}
