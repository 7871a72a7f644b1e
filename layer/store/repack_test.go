package store

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/image/erofs"
	"github.com/opendsec/dsec/layer"
)

// mixed is a tree of small and large files, a hole, hard links and attributes.
func mixed(t testing.TB) string {
	t.Helper()
	r := rand.New(rand.NewPCG(1, 1))
	noise := func(n int) string {
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(r.Uint32())
		}
		return string(b)
	}
	files := map[string]string{"lib/big": noise(12 << 20), "lib/other": noise(3 << 20), "hole": varied(), "empty": ""}
	for i := range 200 {
		files[fmt.Sprintf("small/%03d", i)] = noise(1 + r.IntN(40<<10))
	}
	d := tree(t, files)
	for _, err := range []error{os.Link(d+"/small/007", d+"/again"), os.Symlink("small/001", d+"/link"),
		unix.Setxattr(d+"/small/010", "user.note", []byte("kept"), 0), os.Chmod(d+"/small/011", 0o4750)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	return d
}

func imageOf(t testing.TB, s *Store, d layer.Digest) *erofs.Image {
	t.Helper()
	meta, err := os.Open(s.path("layers", d.Hex(), layer.MetaFile))
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.Open(s.path("layers", d.Hex(), layer.DataFile))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { meta.Close(); data.Close() })
	st, err := meta.Stat()
	if err != nil {
		t.Fatal(err)
	}
	im, err := erofs.Open(meta, st.Size(), data)
	if err != nil {
		t.Fatal(err)
	}
	return im
}

