package store

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/layer"
)

func openStore(t testing.TB, dir string, opts Options) *Store {
	t.Helper()
	s, err := Open(dir, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func tree(t testing.TB, files map[string]string) string {
	t.Helper()
	d := t.TempDir()
	for name, body := range files {
		p := filepath.Join(d, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(body), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return d
}

func TestLeaseSurvivesRestartAndATagThatMoves(t *testing.T) {
	ctx, dir := context.Background(), t.TempDir()
	s := openStore(t, dir, Options{})
	one, err := s.Import(ctx, tree(t, map[string]string{"a/b": "one"}), "base:1", image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	set, err := s.Acquire(ctx, "sb1", []dsec.LayerRef{"base:1"})
	if err != nil {
		t.Fatal(err)
	}
	if len(set.Layers) != 1 || set.Layers[0].Digest != one.Digest || set.Layers[0].Data == "" {
		t.Fatalf("set: %+v", set)
	}
	two, err := s.Import(ctx, tree(t, map[string]string{"a/b": "two"}), "base:1", image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if two.Digest == one.Digest {
		t.Fatal("different trees, one digest")
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = openStore(t, dir, Options{})
	set, err = s.Acquire(ctx, "sb1", []dsec.LayerRef{"base:1"})
	if err != nil || set.Layers[0].Digest != one.Digest {
		t.Errorf("after restart: %+v, %v", set, err)
	}
	if _, err := s.Acquire(ctx, "sb1", []dsec.LayerRef{dsec.LayerRef(two.Digest)}); !errors.Is(err, dsec.Conflict.Err()) {
		t.Errorf("other refs under one name: %v", err)
	}
	if _, err := s.Acquire(ctx, "sb2", []dsec.LayerRef{"nothing"}); !errors.Is(err, dsec.NotFound.Err()) {
		t.Errorf("unknown tag: %v", err)
	}
	names, err := s.Leases(ctx)
	if err != nil || len(names) != 1 || names[0] != "sb1" {
		t.Errorf("leases: %v, %v", names, err)
	}
	if err := errors.Join(s.Release(ctx, "sb1"), s.Release(ctx, "sb1")); err != nil {
		t.Error(err)
	}
}

func TestOneOpener(t *testing.T) {
	dir := t.TempDir()
	openStore(t, dir, Options{})
	if _, err := Open(dir, Options{}); !errors.Is(err, dsec.Unavailable.Err()) {
		t.Errorf("second opener: %v", err)
	}
}

func TestConcurrentImportsConvertOnce(t *testing.T) {
	var calls atomic.Int32
	start := make(chan struct{})
	s := openStore(t, t.TempDir(), Options{Convert: func(ctx context.Context, l image.Location, f image.Files, o image.Options) (image.Result, error) {
		calls.Add(1)
		<-start
		return image.Convert(ctx, l, f, o)
	}})
	src := tree(t, map[string]string{"a": "1"})
	var wg sync.WaitGroup
	var digests sync.Map
	for i := range 8 {
		wg.Go(func() {
			info, err := s.Import(context.Background(), src, fmt.Sprint("t", i), image.Options{})
			if err != nil {
				t.Error(err)
			}
			digests.Store(info.Digest, true)
		})
	}
	for calls.Load() == 0 {
		runtime.Gosched()
	}
	close(start)
	wg.Wait()
	n := 0
	digests.Range(func(any, any) bool { n++; return true })
	tags, err := s.Tags(context.Background())
	// Those that came after the first was done convert again, and get the same.
	if n != 1 || len(tags) != 8 || calls.Load() == 8 || err != nil {
		t.Errorf("%d conversions, %d digests, %d tags, %v", calls.Load(), n, len(tags), err)
	}
}

func TestCollectSparesWhatIsKept(t *testing.T) {
	ctx := context.Background()
	s := openStore(t, t.TempDir(), Options{Grace: time.Hour})
	var infos []layer.Info
	for i, tag := range []string{"tagged", "", "", ""} {
		info, err := s.Import(ctx, tree(t, map[string]string{"a": fmt.Sprint(i)}), tag, image.Options{})
		if err != nil {
			t.Fatal(err)
		}
		infos = append(infos, info)
	}
	if _, err := s.Acquire(ctx, "sb", []dsec.LayerRef{dsec.LayerRef(infos[1].Digest)}); err != nil {
		t.Fatal(err)
	}
	old := time.Now().Add(-2 * time.Hour)
	for _, i := range infos[:3] {
		if err := os.Chtimes(s.path("layers", i.Digest.Hex()), old, old); err != nil {
			t.Fatal(err)
		}
	}
	for _, dry := range []bool{true, false} {
		gone, err := s.Collect(ctx, dry)
		if err != nil || len(gone) != 1 || gone[0].Digest != infos[2].Digest {
			t.Errorf("dry %v: %v, %v", dry, gone, err)
		}
	}
	all, err := s.List(ctx)
	if err != nil || len(all) != 3 {
		t.Errorf("%d layers left, %v", len(all), err)
	}
	if err := s.Remove(ctx, dsec.LayerRef(infos[1].Digest)); !errors.Is(err, dsec.IllegalState.Err()) {
		t.Errorf("remove of a leased layer: %v", err)
	}
	if err := errors.Join(s.Release(ctx, "sb"), s.Remove(ctx, dsec.LayerRef(infos[1].Digest)), s.Remove(ctx, "tagged")); err != nil {
		t.Error(err)
	}
	if all, err = s.List(ctx); err != nil || len(all) != 1 {
		t.Errorf("%d layers left, %v", len(all), err)
	}
	// A released layer is spared for a while: the next sandbox may want it.
	if e, err := s.Inspect(ctx, dsec.LayerRef(infos[3].Digest)); err != nil || time.Since(e.LastUse) > time.Minute {
		t.Errorf("%+v, %v", e, err)
	}
}

func TestNamesThatAreRefused(t *testing.T) {
	ctx := context.Background()
	s := openStore(t, t.TempDir(), Options{})
	src := tree(t, map[string]string{"a": "1"})
	for _, tag := range []string{"../x", ".", "a\x00", "a b", "sha256:abc", strings.Repeat("t", 129), "/a", "%"} {
		if _, err := s.Import(ctx, src, tag, image.Options{}); !errors.Is(err, dsec.Invalid.Err()) {
			t.Errorf("tag %q: %v", tag, err)
		}
	}
	for _, name := range []string{"", "../x", "a/b", ".", strings.Repeat("l", 129)} {
		if _, err := s.Acquire(ctx, name, nil); !errors.Is(err, dsec.Invalid.Err()) {
			t.Errorf("lease %q: %v", name, err)
		}
	}
	for _, ref := range []dsec.LayerRef{"sha256:../../etc", "../x", ""} {
		if _, err := s.Acquire(ctx, "sb", []dsec.LayerRef{ref}); !errors.Is(err, dsec.Invalid.Err()) {
			t.Errorf("ref %q: %v", ref, err)
		}
	}
	if _, err := s.Import(ctx, src, "example.com/team/base:1", image.Options{}); err != nil {
		t.Error(err)
	}
	if tags, err := s.Tags(ctx); err != nil || tags["example.com/team/base:1"] == "" {
		t.Errorf("%v, %v", tags, err)
	}
}

// TestConverterIsNotBelieved: what a converter that fell to its source wrote is
// looked at before the kernel sees it.
func TestConverterIsNotBelieved(t *testing.T) {
	s := openStore(t, t.TempDir(), Options{Convert: func(_ context.Context, _ image.Location, f image.Files, _ image.Options) (image.Result, error) {
		_, err := f.Meta.Write(bytes.Repeat([]byte{0xe2, 0xe1, 0xf5, 0xe0}, 4096))
		return image.Result{Entries: 7}, err
	}})
	if _, err := s.Import(context.Background(), tree(t, nil), "x", image.Options{}); !errors.Is(err, dsec.Corrupt.Err()) {
		t.Errorf("got %v", err)
	}
}

func TestTarBecomesALayer(t *testing.T) {
	ctx := context.Background()
	s := openStore(t, t.TempDir(), Options{})
	if _, err := s.Import(ctx, tree(t, map[string]string{"a": "base", "gone": "base", "d/low": "base", "keep": "base"}), "base", image.Options{}); err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range []*tar.Header{
		{Name: "a", Typeflag: tar.TypeReg, Size: 3, Mode: 0o644},
		{Name: "d/", Typeflag: tar.TypeDir, Mode: 0o755},
		{Name: "new", Typeflag: tar.TypeReg, Size: 3, Mode: 0o644},
	} {
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if h.Size > 0 {
			if _, err := w.Write([]byte("top")); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	whole := bytes.Clone(b.Bytes())
	config := &image.Config{Env: []string{"A=1", "BAD=\xff"}, Workdir: "/w"}
	if _, err := s.ImportTar(ctx, Tar{R: &b, Name: "tools", Config: config}, "top", image.Options{KeepWhiteouts: true}); err != nil {
		t.Fatal(err)
	}
	set, err := s.Acquire(ctx, "sb", []dsec.LayerRef{"base", "top"})
	if err != nil {
		t.Fatal(err)
	}
	if set.Config.Workdir != "/w" || set.Layers[1].Source != "tools" {
		t.Errorf("%+v", set)
	}
	got := stacked(t, set)
	if want := "a=top d= d/low=base gone=base keep=base new=top"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	broken := io.MultiReader(bytes.NewReader(whole[:1024]), iotest.ErrReader(errors.New("client went away")))
	if _, err := s.ImportTar(ctx, Tar{R: broken, Name: "x"}, "", image.Options{}); err == nil || !strings.Contains(err.Error(), "client went away") {
		t.Errorf("a stream that breaks: %v", err)
	}
}

// TestE20_ALayerMergesIntoDirectories: a layer built at a path adds to the
// directory that the base has there.
func TestE20_ALayerMergesIntoDirectories(t *testing.T) {
	EachWay(t, func(t testing.TB) {
		ctx := context.Background()
		s := openStore(t, t.TempDir(), Options{})
		if _, err := s.Import(ctx, tree(t, map[string]string{"work/a": "base", "work/b": "base"}), "base", image.Options{}); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Import(ctx, tree(t, map[string]string{"b": "ws", "c": "ws"}), "ws", image.Options{At: "/work"}); err != nil {
			t.Fatal(err)
		}
		set, err := s.Acquire(ctx, "sb", []dsec.LayerRef{"base", "ws"})
		if err != nil {
			t.Fatal(err)
		}
		if got, want := stacked(t, set), "work= work/a=base work/b=ws work/c=ws"; got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	})
}

// EachWay runs a test over layers whose data come to their mounts in every way,
// Device is what a layer is to be mounted with: see ondemandtest.
var (
	EachWay func(*testing.T, func(testing.TB))
	Device  func(t testing.TB, meta, data string) string
)

// stacked mounts a set as a sandbox would see it and lists it.
func stacked(t testing.TB, set layer.Set) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root: uid is", os.Geteuid())
	}
	var lowers []string
	for _, l := range set.Layers {
		opts := ""
		if l.Data != "" {
			opts = "device=" + Device(t, l.Meta, l.Data)
		}
		lowers = append([]string{mount(t, l.Meta, "erofs", opts)}, lowers...)
	}
	root := lowers[0]
	if len(lowers) > 1 {
		root = mount(t, "overlay", "overlay", "lowerdir="+strings.Join(lowers, ":"))
	}
	var out []string
	err := filepath.WalkDir(root, func(p string, d os.DirEntry, err error) error {
		if err != nil || p == root {
			return err
		}
		b := []byte{}
		if !d.IsDir() {
			if b, err = os.ReadFile(p); err != nil {
				return err
			}
		}
		rel, _ := filepath.Rel(root, p)
		out = append(out, rel+"="+string(b))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(out, " ")
}

func mount(t testing.TB, source, kind, opts string) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount(source, dir, kind, unix.MS_RDONLY|unix.MS_NODEV, opts); err != nil {
		t.Fatalf("mount %s: %v", source, err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error("unmount:", err)
		}
	})
	return dir
}
