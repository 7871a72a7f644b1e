package store

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
)

// fakeRegistry is a real registry that counts what is asked of it.
type fakeRegistry struct {
	host  string
	inner http.Handler

	mu     sync.Mutex
	asked  map[string]int // blobs by path
	ranges []string
	before func(w http.ResponseWriter, r *http.Request) (done bool)
}

func newRegistry(t testing.TB) *fakeRegistry {
	t.Helper()
	f := &fakeRegistry{inner: registry.New(registry.Logger(log.New(io.Discard, "", 0))), asked: map[string]int{}}
	srv := httptest.NewServer(f)
	t.Cleanup(srv.Close)
	f.host = strings.TrimPrefix(srv.URL, "http://")
	return f
}

func (f *fakeRegistry) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	before := f.before
	if r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/blobs/") {
		f.asked[r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:]]++
		if h := r.Header.Get("Range"); h != "" {
			f.ranges = append(f.ranges, h)
		}
	}
	f.mu.Unlock()
	if before != nil && before(w, r) {
		return
	}
	f.inner.ServeHTTP(w, r)
}

func (f *fakeRegistry) intercept(fn func(w http.ResponseWriter, r *http.Request) bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.before = fn
}

// times is how often the layers of an image were fetched, each.
func (f *fakeRegistry) times(t testing.TB, img v1.Image) (out []int) {
	t.Helper()
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, l := range layers {
		d, err := l.Digest()
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, f.asked[d.String()])
	}
	return out
}

// tarOf makes a tar: "name=content", or "name" for what has none.
func tarOf(t testing.TB, members ...string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, m := range members {
		n, body, _ := strings.Cut(m, "=")
		h := &tar.Header{Name: n, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(body))}
		if strings.HasSuffix(n, "/") {
			h.Typeflag, h.Mode = tar.TypeDir, 0o751
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, body); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// push puts an image of the layers into the registry.
func (f *fakeRegistry) push(t testing.TB, tag string, layers ...[]byte) (ref string, img v1.Image) {
	t.Helper()
	img = empty.Image
	for _, b := range layers {
		l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b)), nil })
		if err == nil {
			img, err = mutate.AppendLayers(img, l)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	cf, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	cf = cf.DeepCopy()
	cf.OS, cf.Architecture, cf.Config = "linux", runtime.GOARCH, v1.Config{Env: []string{"A=" + tag}, WorkingDir: "/w"}
	if img, err = mutate.ConfigFile(img, cf); err != nil {
		t.Fatal(err)
	}
	ref = f.host + "/" + tag
	r, err := name.ParseReference(ref)
	if err == nil {
		err = remote.Write(r, img)
	}
	if err != nil {
		t.Fatal(err)
	}
	return ref, img
}

func layout(t testing.TB, s *Store, ref string) string {
	t.Helper()
	lease := fmt.Sprint("look", time.Now().UnixNano())
	set, err := s.Acquire(context.Background(), lease, []dsec.LayerRef{dsec.LayerRef(ref)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Release(context.Background(), lease) })
	return stacked(t, set)
}