// describe says all that a sandbox could see of a tree, holes too.
func describe(t testing.TB, im *erofs.Image) string {
	t.Helper()
	var out strings.Builder
	first := map[uint64]string{}
	err := im.Walk(func(path string, n *erofs.Node) error {
		xs, err := n.Xattrs()
		if err != nil {
			return err
		}
		what := ""
		switch n.Mode & erofs.TypeMask {
		case erofs.TypeRegular:
			c, err := n.Contents()
			if err != nil {
				return err
			}
			h := sha256.New()
			if _, err := io.Copy(h, c); err != nil {
				return err
			}
			runs, err := n.Runs()
			if err != nil {
				return err
			}
			blocks := uint32(0)
			for _, r := range runs {
				blocks += r.Count
			}
			what = fmt.Sprintf("%x, %d blocks", h.Sum(nil), blocks)
		case erofs.TypeSymlink:
			if what, err = n.Target(); err != nil {
				return err
			}
		}
		if first[n.NID] == "" {
			first[n.NID] = path
		}
		_, err = fmt.Fprintf(&out, "%s = %s: %o %d:%d %d.%09d %d links %d bytes %q %s\n", path, first[n.NID], n.Mode, n.UID, n.GID, n.Mtime, n.Nsec, n.Nlink, n.Size, xs, what)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out.String()
}

// traceFiles is a trace of whole files, and of parts of the large one.
func traceFiles(t testing.TB, im *erofs.Image, d layer.Digest, names ...string) layer.Trace {
	t.Helper()
	where := map[string][]erofs.Run{}
	err := im.Walk(func(path string, n *erofs.Node) (err error) {
		if n.Mode&erofs.TypeMask == erofs.TypeRegular {
			where[path], err = n.Runs()
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	var ranges []layer.Range
	for _, name := range names {
		for _, r := range where[name] {
			at := layer.Range{Off: int64(r.Block) * erofs.BlockSize, Len: int64(r.Count) * erofs.BlockSize}
			if name == "lib/big" {
				for i := range int64(20) {
					ranges = append(ranges, layer.Range{Off: at.Off + (19-i)*500<<10>>12<<12, Len: 8 << 10})
				}
				continue
			}
			ranges = append(ranges, at)
		}
	}
	return layer.TraceOf(d, time.Minute, ranges, true)
}

// TestRepackKeepsTheTree: another digest, another order, the same tree; its
// expected part is one row, in packs of its own; the trace comes with it.
func TestRepackKeepsTheTree(t *testing.T) {
	ctx := context.Background()
	blobs := openBucket(t, t.TempDir())
	s := openStore(t, t.TempDir(), Options{Blobs: blobs})
	old, err := s.Import(ctx, mixed(t), "base:1", image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	before := imageOf(t, s, old.Digest)
	tr := traceFiles(t, before, old.Digest, "small/100", "lib/big", "small/007", "small/050", "hole")
	tracedFiles(t, s, tr)
	info, err := s.Repack(ctx, "base:1", tr)
	if err != nil {
		t.Fatal(err)
	}
	if info.Digest == old.Digest || info.Source != RepackedFrom+string(old.Digest) || !info.Image || info.Entries != old.Entries || info.DataSize != old.DataSize {
		t.Errorf("%+v, was %+v", info, old)
	}
	if err := errors.Join(s.Verify(ctx, dsec.LayerRef(info.Digest)), imageOf(t, s, info.Digest).Check()); err != nil {
		t.Error(err)
	}
	if got, want := describe(t, imageOf(t, s, info.Digest)), describe(t, before); got != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
	moved, err := s.Trace(ctx, info.Digest)
	if err != nil || moved.Bytes() != tr.Bytes() || moved.Recordings != 1 {
		t.Fatalf("%+v, %v", moved, err)
	}
	end := int64(0)
	for i, r := range moved.Ranges() {
		end = max(end, r.Off+r.Len)
		if i == 0 && r.Off != 0 {
			t.Errorf("the first read is at %d", r.Off)
		}
	}
	if most := tr.Bytes() + 20*(32<<10); end > most {
		t.Errorf("what is expected ends at %d, it is %d bytes", end, tr.Bytes())
	}
	ownPacks(t, s, old.Digest, info.Digest, end)
	if tag, err := s.Inspect(ctx, "base:1"); err != nil || tag.Digest != old.Digest {
		t.Errorf("the tag moved: %+v, %v", tag, err)
	}
	again, err := s.Repack(ctx, "base:1", tr)
	if err != nil || again.Digest != info.Digest {
		t.Errorf("a second time: %+v, %v", again, err)
	}
}

// tracedFiles: the files of a trace are told in its order, with what was touched.
func tracedFiles(t *testing.T, s *Store, tr layer.Trace) {
	t.Helper()
	for range 3 { // and one that reads something else, which is not expected
		if err := s.RecordTrace(context.Background(), tr.Layer, Recording{Ranges: tr.Ranges(), Ordered: true}); err != nil {
			t.Fatal(err)
		}
	}
	odd := traceFiles(t, imageOf(t, s, tr.Layer), tr.Layer, "lib/other")
	if err := s.RecordTrace(context.Background(), tr.Layer, Recording{Ranges: odd.Ranges()}); err != nil {
		t.Fatal(err)
	}
	all, files, err := s.TracedFiles(context.Background(), "base:1")
	if err != nil || all.Recordings != 4 {
		t.Fatalf("%+v, %v", all, err)
	}
	var names []string
	touched, expected := int64(0), int64(0)
	for _, f := range files {
		names = append(names, f.Path)
		touched, expected = touched+f.Touched, expected+f.Expected
	}
	if want := []string{"small/100", "lib/big", "again", "small/050", "hole", "lib/other"}; !slices.Equal(names, want) { // again is also small/007
		t.Errorf("%v, want %v", names, want)
	}
	if touched != all.Bytes() || expected != all.ExpectedBytes() || expected != tr.Bytes() {
		t.Errorf("%d and %d bytes, the trace has %d and %d", touched, expected, all.Bytes(), all.ExpectedBytes())
	}
	if big := files[1]; big.Touched != 20*8<<10 || big.Size != 12<<20 || big.Count != 3 || files[5].Expected != 0 || files[5].Count != 1 {
		t.Errorf("%+v %+v", big, files[5])
	}
}

// ownPacks: the first chunks are in packs that hold nothing else, back to back in
// order; of the others most are where they were.
func ownPacks(t *testing.T, s *Store, old, d layer.Digest, end int64) {
	t.Helper()
	read := func(d layer.Digest) layer.Index {
		m, err := s.manifest(d)
		if err != nil {
			t.Fatal(err)
		}
		raw, err := blob.ReadAll(context.Background(), s.opts.Blobs, layer.IndexKey(m.Data.Chunks), layer.MaxIndex)
		if err != nil {
			t.Fatal(err)
		}
		ix, err := layer.DecodeIndex(raw, m.Data)
		if err != nil {
			t.Fatal(err)
		}
		return ix
	}
	was, ix := read(old), read(d)
	_, first := layer.Span(ix.Offsets(), 0, end)
	mine, seen, pos := map[layer.Digest]bool{}, map[uint64]bool{}, uint64(0)
	for i, c := range ix.Chunks[:first] {
		if c.Length == 0 || seen[c.Off] { // zeros, and equal chunks, are there once
			continue
		}
		if seen[c.Off] = true; c.Off != pos {
			t.Errorf("chunk %d at %d, not at %d", i, c.Off, pos)
		}
		pos = c.Off + uint64(c.Length)
		mine[ix.Packs[c.Pack]] = true
	}
	for _, p := range was.Packs {
		if mine[p] {
			t.Errorf("pack %s is also the other layer's", p)
		}
	}
	shared, all := 0, 0
	for _, c := range ix.Chunks[first:] {
		if c.Length == 0 {
			continue
		}
		if mine[ix.Packs[c.Pack]] {
			t.Errorf("a chunk that is not expected is in a pack of what is: %v", slices.Collect(maps.Keys(mine)))
		}
		all += int(c.Length)
		if slices.Contains(was.Packs, ix.Packs[c.Pack]) {
			shared += int(c.Length)
		}
	}
	if shared < all/2 {
		t.Errorf("%d of %d bytes are where they were", shared, all)
	}
}

// TestRepackOfWhatIsNotWhole: the data are fetched aside, and stay as they were.
func TestRepackOfWhatIsNotWhole(t *testing.T) {
	ctx := context.Background()
	blobs := openBucket(t, t.TempDir())
	one := openStore(t, t.TempDir(), Options{Blobs: blobs})
	old, err := one.Import(ctx, mixed(t), "", image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	tr := traceFiles(t, imageOf(t, one, old.Digest), old.Digest, "small/100", "lib/big")
	want, err := one.Repack(ctx, dsec.LayerRef(old.Digest), tr)
	if err != nil {
		t.Fatal(err)
	}
	two := openStore(t, t.TempDir(), Options{Blobs: blobs, OnDemand: true, Small: 1})
	got, err := two.Repack(ctx, dsec.LayerRef(old.Digest), tr)
	if err != nil || got.Digest != want.Digest {
		t.Errorf("%+v, %v", got, err)
	}
	if err := two.Verify(ctx, dsec.LayerRef(got.Digest)); err != nil {
		t.Error(err)
	}
	two.mu.Lock()
	l, err := two.localLocked(old.Digest)
	two.mu.Unlock()
	if whole, werr := l.Whole(); err != nil || werr != nil || whole {
		t.Errorf("the old layer: whole %v, %v %v", whole, err, werr)
	}
	if left, err := os.ReadDir(two.path("tmp")); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

func TestRepacksThatAreRefused(t *testing.T) {
	ctx := context.Background()
	s := openStore(t, t.TempDir(), Options{})
	info, err := s.Import(ctx, mixed(t), "base:1", image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	none, err := s.Import(ctx, tree(t, map[string]string{"empty": ""}), "none:1", image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	some := []layer.Range{{Off: 0, Len: 4096}}
	for what, c := range map[string]struct {
		ref   dsec.LayerRef
		trace layer.Trace
		class dsec.Class
	}{
		"no trace":       {"base:1", layer.Trace{Layer: info.Digest}, dsec.Invalid},
		"of another":     {"base:1", layer.TraceOf(none.Digest, 0, some, true), dsec.Invalid},
		"no data":        {"none:1", layer.TraceOf(none.Digest, 0, some, true), dsec.Invalid},
		"no such layer":  {"other:1", layer.TraceOf(none.Digest, 0, some, true), dsec.NotFound},
		"not to be here": {dsec.LayerRef(layer.DigestOf(nil)), layer.TraceOf(layer.DigestOf(nil), 0, some, true), dsec.NotFound},
	} {
		if _, err := s.Repack(ctx, c.ref, c.trace); dsec.ClassOf(err) != c.class {
			t.Errorf("%s: %v", what, err)
		}
	}
	// A byte that changed on disk is never repacked.
	data, err := os.OpenFile(s.path("layers", info.Digest.Hex(), layer.DataFile), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer data.Close()
	if _, err := data.WriteAt([]byte("other"), 1<<20); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Repack(ctx, "base:1", layer.TraceOf(info.Digest, 0, some, true)); !errors.Is(err, dsec.Corrupt.Err()) {
		t.Errorf("corrupt data: %v", err)
	}
}
