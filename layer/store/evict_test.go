package store

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob/bucket"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/layer"
)

// nobody reads a layer in these tests.
func nobody(context.Context, layer.Digest) error { return nil }

// TestEvict: a layer gives its room back, keeps its name, trace and source, and
// comes again with the right bytes; but not while it is leased.
func TestEvict(t *testing.T) {
	ctx, blobs := t.Context(), openBucket(t, t.TempDir())
	s := openStore(t, t.TempDir(), Options{Blobs: blobs, OnDemand: true, Small: 1})
	info, err := s.Import(ctx, tree(t, map[string]string{"a": varied()}), "a:1", image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile(s.path("layers", info.Digest.Hex(), layer.DataFile))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Acquire(ctx, "sb", []dsec.LayerRef{"a:1"}); err != nil {
		t.Fatal(err)
	}
	called := false
	let := func(context.Context, layer.Digest) error { called = true; return nil }
	if _, err := s.Evict(ctx, "a:1", let); dsec.ClassOf(err) != dsec.IllegalState || !strings.Contains(fmt.Sprint(err), "sb") || called {
		t.Errorf("while it is leased: %v, let go: %t", err, called)
	}
	if err := s.Release(ctx, "sb"); err != nil {
		t.Fatal(err)
	}
	refused := dsec.Errorf(dsec.IllegalState, "let go", "", "it is mounted")
	if _, err := s.Evict(ctx, "a:1", func(context.Context, layer.Digest) error { return refused }); dsec.ClassOf(err) != dsec.IllegalState {
		t.Errorf("while it is mounted: %v", err)
	}
	if err := s.RecordTrace(ctx, info.Digest, recording(1)); err != nil {
		t.Fatal(err)
	}
	freed, err := s.Evict(ctx, "a:1", nobody)
	if err != nil || freed < 1<<20 {
		t.Fatalf("%d bytes are free, %v", freed, err)
	}
	if got := s.LocalTrace(info.Digest); got.Recordings != 1 {
		t.Errorf("the trace is gone: %+v", got)
	}
	e, err := s.Inspect(ctx, "a:1")
	if err != nil || e.Source != info.Source || e.Image != info.Image || e.DataSize != info.DataSize {
		t.Errorf("it was %+v and is %+v, %v", info, e, err)
	}
	set, err := s.Acquire(ctx, "sb", []dsec.LayerRef{"a:1"})
	if err != nil {
		t.Fatal(err)
	}
	if whole, err := set.Layers[0].Whole(); err != nil || whole {
		t.Errorf("whole: %t, %v", whole, err)
	}
	data, err := s.OpenData(ctx, set.Layers[0])
	if err != nil {
		t.Fatal(err)
	}
	defer data.Close()
	got := make([]byte, info.DataSize)
	if _, err := data.ReadAt(got, 0); err != nil || string(got) != string(want[:info.DataSize]) {
		t.Errorf("other bytes, %v", err)
	}
	if err := s.Verify(ctx, "a:1"); err != nil {
		t.Error(err)
	}
}

// TestEvictAgain: what has come of a layer is given back, too.
func TestEvictAgain(t *testing.T) {
	ctx := t.Context()
	s := openStore(t, t.TempDir(), Options{Blobs: openBucket(t, t.TempDir()), OnDemand: true, Small: 1})
	info, err := s.Import(ctx, tree(t, map[string]string{"a": varied()}), "a:1", image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := s.Evict(ctx, dsec.LayerRef(info.Digest), nobody); err != nil {
			t.Fatal(err)
		}
		here, of, err := s.Here(info.Digest)
		if err != nil || here != 0 || of == 0 {
			t.Fatalf("%d of %d chunks are here, %v", here, of, err)
		}
		f, err := os.OpenFile(s.path("layers", info.Digest.Hex(), layer.PresentFile), os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		p, err := layer.OpenPresence(f, of)
		if err != nil {
			t.Fatal(err)
		}
		p.Set(0)
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
		if here, _, err := s.Here(info.Digest); err != nil || here != 1 {
			t.Fatalf("%d chunks are here, %v", here, err)
		}
	}
}

// TestEvictHasLeasesWait: who wants the layer meanwhile gets it afterwards, not
// whole, and also if nothing came of it.
func TestEvictHasLeasesWait(t *testing.T) {
	ctx := t.Context()
	s := openStore(t, t.TempDir(), Options{Blobs: openBucket(t, t.TempDir()), OnDemand: true, Small: 1})
	if _, err := s.Import(ctx, tree(t, map[string]string{"a": varied()}), "a:1", image.Options{}); err != nil {
		t.Fatal(err)
	}
	for i, outcome := range []error{dsec.Errorf(dsec.Internal, "let go", "", "for a test"), nil} {
		var whole bool
		leased := make(chan error, 1)
		_, err := s.Evict(ctx, "a:1", func(context.Context, layer.Digest) error {
			short, cancel := context.WithCancel(ctx)
			cancel()
			if _, err := s.Acquire(short, "no", []dsec.LayerRef{"a:1"}); dsec.ClassOf(err) != dsec.Canceled {
				t.Errorf("leased while it is evicted: %v", err)
			}
			if _, err := s.Evict(ctx, "a:1", nobody); dsec.ClassOf(err) != dsec.IllegalState {
				t.Errorf("evicted twice: %v", err)
			}
			go func() {
				set, err := s.Acquire(ctx, fmt.Sprint("sb", i), []dsec.LayerRef{"a:1"})
				if err == nil {
					whole, err = set.Layers[0].Whole()
				}
				leased <- err
			}()
			return outcome
		})
		if (err == nil) != (outcome == nil) {
			t.Fatal(err)
		}
		if err := <-leased; err != nil || whole != (outcome != nil) {
			t.Errorf("whole: %t, %v", whole, err)
		}
		if err := s.Release(ctx, fmt.Sprint("sb", i)); err != nil {
			t.Fatal(err)
		}
	}
}

// TestEvictWithoutSomebodyWhoBringsItAgain is refused, and of a layer that is
// small there is nothing to give back.
func TestEvictWithoutSomebodyWhoBringsItAgain(t *testing.T) {
	ctx, blobs := t.Context(), openBucket(t, t.TempDir())
	for name, o := range map[string]Options{"no blob store": {OnDemand: true, Small: 1}, "no loader": {Blobs: blobs, Small: 1}, "small": {Blobs: blobs, OnDemand: true}} {
		s := openStore(t, t.TempDir(), o)
		info, err := s.Import(ctx, tree(t, map[string]string{"a": varied()}), "a:1", image.Options{})
		if err != nil {
			t.Fatal(err)
		}
		freed, err := s.Evict(ctx, "a:1", nobody)
		if name != "small" && dsec.ClassOf(err) != dsec.Unsupported || name == "small" && err != nil || freed != 0 {
			t.Errorf("%s: %d, %v", name, freed, err)
		}
		l := layer.Local{Info: info, Data: s.path("layers", info.Digest.Hex(), layer.DataFile)}
		if whole, err := l.Whole(); err != nil || !whole {
			t.Errorf("%s: whole: %t, %v", name, whole, err)
		}
	}
}

const evictDir = "DSEC_TEST_EVICT_DIR"

// evictLoop evicts a layer and fetches it whole until it is killed.
func evictLoop(dir string) {
	ctx := context.Background()
	blobs, err := bucket.Open(ctx, "file://"+filepath.Join(dir, "blobs"))
	var s *Store
	if err == nil {
		s, err = Open(filepath.Join(dir, "store"), Options{Blobs: blobs, OnDemand: true, Small: 1})
	}
	for err == nil {
		_, err = s.Evict(ctx, "a:1", nobody)
	}
	fmt.Println(err)
	os.Exit(1)
}

// TestKillWhileEvicting: after kill -9 the store opens and has the layer.
func TestKillWhileEvicting(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "blobs"), 0o700); err != nil {
		t.Fatal(err)
	}
	s, err := Open(filepath.Join(dir, "store"), Options{Blobs: openBucket(t, filepath.Join(dir, "blobs"))})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Import(t.Context(), tree(t, map[string]string{"a": varied()}), "a:1", image.Options{}); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	for round := range 12 {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), evictDir+"="+dir)
		var out strings.Builder
		cmd.Stdout = &out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Duration(20+rand.IntN(100)) * time.Millisecond) // when, is what is tried
		if err := cmd.Process.Signal(syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait() // killed
		if out.Len() > 0 {
			t.Fatalf("round %d: %s", round, out.String())
		}
		checkStore(t, filepath.Join(dir, "store"))
	}
}

