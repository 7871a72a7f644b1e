package store

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/opendsec/dsec/blob/bucket"
)

const ensureDir, ensureRef = "DSEC_TEST_ENSURE_DIR", "DSEC_TEST_ENSURE_REF"

// ensureChild makes an image known until it is killed.
func ensureChild(dir string) {
	ctx := context.Background()
	blobs, err := bucket.Open(ctx, "file://"+filepath.Join(dir, "blobs"))
	var s *Store
	if err == nil {
		s, err = Open(filepath.Join(dir, "one"), Options{Blobs: blobs, ClaimTTL: time.Second, Layers: 4})
	}
	if err == nil {
		_, err = s.Ensure(ctx, os.Getenv(ensureRef), EnsureOptions{}, nil)
	}
	fmt.Println("ended:", err)
	os.Exit(1)
}

// noise is content that does not compress.
func noise(n int) string {
	r := rand.New(rand.NewPCG(1, uint64(n)))
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return string(b)
}

func TestTwoMachinesConvertEachLayerOnce(t *testing.T) {
	ctx, reg, dir := context.Background(), newRegistry(t), t.TempDir()
	ref, img := reg.push(t, "img:1", tarOf(t, "a="+noise(3<<20)), tarOf(t, "b="+noise(1<<20), "gone=1"), tarOf(t, ".wh.gone", "d/implied=1"))
	var wg sync.WaitGroup
	var got [2]string
	for i := range got {
		s := openStore(t, filepath.Join(dir, fmt.Sprint(i)), Options{Blobs: openBucket(t, filepath.Join(dir, "blobs")), ClaimTTL: 3 * time.Second})
		wg.Go(func() {
			info, err := s.Ensure(ctx, ref, EnsureOptions{}, nil)
			if err != nil {
				t.Error(err)
			}
			got[i] = string(info.Digest)
			s.wg.Wait()
		})
	}
	wg.Wait()
	if got[0] != got[1] {
		t.Errorf("the machines made %v", got)
	}
	for i, n := range reg.times(t, img) {
		if n != 1 {
			t.Errorf("layer %d was fetched %d times", i, n)
		}
	}
	left, err := filepath.Glob(filepath.Join(dir, "blobs", "claims", "*", "*"))
	if err != nil || len(left) > 0 {
		t.Errorf("claims stay: %v, %v", left, err)
	}
}

// TestWhoConvertsIsKilled: what was finished is not done again, another machine
// takes over, and the same one goes on with its download where it broke.
func TestWhoConvertsIsKilled(t *testing.T) {
	for name, after := range map[string]string{"another takes over": "two", "the same goes on": "one"} {
		t.Run(name, func(t *testing.T) { killConverter(t, after) })
	}
}

func killConverter(t *testing.T, after string) {
	ctx, reg, dir := context.Background(), newRegistry(t), t.TempDir()
	ref, img := reg.push(t, "img:1", tarOf(t, "small=1"), tarOf(t, "large="+noise(8<<20)))
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	large, err := layers[1].Digest()
	if err != nil {
		t.Fatal(err)
	}
	stuck := make(chan struct{})
	var once sync.Once
	reg.intercept(func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.HasSuffix(r.URL.Path, large.String()) || r.Method != http.MethodGet {
			return false
		}
		rec := httptest.NewRecorder() // half of it, and then nothing
		reg.inner.ServeHTTP(rec, r)
		w.Header().Set("Content-Length", fmt.Sprint(rec.Body.Len()))
		if _, err := w.Write(rec.Body.Bytes()[:rec.Body.Len()/2]); err != nil {
			return true
		}
		w.(http.Flusher).Flush()
		once.Do(func() { close(stuck) })
		<-r.Context().Done()
		return true
	})
	child := startEnsure(t, dir, ref)
	<-stuck
	// The half that came is in the partial file when what was sent was read.
	part := filepath.Join(dir, "one", "parts", large.Hex)
	until(t, "half of the layer", func() bool {
		st, err := os.Stat(part)
		return err == nil && st.Size() >= 4<<20
	})
	until(t, "the small layer to be shared", func() bool {
		notes, err := filepath.Glob(filepath.Join(dir, "blobs", "oci", "*"))
		return err == nil && len(notes) >= 2
	})
	if err := child.Process.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	_ = child.Wait() // killed
	reg.intercept(nil)
	two := openStore(t, filepath.Join(dir, after), Options{Blobs: openBucket(t, filepath.Join(dir, "blobs")), ClaimTTL: time.Second})
	waited := false
	if _, err := two.Ensure(ctx, ref, EnsureOptions{}, func(p Progress) { waited = waited || p.Phase == "wait" }); err != nil {
		t.Fatal(err)
	}
	if same := after == "one"; waited == same || (len(reg.ranges) == 1) != same {
		t.Errorf("waited %t for the claim of the dead, ranges %v", waited, reg.ranges)
	}
	if n := reg.times(t, img); n[0] != 1 || n[1] != 2 {
		t.Errorf("fetched %v times, want 1 and 2", n)
	}
	two.wg.Wait()
	if got := layout(t, two, ref); !strings.Contains(got, "small=1") {
		t.Errorf("%.100s", got)
	}
}

