package layer

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"flag"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
)

var update = flag.Bool("update", false, "write the golden files")

func sampleManifest() Manifest {
	return Manifest{
		Version: ManifestVersion, Entries: 3,
		Meta:   Content{Digest: DigestOf([]byte("meta")), Size: 8192},
		Data:   Chunked{Size: 136 << 10, Count: 2, Chunks: DigestOf(sampleIndex().Table())},
		Config: &image.Config{Env: []string{"PATH=/bin", "X=<&>"}, User: "1000:1000", Workdir: "/work", Cmd: []string{"sh"}, Arch: "amd64"},
	}
}

func sampleIndex() Index {
	return Index{Packs: []Digest{DigestOf([]byte("pack"))}, Chunks: []Chunk{
		{Sum: [32]byte{1}, Size: 132 << 10, Pack: 0, Length: 1000, Off: 0}, {Sum: [32]byte{2}, Size: 4 << 10, Off: 1000}}}
}

// TestGoldenFiles: what was written once is written, and read, the same for ever.
func TestGoldenFiles(t *testing.T) {
	index, err := sampleIndex().Encode()
	if err != nil {
		t.Fatal(err)
	}
	for name, b := range map[string][]byte{"manifest-v2.json": sampleManifest().Encode(), "index-v2.bin": index} {
		file := filepath.Join("testdata", name)
		if *update {
			if err := os.WriteFile(file, b, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(b, want) {
			t.Errorf("%s: now %q", name, b)
		}
	}
	m, err := DecodeManifest(sampleManifest().Encode(), sampleManifest().Digest())
	if err != nil || m.Data != sampleManifest().Data || m.Config.User != "1000:1000" {
		t.Errorf("manifest: %+v, %v", m, err)
	}
	ix, err := DecodeIndex(index, m.Data)
	if err != nil || len(ix.Chunks) != 2 || ix.Chunks[0] != sampleIndex().Chunks[0] || ix.Packs[0] != sampleIndex().Packs[0] {
		t.Errorf("index: %+v, %v", ix, err)
	}
}

func TestManifestsThatAreRefused(t *testing.T) {
	good := string(sampleManifest().Encode())
	for what, bad := range map[string]string{
		"version":       strings.Replace(good, `"version":2`, `"version":3`, 1),
		"unknown field": strings.Replace(good, `"version":2`, `"version":2,"more":1`, 1),
		"spaces":        strings.Replace(good, `{"version"`, `{ "version"`, 1),
		"trailing":      good + "{}",
		"digest":        strings.Replace(good, "sha256:", "sha256:../", 1),
		"negative size": strings.Replace(good, `"size":8192`, `"size":-1`, 1),
		"no chunks":     strings.Replace(good, `"count":2`, `"count":0`, 1),
		"empty":         "",
	} {
		if _, err := DecodeManifest([]byte(bad), DigestOf([]byte(bad))); !errors.Is(err, dsec.Corrupt.Err()) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := DecodeManifest([]byte(good), DigestOf([]byte("other"))); !errors.Is(err, dsec.Corrupt.Err()) {
		t.Errorf("wrong digest: %v", err)
	}
}

// TestE16_DigestIsNoPath: nothing but a digest passes for one.
func TestE16_DigestIsNoPath(t *testing.T) {
	for _, s := range []string{"", "sha256:", "sha256:../../escape", "sha512:" + strings.Repeat("a", 128), "sha256:" + strings.Repeat("A", 64),
		"sha256:" + strings.Repeat("a", 63), "sha256:" + strings.Repeat("a", 65), " sha256:" + strings.Repeat("a", 64)} {
		if _, err := ParseDigest(s); !errors.Is(err, dsec.Invalid.Err()) {
			t.Errorf("%q: %v", s, err)
		}
	}
	d := "sha256:" + strings.Repeat("0a", 32)
	if got, err := ParseDigest(d); err != nil || string(got) != d {
		t.Errorf("%q: %v", got, err)
	}
}

func FuzzDecodeManifest(f *testing.F) {
	f.Add(sampleManifest().Encode())
	f.Add([]byte(`{"version":2}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := DecodeManifest(b, DigestOf(b))
		if err == nil && !bytes.Equal(m.Encode(), b) {
			t.Error("accepted what it would not write")
		}
	})
}

func FuzzDecodeIndex(f *testing.F) {
	b, err := sampleIndex().Encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		ix, err := decodeIndex(b)
		if err != nil {
			return
		}
		again, err := ix.Encode()
		if err != nil || !bytes.Equal(again, b) {
			t.Errorf("accepted what it would not write: %v", err)
		}
	})
}

// TestTableAndIndexAgree: a table says the same of the data as its index.
func TestTableAndIndexAgree(t *testing.T) {
	m, ix := sampleManifest(), sampleIndex()
	got, err := DecodeTable(ix.Table(), m.Data)
	if err != nil || got.Size() != m.Data.Size {
		t.Fatalf("%+v, %v", got, err)
	}
	for what, bad := range map[string][]byte{"short": ix.Table()[:40], "more": append(ix.Table(), 0), "other": make([]byte, len(ix.Table())), "none": nil} {
		if _, err := DecodeTable(bad, m.Data); !errors.Is(err, dsec.Corrupt.Err()) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// TestSpan: which chunks a range of bytes is in.
func TestSpan(t *testing.T) {
	offs := []int64{0, 10, 30, 31}
	for _, c := range []struct {
		off, n   int64
		from, to int
	}{{0, 1, 0, 1}, {0, 10, 0, 1}, {9, 2, 0, 2}, {10, 20, 1, 2}, {0, 31, 0, 3}, {0, 1 << 40, 0, 3}, {30, 1, 2, 3}, {31, 1, 0, 0}, {5, 0, 0, 0}, {-1, 3, 0, 0}, {9, math.MaxInt64, 0, 3}} {
		if from, to := Span(offs, c.off, c.n); from != c.from || to != c.to {
			t.Errorf("[%d, +%d): [%d, %d), want [%d, %d)", c.off, c.n, from, to, c.from, c.to)
		}
	}
}

// TestChunksFollowContent: what stands before a file moves no border in it, and
// a large file shares no chunk with its neighbours.
func TestChunksFollowContent(t *testing.T) {
	random := make([]byte, 3<<20)
	r := rand.NewChaCha8([32]byte{7})
	_, _ = r.Read(random)
	sums := func(b []byte, borders ...int64) map[[32]byte]bool {
		out, at := map[[32]byte]bool{}, int64(0)
		c := NewCutter(iotest.OneByteReader(bytes.NewReader(b)), borders)
		if len(b) > 1<<20 {
			c = NewCutter(bytes.NewReader(b), borders)
		}
		for {
			p, err := c.Next()
			if err != nil {
				break
			}
			if len(p) > cutMost || at%cutBlock != 0 {
				t.Errorf("chunk of %d bytes at %d", len(p), at)
			}
			for _, border := range borders {
				if at < border && at+int64(len(p)) > border {
					t.Errorf("chunk [%d, +%d) over the border at %d", at, len(p), border)
				}
			}
			at += int64(len(p))
			out[sha256.Sum256(p)] = true
		}
		if at != int64(len(b)) {
			t.Errorf("%d of %d bytes", at, len(b))
		}
		return out
	}
	alone := sums(random)
	moved := sums(append(bytes.Repeat([]byte("other"), 4096*9/5*5)[:9*4096], random...))
	common := 0
	for s := range alone {
		if moved[s] {
			common++
		}
	}
	if common < len(alone)*9/10 {
		t.Errorf("%d of %d chunks are the same behind 36 KiB of something else", common, len(alone))
	}
	sums(random[:200<<10], 4096, 100<<10)
	cut := sums(random, 8192, 8192+LargeFile)
	if !cut[sha256.Sum256(random[:8192])] {
		t.Error("no chunk ends at the border")
	}
}

// TestPresenceSurvives: bits live on with the file; those of another boot count
// only if their data were synced.
func TestPresenceSurvives(t *testing.T) {
	const n = 70000
	path := filepath.Join(t.TempDir(), "present")
	if err := CreatePresence(path, n); err != nil {
		t.Fatal(err)
	}
	open := func() *Presence {
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		p, err := OpenPresence(f, n)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	p := open()
	for _, i := range []int{0, 31, 32, n - 1} {
		p.Set(i)
	}
	p.Set(0)
	if err := p.Sync(p.File()); err != nil { // any file stands for the data
		t.Fatal(err)
	}
	p.Set(5)
	if err := p.Clear(31); err != nil {
		t.Fatal(err)
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	check := func(what string, want ...int) {
		p := open()
		defer p.Close()
		var got []int
		for i := range n {
			if p.Has(i) {
				got = append(got, i)
			}
		}
		if !slices.Equal(got, want) || p.Count() != len(want) {
			t.Errorf("%s: %v (count %d), want %v", what, got, p.Count(), want)
		}
	}
	check("same boot", 0, 5, 32, n-1)
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	b[bootOffset] ^= 1
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	check("after a boot", 0, 32, n-1)
	if _, err := openPresence(openFile(t, path), n+presenceHead*8); err == nil {
		t.Error("a file for fewer chunks is accepted")
	}
}

func openFile(t *testing.T, path string) *os.File {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}
