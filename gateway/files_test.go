package gateway_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/files"
)

// pattern makes a long stream without holding it.
type pattern struct {
	left int64
	sum  hash.Hash
}

func (p *pattern) Read(b []byte) (int, error) {
	if p.left == 0 {
		return 0, io.EOF
	}
	n := copy(b, bytes.Repeat([]byte(fmt.Sprintf("%d left\n", p.left)), 256))
	n = int(min(int64(n), p.left))
	p.sum.Write(b[:n])
	p.left -= int64(n)
	return n, nil
}

func TestFilesGoThroughUnchanged(t *testing.T) {
	e := start(t)
	c, ctx := e.local(), t.Context()
	sb := e.sandbox(c)
	f := c.Files(sb.ID, "")
	for _, size := range []int64{0, 17 << 10, 18 << 10, 19 << 10, 50 << 20} {
		in := &pattern{left: size, sum: sha256.New()}
		path := fmt.Sprintf("/tmp/up %d", size)
		info, err := f.Write(ctx, path, in, files.WriteOptions{})
		if err != nil || info.Size != size {
			t.Fatalf("%+v, %v", info, err)
		}
		out := sha256.New()
		n, err := f.Read(ctx, path, 0, -1, out)
		if err != nil || n != size || !bytes.Equal(out.Sum(nil), in.sum.Sum(nil)) {
			t.Fatalf("%d bytes of %d, %v", n, size, err)
		}
	}
	var part bytes.Buffer
	if _, err := f.Write(ctx, "/tmp/r", strings.NewReader("0123456789"), files.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Read(ctx, "/tmp/r", 3, 4, &part); err != nil || part.String() != "3456" {
		t.Fatalf("%q, %v", part.String(), err)
	}
}

func TestFileErrorsKeepTheirClass(t *testing.T) {
	e := start(t)
	c, ctx := e.local(), t.Context()
	sb := e.sandbox(c)
	f := c.Files(sb.ID, "")
	_, err := f.Read(ctx, "/etc", 0, -1, io.Discard)
	wantClass(t, err, dsec.IsADirectory)
	_, err = f.Read(ctx, "/tmp/https:/x/…%C5%82", 0, -1, io.Discard)
	wantClass(t, err, dsec.FileNotFound)
	_, err = f.Write(ctx, "/etc", strings.NewReader("x"), files.WriteOptions{})
	wantClass(t, err, dsec.IsADirectory)
	_, err = f.Write(ctx, "/tmp/sum", strings.NewReader("x"), files.WriteOptions{SHA256: strings.Repeat("0", 64)})
	wantClass(t, err, dsec.Corrupt)
	_, err = f.Stat(ctx, "/tmp/sum", false)
	wantClass(t, err, dsec.FileNotFound)
	must(t, f.Mkdir(ctx, "/tmp/a/b", 0o755, true))
	wantClass(t, f.Mkdir(ctx, "/tmp/a/b", 0o755, false), dsec.FileExists)
	must(t, f.Move(ctx, "/tmp/a/b", "/tmp/a/c"))
	list, err := f.List(ctx, "/tmp/a", 1)
	if err != nil || len(list) != 1 || list[0].Path != "/tmp/a/c" {
		t.Fatal(list, err)
	}
	must(t, f.Remove(ctx, "/tmp/a", true))
}

// An upload that breaks off replaces nothing.
func TestBrokenUploadReplacesNothing(t *testing.T) {
	e := start(t)
	c, ctx := e.local(), t.Context()
	sb := e.sandbox(c)
	f := c.Files(sb.ID, "")
	_, err := f.Write(ctx, "/tmp/f", strings.NewReader("old"), files.WriteOptions{})
	must(t, err)
	r := io.MultiReader(strings.NewReader(strings.Repeat("n", 1<<20)), broken{})
	if _, err = f.Write(ctx, "/tmp/f", r, files.WriteOptions{}); err == nil {
		t.Fatal("a broken upload succeeded")
	}
	var got bytes.Buffer
	if _, err := f.Read(ctx, "/tmp/f", 0, -1, &got); err != nil || got.String() != "old" {
		t.Fatalf("%q, %v", got.String()[:min(10, got.Len())], err)
	}
}

type broken struct{}

func (broken) Read([]byte) (int, error) { return 0, fmt.Errorf("the disk of the caller broke") }

func TestTreesGoThroughAsTar(t *testing.T) {
	e := start(t)
	c, ctx := e.local(), t.Context()
	sb := e.sandbox(c)
	f := c.Files(sb.ID, "")
	_, err := f.Write(ctx, "/tmp/t/x/y", strings.NewReader("hello"), files.WriteOptions{Parents: true})
	must(t, err)
	var tar bytes.Buffer
	must(t, f.Download(ctx, "/tmp/t", &tar, files.TreeOptions{}))
	must(t, f.Mkdir(ctx, "/tmp/u", 0o755, true))
	must(t, f.Upload(ctx, "/tmp/u", bytes.NewReader(tar.Bytes()), files.TreeOptions{}))
	var got bytes.Buffer
	if _, err := f.Read(ctx, "/tmp/u/x/y", 0, -1, &got); err != nil || got.String() != "hello" {
		t.Fatalf("%q, %v", got.String(), err)
	}
	wantClass(t, f.Download(ctx, "/nope", io.Discard, files.TreeOptions{}), dsec.FileNotFound)
}

// sink takes and gives bytes without keeping any, and notes the largest heap.
type sink struct {
	files.FS
	heap atomic.Uint64
}

func (s *sink) look() {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	if m.HeapInuse > s.heap.Load() {
		s.heap.Store(m.HeapInuse)
	}
}

func (s *sink) Write(_ context.Context, path string, r io.Reader, _ files.WriteOptions) (files.Info, error) {
	half, err := io.CopyN(io.Discard, r, 48<<20)
	if err != nil {
		return files.Info{}, err
	}
	s.look()
	rest, err := io.Copy(io.Discard, r)
	s.look()
	return files.Info{Path: path, Size: half + rest}, err
}

func (s *sink) Read(_ context.Context, _ string, _, length int64, w io.Writer) (int64, error) {
	half, err := io.CopyN(w, zeros{}, length/2)
	s.look()
	if err != nil {
		return half, err
	}
	rest, err := io.CopyN(w, zeros{}, length-length/2)
	s.look()
	return half + rest, err
}

func TestLargeFilesStreamInConstantMemory(t *testing.T) {
	e := start(t)
	s := &sink{}
	e.node.fs = s
	c := e.local()
	sb := e.sandbox(c)
	runtime.GC()
	var before runtime.MemStats
	runtime.ReadMemStats(&before)
	const size = 96 << 20
	info, err := c.Files(sb.ID, "").Write(t.Context(), "/f", io.LimitReader(zeros{}, size), files.WriteOptions{})
	if err != nil || info.Size != size {
		t.Fatal(info, err)
	}
	if n, err := c.Files(sb.ID, "").Read(t.Context(), "/f", 0, size, io.Discard); err != nil || n != size {
		t.Fatal(n, err)
	}
	if grew := int64(s.heap.Load()) - int64(before.HeapInuse); grew > 32<<20 {
		t.Fatalf("client, gateway and node grew by %d bytes", grew)
	}
}

func TestAWatchSaysWhenItIsInPlace(t *testing.T) {
	e := start(t)
	root := t.TempDir()
	local, err := files.NewLocal(root)
	must(t, err)
	defer local.Close()
	e.node.fs = local
	sb := e.sandbox(e.local())
	enough := errors.New("enough")
	var seen []files.Change
	err = e.local().Files(sb.ID, "").Watch(t.Context(), "/", false, func(c files.Change) error {
		seen = append(seen, c)
		if c.Op == files.OpWatching {
			return os.Mkdir(filepath.Join(root, "made"), 0o755) // once: it is seen
		}
		return enough
	})
	if want := []files.Change{{Path: "/", Op: files.OpWatching}, {Path: "/made", Op: files.OpCreate}}; err != enough || !slices.Equal(seen, want) {
		t.Fatalf("%v, %v, want %v", seen, err, want)
	}
}
