package worker

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/zstd"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/internal/cgroup"
)

func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == Verb {
		os.Exit(Main())
	}
	os.Exit(m.Run())
}

func newWorker(t testing.TB, opts Options) *Worker {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("control groups and users need root: uid is", os.Geteuid())
	}
	root, err := cgroup.Open(fmt.Sprintf("worker%d", time.Now().UnixNano()%1e12))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(root.RemoveAll(context.Background()), root.Close()); err != nil {
			t.Error(err)
		}
	})
	opts.Cgroups = root
	return New(opts)
}

func files(t testing.TB) image.Files {
	t.Helper()
	d := t.TempDir()
	open := func(name string) *os.File {
		f, err := os.OpenFile(filepath.Join(d, name), os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		return f
	}
	return image.Files{Meta: open("meta"), Data: open("data"), Scratch: open("scratch")}
}

func locate(t testing.TB, source string) image.Location {
	t.Helper()
	l, err := image.Locate(source)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// tarFile writes a tar with one file of n bytes, made by fill.
func tarBytes(t testing.TB, name string, n int64) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Size: n, Mode: 0o644}); err != nil {
		t.Fatal(err)
	}
	if _, err := io.CopyN(w, zero{}, n); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

type zero struct{}

func (zero) Read(p []byte) (int, error) { clear(p); return len(p), nil }

func put(t testing.TB, b []byte) string {
	t.Helper()
	p := filepath.Join(t.TempDir(), "source")
	if err := os.WriteFile(p, b, 0o600); err != nil { // only this user may read it
		t.Fatal(err)
	}
	return p
}

func TestWorkerConvertsAFileOnlyTheCallerMayRead(t *testing.T) {
	w := newWorker(t, Options{})
	f := files(t)
	res, err := w.Convert(context.Background(), locate(t, put(t, tarBytes(t, "a", 100))), f, image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if st, err := f.Meta.Stat(); err != nil || st.Size() != res.MetaSize || res.Entries != 2 {
		t.Errorf("%+v, %v", res, err)
	}
}

func TestWorkerPullsThroughTheNetwork(t *testing.T) {
	srv := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	defer srv.Close()
	img := v1.Image(empty.Image)
	img, err := mutate.AppendLayers(img, static.NewLayer(tarBytes(t, "a", 10), types.OCIUncompressedLayer))
	if err != nil {
		t.Fatal(err)
	}
	cf, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	cf = cf.DeepCopy()
	cf.OS, cf.Architecture = "linux", runtime.GOARCH
	if img, err = mutate.ConfigFile(img, cf); err != nil {
		t.Fatal(err)
	}
	src := strings.TrimPrefix(srv.URL, "http://") + "/x:1"
	ref, err := name.ParseReference(src)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(ref, img); err != nil {
		t.Fatal(err)
	}
	w := newWorker(t, Options{})
	res, err := w.Convert(context.Background(), locate(t, "docker://"+src), files(t), image.Options{})
	if err != nil || res.Entries != 2 || res.Config == nil {
		t.Errorf("%+v, %v", res, err)
	}
	_, err = w.Convert(context.Background(), locate(t, "docker://"+src+"nope"), files(t), image.Options{})
	if !errors.Is(err, dsec.NotFound.Err()) {
		t.Errorf("a tag that is not there: %v", err)
	}
}

// TestBombCostsAJob: a small file that unpacks to more than its caps, and one
// with more names than its memory, end as errors of the source.
func TestBombCostsAJob(t *testing.T) {
	var b bytes.Buffer
	z, err := zstd.NewWriter(&b)
	if err != nil {
		t.Fatal(err)
	}
	tw := tar.NewWriter(z)
	if err := tw.WriteHeader(&tar.Header{Name: "zeros", Typeflag: tar.TypeReg, Size: 1 << 40, Mode: 0o644, Format: tar.FormatPAX}); err != nil {
		t.Fatal(err)
	}
	if _, err := io.CopyN(tw, zero{}, 160<<20); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	w := newWorker(t, Options{Memory: 40 << 20})
	bomb := put(t, b.Bytes())
	if _, err := w.Convert(context.Background(), locate(t, bomb), files(t), image.Options{}); !errors.Is(err, dsec.Invalid.Err()) {
		t.Errorf("bytes: %v", err)
	}
	b.Reset()
	z.Reset(&b)
	tw = tar.NewWriter(z)
	for i := range 400_000 {
		if err := tw.WriteHeader(&tar.Header{Name: fmt.Sprintf("f%d", i), Typeflag: tar.TypeReg, Mode: 0o644}); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(tw.Close(), z.Close()); err != nil {
		t.Fatal(err)
	}
	names := put(t, b.Bytes())
	_, err = w.Convert(context.Background(), locate(t, names), files(t), image.Options{MaxRatio: 1 << 40})
	if !errors.Is(err, dsec.Invalid.Err()) || !strings.Contains(err.Error(), "memory") {
		t.Errorf("names: %v", err)
	}
}

// status describes the child of this process that runs as the user, once there
// is one.
func status(ctx context.Context, uid int) string {
	for ctx.Err() == nil {
		procs, _ := filepath.Glob("/proc/[0-9]*/status")
		for _, p := range procs {
			b, err := os.ReadFile(p)
			if err != nil || !strings.Contains(string(b), fmt.Sprintf("PPid:\t%d\n", os.Getpid())) ||
				!strings.Contains(string(b), fmt.Sprintf("Uid:\t%[1]d\t%[1]d\t%[1]d\t%[1]d\n", uid)) {
				continue
			}
			out := string(b)
			ours, _ := os.Readlink("/proc/self/ns/net")
			if theirs, err := os.Readlink(filepath.Join(filepath.Dir(p), "ns/net")); err == nil && theirs != ours {
				out += "other network\n"
			}
			if names, err := os.ReadDir(filepath.Join(filepath.Dir(p), "root") + "/"); err == nil && len(names) == 0 {
				out += "empty root\n"
			}
			return out
		}
	}
	return "no such process"
}

func TestCancelEndsTheWorker(t *testing.T) {
	w := newWorker(t, Options{})
	r, wr, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer wr.Close()
	f := files(t)
	f.Input = r // never ends
	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	start := time.Now()
	looked := make(chan string, 1)
	go func() { looked <- status(ctx, w.opts.UID) }()
	defer func() {
		got := <-looked
		for _, want := range []string{"CapEff:\t0000000000000000", "CapPrm:\t0000000000000000", "Groups:\t \n", "other network", "empty root"} {
			if !strings.Contains(got, want) {
				t.Errorf("worker: no %q in\n%s", want, got)
			}
		}
	}()
	_, err = w.Convert(ctx, image.Location{Source: "pipe", Kind: image.KindFile, Tar: true}, f, image.Options{})
	if !errors.Is(err, dsec.Timeout.Err()) || time.Since(start) > 10*time.Second {
		t.Errorf("after %v: %v", time.Since(start), err)
	}
}