func TestEachLayerIsFetchedAndConvertedOnce(t *testing.T) {
	ctx, reg := context.Background(), newRegistry(t)
	base, tools := tarOf(t, "d/", "d/a=1", "gone=1"), tarOf(t, "d/", "d/tool=2")
	one, img1 := reg.push(t, "one:1", base, tools, tarOf(t), tarOf(t, ".wh.gone", "d/implied=3"))
	two, img2 := reg.push(t, "two:1", base, tools, tarOf(t, "x=4"), base)
	s := openStore(t, t.TempDir(), Options{})
	var last Progress
	info, err := s.Ensure(ctx, one, EnsureOptions{}, func(p Progress) { last = p })
	if err != nil {
		t.Fatal(err)
	}
	if len(info.Layers) != 3 || info.Config.Workdir != "/w" || last.Phase == "" {
		t.Errorf("%+v, %+v", info, last)
	}
	if got, want := layout(t, s, one), "d= d/a=1 d/implied=3 d/tool=2"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	other, err := s.Ensure(ctx, two, EnsureOptions{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	// The base that is there again on top counts there.
	if got, want := layout(t, s, two), "d= d/a=1 d/tool=2 gone=1 x=4"; got != want || len(other.Layers) != 3 {
		t.Errorf("%s of %d layers, want %s", got, len(other.Layers), want)
	}
	for _, img := range []v1.Image{img1, img2} {
		for i, n := range reg.times(t, img) {
			if n != 1 {
				t.Errorf("layer %d was fetched %d times", i, n)
			}
		}
	}
}

func TestATagWinsAndAReferenceMovesOnlyWhenAsked(t *testing.T) {
	ctx, reg := context.Background(), newRegistry(t)
	ref, _ := reg.push(t, "img:1", tarOf(t, "a=old"))
	s := openStore(t, t.TempDir(), Options{Grace: time.Nanosecond})
	first, err := s.Ensure(ctx, ref, EnsureOptions{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	collects(t, s, 0) // the reference keeps it
	reg.push(t, "img:1", tarOf(t, "a=new"))
	for _, age := range []time.Duration{-1, time.Hour} {
		if again, err := s.Ensure(ctx, ref, EnsureOptions{MaxAge: age}, nil); err != nil || again.Digest != first.Digest {
			t.Errorf("age %v: %s, %v", age, again.Digest, err)
		}
	}
	if got := layout(t, s, ref); got != "a=old" {
		t.Errorf("a creation: %s", got)
	}
	moved, err := s.Ensure(ctx, ref, EnsureOptions{MaxAge: time.Nanosecond}, nil)
	if err != nil || moved.Digest == first.Digest || layout(t, s, ref) != "a=new" {
		t.Errorf("%s, %v", moved.Digest, err)
	}
	if err := s.Tag(ctx, ref, first.Digest); err != nil {
		t.Fatal(err)
	}
	if tagged, err := s.Ensure(ctx, ref, EnsureOptions{}, nil); err != nil || tagged.Digest != first.Digest || layout(t, s, ref) != "a=old" {
		t.Errorf("a tag of the name: %s, %v", tagged.Digest, err)
	}
	if err := s.Remove(ctx, dsec.LayerRef(ref)); err != nil || layout(t, s, ref) != "a=new" {
		t.Errorf("without the tag: %v", err)
	}
	if err := s.Remove(ctx, dsec.LayerRef(ref)); err != nil {
		t.Error(err)
	}
	if err := s.Remove(ctx, dsec.LayerRef(ref)); !errors.Is(err, dsec.NotFound.Err()) {
		t.Errorf("without the reference: %v", err)
	}
}

func TestManyCallersShareOneJob(t *testing.T) {
	ctx, reg := context.Background(), newRegistry(t)
	ref, img := reg.push(t, "img:1", tarOf(t, "a="+varied()), tarOf(t, "b=1"))
	s := openStore(t, t.TempDir(), Options{})
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			if _, err := s.Ensure(ctx, ref, EnsureOptions{MaxAge: time.Minute}, nil); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for i, n := range reg.times(t, img) {
		if n != 1 {
			t.Errorf("layer %d was fetched %d times", i, n)
		}
	}
	if len(s.makings) != 0 || s.queue.running != 0 || s.slots.n != 0 || s.slots.bytes != 0 {
		t.Errorf("left: %v %+v %+v", s.makings, s.queue.running, s.slots.n)
	}
}

func TestWhatIsWrongWithAnImageIsSaid(t *testing.T) {
	ctx, reg := context.Background(), newRegistry(t)
	ref, _ := reg.push(t, "img:1", []byte("not a tar, and not short enough to be nothing at all, so it is an error of the source"+strings.Repeat("x", 600)))
	s := openStore(t, t.TempDir(), Options{})
	for source, class := range map[string]dsec.Class{
		ref: dsec.Invalid, reg.host + "/none:1": dsec.NotFound, "127.0.0.1:1/x:1": dsec.Unavailable, "UPPER CASE": dsec.Invalid,
	} {
		cctx, cancel := context.WithTimeout(ctx, 30*time.Second)
		if _, err := s.Ensure(cctx, source, EnsureOptions{}, nil); dsec.ClassOf(err) != class {
			t.Errorf("%s: %v, want %s", source, err, class)
		}
		cancel()
	}
}

// TestE28_RateLimitHoldsForAllRequests: one 429 makes every request to the
// registry wait, those for other layers and images among them.
func TestE28_RateLimitHoldsForAllRequests(t *testing.T) {
	ctx, reg := context.Background(), newRegistry(t)
	ref, _ := reg.push(t, "img:1", tarOf(t, "a=1"), tarOf(t, "b=1"), tarOf(t, "c=1"), tarOf(t, "d=1"))
	var mu sync.Mutex
	var until time.Time
	limited, early := 0, 0
	reg.intercept(func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.Contains(r.URL.Path, "/blobs/") {
			return false
		}
		mu.Lock()
		defer mu.Unlock()
		if limited == 0 {
			limited, until = 1, time.Now().Add(900*time.Millisecond)
			w.Header().Set("Retry-After", "1")
			w.WriteHeader(http.StatusTooManyRequests)
			return true
		}
		if time.Now().Before(until) {
			early++
		}
		return false
	})
	s := openStore(t, t.TempDir(), Options{Layers: 4})
	if _, err := s.Ensure(ctx, ref, EnsureOptions{Image: image.Options{}}, nil); err != nil {
		t.Fatal(err)
	}
	if limited != 1 || early > 3 { // those that were on their way
		t.Errorf("%d times limited, %d requests came too early", limited, early)
	}
}

// mustLayer is the last layer of an image.
func mustLayer(t testing.TB, img v1.Image) v1.Layer {
	t.Helper()
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	return layers[len(layers)-1]
}
