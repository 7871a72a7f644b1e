package loader_test

import (
	"bytes"
	"context"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/blob/bucket"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/layer/ondemand/loader"
	"github.com/opendsec/dsec/layer/ondemand/precontent"
	"github.com/opendsec/dsec/layer/store"
)

// keeper keeps descriptors in this process.
type keeper struct {
	mu sync.Mutex
	m  map[string]*os.File
}

func (k *keeper) Get(_ context.Context, name string) (*os.File, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.m[name] == nil {
		return nil, dsec.Errorf(dsec.NotFound, "get descriptor", name, "none")
	}
	return duplicate(k.m[name])
}

// duplicate does not use Fd, which would make a descriptor block that all share.
func duplicate(f *os.File) (*os.File, error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	var fd int
	if e := raw.Control(func(n uintptr) { fd, err = unix.FcntlInt(n, unix.F_DUPFD_CLOEXEC, 0) }); e != nil {
		return nil, e
	}
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}

func (k *keeper) Put(_ context.Context, name string, f *os.File) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	c, err := duplicate(f)
	k.m[name] = c
	return err
}

func (k *keeper) Drop(_ context.Context, name string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if f := k.m[name]; f != nil {
		_ = f.Close()
		delete(k.m, name)
	}
	return nil
}

func (k *keeper) Names(_ context.Context, prefix string) ([]string, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.DeleteFunc(slices.Sorted(maps.Keys(k.m)), func(n string) bool { return !strings.HasPrefix(n, prefix) }), nil
}

// serveAndAsk runs a loader and a client of it.
func serveAndAsk(t *testing.T, dir string, blobs blob.Store, mechanism string) (*loader.Client, *keeper) {
	t.Helper()
	socket := filepath.Join(dir, "socket")
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: socket, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- loader.NewServer(loader.Options{Blobs: blobs}).Run(l) }()
	k := &keeper{m: map[string]*os.File{}}
	c, err := loader.Open(t.Context(), loader.Config{Socket: socket, Layers: filepath.Join(dir, "store", "layers"), Keeper: k, Mechanism: mechanism})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		_ = l.Close()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		for name := range maps.Keys(k.m) {
			_ = k.Drop(context.Background(), name)
		}
	})
	for begun := time.Now(); ; time.Sleep(time.Millisecond) {
		if pid, err := c.PID(t.Context()); err == nil && pid == os.Getpid() {
			return c, k
		}
		if time.Since(begun) > time.Minute {
			t.Fatal("the loader does not answer")
		}
	}
}

// TestTheFileThatIsMarkedIsTheOneThatIsThere: a layer that was removed or evicted
// behind the loader's back and came again has another data file. The kernel has to
// ask for that one, or its holes would be read.
func TestTheFileThatIsMarkedIsTheOneThatIsThere(t *testing.T) {
	dir, err := os.MkdirTemp("/var/tmp", "dsec-loader-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	if err := precontent.Supported(dir); err != nil {
		t.Skip(err)
	}
	ctx := t.Context()
	for _, d := range []string{"blobs", "tree"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	noise := make([]byte, 1<<20)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(noise)
	if err := os.WriteFile(filepath.Join(dir, "tree", "noise"), noise, 0o600); err != nil {
		t.Fatal(err)
	}
	blobs, err := bucket.Open(ctx, "file://"+filepath.Join(dir, "blobs"))
	if err != nil {
		t.Fatal(err)
	}
	defer blobs.Close()
	s, err := store.Open(filepath.Join(dir, "store"), store.Options{Blobs: blobs, OnDemand: true, Small: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	info, err := s.Import(ctx, filepath.Join(dir, "tree"), "", image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	c, k := serveAndAsk(t, dir, blobs, loader.PreContent)
	path := filepath.Join(dir, "store", "layers", info.Digest.Hex(), layer.DataFile)
	for range 3 {
		if _, err := s.Evict(ctx, dsec.LayerRef(info.Digest), func(context.Context, layer.Digest) error { return nil }); err != nil {
			t.Fatal(err)
		}
		for range 2 { // the second time it is marked
			if d, err := c.Device(ctx, layer.Local{Info: info, Data: path}); err != nil || d.Kind != loader.PreContent {
				t.Fatal(d, err)
			}
		}
		names, _ := k.Names(ctx, "ondemand/"+info.Digest.Hex())
		if len(names) != 1 {
			t.Fatalf("kept: %v", names)
		}
		is, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if was, err := k.m[names[0]].Stat(); err != nil || !os.SameFile(was, is) {
			t.Errorf("another file is marked, %v", err)
		}
	}
	// What the loader brings comes into the file that is there.
	if err := c.Fetch(ctx, info.Digest, nil); err != nil {
		t.Fatal(err)
	}
	if here, of, err := s.Here(info.Digest); err != nil || here != of {
		t.Errorf("%d of %d chunks are here, %v", here, of, err)
	}
	if err := c.Leave(ctx, info.Digest); err != nil {
		t.Fatal(err)
	}
	names, _ := k.Names(ctx, "ondemand/"+info.Digest.Hex())
	status, err := c.Status(ctx)
	if err != nil || len(status) > 0 || len(names) > 0 {
		t.Errorf("after it was left: %v, %+v, %v", names, status, err)
	}
	if got, err := os.ReadFile(path); err != nil || !bytes.Contains(got, noise[:4096]) {
		t.Errorf("other bytes, %v", err)
	}
}