// TestTrim: the layers used longest ago give their room back first, those that are
// leased never, and no more than is needed.
func TestTrim(t *testing.T) {
	ctx, blobs := t.Context(), openBucket(t, t.TempDir())
	s := openStore(t, t.TempDir(), Options{Blobs: blobs, OnDemand: true, Small: 1})
	var digests []layer.Digest
	for i := range 4 {
		noise := make([]byte, 2<<20)
		_, _ = rand.NewChaCha8([32]byte{byte(i)}).Read(noise)
		info, err := s.Import(ctx, tree(t, map[string]string{"a": string(noise)}), fmt.Sprint("t", i), image.Options{})
		if err != nil {
			t.Fatal(err)
		}
		when := time.Now().Add(time.Duration(i-10) * time.Minute)
		if err := os.Chtimes(s.path("layers", info.Digest.Hex()), when, when); err != nil {
			t.Fatal(err)
		}
		digests = append(digests, info.Digest)
	}
	if _, err := s.Acquire(ctx, "sb", []dsec.LayerRef{"t0"}); err != nil {
		t.Fatal(err)
	}
	room := func() (out [4]bool) { // which still take room
		for i, d := range digests {
			n, err := s.onDisk(d)
			if err != nil {
				t.Fatal(err)
			}
			out[i] = n > 0
		}
		return out
	}
	if freed, left, err := s.Trim(ctx, 1<<30, nobody); freed != 0 || left < 8<<20 || err != nil || room() != [4]bool{true, true, true, true} {
		t.Errorf("there was room: %d, %v, %v", freed, err, room())
	}
	if freed, left, err := s.Trim(ctx, 5<<20, nobody); freed < 4<<20 || left > 5<<20 || err != nil || room() != [4]bool{true, false, false, true} {
		t.Errorf("to 5 MiB: %d, %v, %v", freed, err, room())
	}
	if freed, left, err := s.Trim(ctx, 0, nobody); freed < 2<<20 || left < 2<<20 || err != nil || room() != [4]bool{true, false, false, false} {
		t.Errorf("to nothing: %d, %v, %v", freed, err, room())
	}
}
