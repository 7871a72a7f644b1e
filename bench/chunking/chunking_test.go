package chunking

import (
	"bytes"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
)

var limits = Limits{Min: 16 << 10, Avg: 64 << 10, Max: 256 << 10}

func schemes() []Scheme {
	return []Scheme{Fixed("fixed", 64<<10), Gear("gear", limits), Blocks("blocks", limits),
		FilesAndBlocks("files", limits, 128<<10), FilesFixed("files-fixed", limits, 128<<10, 64<<10)}
}

// tree makes a data file of files of many sizes, before it some blocks.
func tree(name string, before int) *Data {
	r := rand.New(rand.NewPCG(1, 2))
	d := &Data{Name: name, Bytes: make([]byte, before*Block)}
	other := rand.New(rand.NewPCG(3, 4))
	for i := range d.Bytes {
		d.Bytes[i] = byte(other.Uint32())
	}
	if before > 0 {
		d.Files = append(d.Files, Extent{0, int64(before) * Block})
	}
	for i := range 200 {
		n := int64(1+r.IntN(8)) * Block
		if i%20 == 0 {
			n = 130 * Block
		}
		d.Files = append(d.Files, Extent{int64(len(d.Bytes)), n})
		b := make([]byte, n)
		for j := range b {
			b[j] = byte(r.Uint32() % 64)
		}
		d.Bytes = append(d.Bytes, b...)
	}
	d.Bytes = append(d.Bytes, make([]byte, 1<<20)...)
	return d
}

func TestChunksCoverTheDataWithinTheirLimits(t *testing.T) {
	for _, s := range schemes() {
		d := tree("a", 0)
		ends := s.Ends(d)
		last := int64(0)
		for i, e := range ends {
			if e <= last || e-last > limits.Max {
				t.Fatalf("%s: chunk %d from %d to %d", s.Name, i, last, e)
			}
			if s.Name != "gear" && e%Block != 0 {
				t.Fatalf("%s: a border at %d splits a page", s.Name, e)
			}
			last = e
		}
		if last != int64(len(d.Bytes)) {
			t.Errorf("%s: ends at %d of %d", s.Name, last, len(d.Bytes))
		}
		if again := s.Ends(d); !slices.Equal(again, ends) {
			t.Errorf("%s: other borders the second time", s.Name)
		}
	}
	if ends := Fixed("f", 1).Ends(&Data{}); len(ends) != 0 {
		t.Errorf("no data has chunks: %v", ends)
	}
}

func TestContentThatMovedIsStoredOnce(t *testing.T) {
	for _, s := range schemes() {
		a, b := tree("a", 0), tree("b", 7)
		p, err := Pack(t.Context(), s, []*Data{a, b}, t.TempDir()+"/p", zstd.SpeedFastest)
		if err != nil {
			t.Fatal(err)
		}
		stored := float64(p.Plain) / float64(len(a.Bytes)-1<<20)
		switch {
		case s.Name == "fixed" && stored < 1.9:
			t.Errorf("fixed chunks stored %.2f of one tree: the test moves nothing", stored)
		case s.Name == "files-fixed" && stored > 1.5, (s.Name == "gear" || s.Name == "blocks" || s.Name == "files") && stored > 1.2:
			t.Errorf("%s: stored %.2f of one tree for two", s.Name, stored)
		}
	}
}

func TestFetchBringsWhatIsReadAndCountsIt(t *testing.T) {
	d := tree("a", 0)
	a, err := RandomFiles(d, 0.1)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range schemes() {
		p, err := Pack(t.Context(), s, []*Data{d}, t.TempDir()+"/p", zstd.SpeedDefault)
		if err != nil {
			t.Fatal(err)
		}
		l := Line{Latency: time.Millisecond, Bandwidth: 1e9, Parallel: 4, Gap: 4096, Most: 1 << 20}
		server, err := Serve(p.Dir, l.Latency)
		if err != nil {
			t.Fatal(err)
		}
		for _, how := range []string{"demand", "prefetch"} {
			to, err := os.CreateTemp(t.TempDir(), "to")
			if err != nil {
				t.Fatal(err)
			}
			f, err := NewFetcher(server, l, to)
			if err != nil {
				t.Fatal(err)
			}
			cost, run := p.Demand(a, l, nil), f.Demand
			if how == "prefetch" {
				cost, run = p.Prefetch(a, l, nil), f.Prefetch
			}
			if _, err := run(t.Context(), p, a); err != nil {
				t.Fatalf("%s %s: %v", s.Name, how, err)
			}
			for _, r := range a.Reads {
				got := make([]byte, r.Len)
				if _, err := to.ReadAt(got, r.Off); err != nil || !bytes.Equal(got, d.Bytes[r.Off:r.Off+r.Len]) {
					t.Fatalf("%s %s: %d bytes at %d are not what they should be: %v", s.Name, how, r.Len, r.Off, err)
				}
			}
			if cost.Requests < 1 || cost.Chunks < cost.Requests || cost.Bytes < 1 || cost.Bytes > p.Stored {
				t.Errorf("%s %s: %+v of %d bytes", s.Name, how, cost, p.Stored)
			}
			f.Close()
			to.Close()
		}
		if err := server.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestGapsAndLimitsOfRequests(t *testing.T) {
	at := func(pack int, off, size int64) Chunk { return Chunk{Pack: pack, At: off, Size: size} }
	chunks := []Chunk{at(0, 0, 10), at(0, 10, 10), at(0, 25, 10), at(0, 100, 10), at(1, 110, 10), at(1, 110, 10), at(1, 120, 50)}
	got := Coalesce(chunks, Line{Gap: 5, Most: 40})
	want := []Request{{Pack: 0, Off: 0, Len: 35}, {Pack: 0, Off: 100, Len: 10}, {Pack: 1, Off: 110, Len: 10}, {Pack: 1, Off: 120, Len: 50}}
	if len(got) != len(want) {
		t.Fatalf("%+v", got)
	}
	for i, w := range want {
		if g := got[i]; g.Pack != w.Pack || g.Off != w.Off || g.Len != w.Len {
			t.Errorf("request %d: %+v, want %+v", i, g, w)
		}
	}
	if n := len(got[2].Chunks); n != 2 {
		t.Errorf("a frame for two places came with %d", n)
	}
}