func TestADownloadGoesOnWhereItBroke(t *testing.T) {
	ctx, reg, dir := context.Background(), newRegistry(t), t.TempDir()
	ref, img := reg.push(t, "img:1", tarOf(t, "large="+noise(8<<20)))
	s := openStore(t, dir, Options{})
	broken := 0
	reg.intercept(func(w http.ResponseWriter, r *http.Request) bool { // the layer breaks off twice
		if r.Method != http.MethodGet || !strings.Contains(r.URL.Path, "/blobs/") || broken == 2 {
			return false
		}
		rec := httptest.NewRecorder()
		reg.inner.ServeHTTP(rec, r)
		if rec.Body.Len() < 1<<20 { // the config
			return false
		}
		broken++
		for k, v := range rec.Header() {
			w.Header()[k] = v
		}
		w.Header().Set("Content-Length", fmt.Sprint(rec.Body.Len()))
		w.WriteHeader(rec.Code)
		_, _ = w.Write(rec.Body.Bytes()[:rec.Body.Len()/2]) // the client may be gone
		panic(http.ErrAbortHandler)
	})
	if _, err := s.Ensure(ctx, ref, EnsureOptions{}, nil); err != nil {
		t.Fatal(err)
	}
	if len(reg.ranges) != 2 || broken != 2 || reg.times(t, img)[0] != 3 {
		t.Errorf("broke %d times, ranges %v", broken, reg.ranges)
	}
	// What a power failure made of a partial file is not believed.
	ref, img = reg.push(t, "img:2", tarOf(t, "large="+noise(4<<20)))
	d, err := mustLayer(t, img).Digest()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(s.path("parts", d.Hex), make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Ensure(ctx, ref, EnsureOptions{}, nil); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(s.path("parts")); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
	// One that nobody goes on with is collected.
	if err := os.WriteFile(s.path("parts", d.Hex), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, grace := range []time.Duration{time.Hour, 1} {
		s.opts.Grace = grace
		if _, err := s.Collect(ctx, false); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(s.path("parts", d.Hex)); os.IsNotExist(err) != (grace == 1) {
			t.Errorf("grace %v: %v", grace, err)
		}
	}
}

func startEnsure(t testing.TB, dir, ref string) *exec.Cmd {
	t.Helper()
	if err := os.MkdirAll(filepath.Join(dir, "blobs"), 0o755); err != nil {
		t.Fatal(err)
	}
	child := exec.Command("/proc/self/exe")
	child.Env = append(os.Environ(), ensureDir+"="+dir, ensureRef+"="+ref)
	child.Stdout, child.Stderr = os.Stderr, os.Stderr
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = child.Process.Kill() })
	return child
}

// until waits for something another process does.
func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("no ", what)
		}
	}
}

func FuzzDecodeNote(f *testing.F) {
	f.Add([]byte(`{"version":1,"layer":"sha256:` + strings.Repeat("0a", 32) + `","loose":true}`))
	f.Add([]byte(`{"version":1,"layer":"sha256:../../escape"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := decodeNote(b)
		if err == nil && (c.Version != 1 || c.Layer != "" && len(c.Layer) != 71) {
			t.Errorf("accepted %+v", c)
		}
	})
}
