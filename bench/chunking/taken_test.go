package chunking

import (
	"bytes"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"testing"

	"github.com/opendsec/dsec/image/erofs"
	"github.com/opendsec/dsec/layer"
)

// TestLayersAreCutAsWasMeasured: the scheme that was taken and the one that
// layers are cut by are two programs, and one set of borders.
func TestLayersAreCutAsWasMeasured(t *testing.T) {
	s, ok := Candidate(Taken)
	if !ok {
		t.Fatalf("%s is no candidate", Taken)
	}
	meta, data := sample(t)
	size := int64(len(read(t, data.Name())))
	d, err := Open("sample", meta.Name(), data.Name(), size)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	im, err := erofs.Open(meta, int64(len(read(t, meta.Name()))), data)
	if err != nil {
		t.Fatal(err)
	}
	borders, err := im.Borders(layer.LargeFile)
	if err != nil {
		t.Fatal(err)
	}
	_, ix, err := layer.Describe(bytes.NewReader(read(t, meta.Name())), bytes.NewReader(d.Bytes), borders)
	if err != nil {
		t.Fatal(err)
	}
	var ends []int64
	at := int64(0)
	for _, c := range ix.Chunks {
		at += int64(c.Size)
		ends = append(ends, at)
	}
	want := s.Ends(d)
	if !slices.Equal(ends, want) {
		t.Errorf("layers are cut at\n%v\nmeasured was\n%v", ends, want)
	}
	if len(ends) < 50 || len(borders) < 10 {
		t.Errorf("%d chunks and %d borders: the test tests little", len(ends), len(borders))
	}
}

// sample writes a layer of files of many sizes, those around where a file is
// large among them, with holes and with contents that no hash cuts.
func sample(t *testing.T) (meta, data *os.File) {
	t.Helper()
	for _, f := range []**os.File{&meta, &data} {
		var err error
		if *f, err = os.CreateTemp(t.TempDir(), "sample"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { (*f).Close() })
	}
	w, root := erofs.NewData(data), erofs.NewDir(0o755)
	rnd := rand.New(rand.NewPCG(7, 8))
	add := func(content []byte) {
		runs, err := w.Append(bytes.NewReader(content), int64(len(content)))
		if err != nil {
			t.Fatal(err)
		}
		in := &erofs.Inode{Mode: erofs.TypeRegular | 0o644, Size: int64(len(content)), Runs: runs}
		if err := root.Link(string(rune('a'+len(root.Names())/26))+string(rune('a'+len(root.Names())%26)), in); err != nil {
			t.Fatal(err)
		}
	}
	noise := func(n int) []byte {
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(rnd.Uint32()) | 1
		}
		return b
	}
	const large = layer.LargeFile
	for _, n := range []int{1, large, 5000, large - 1, large - Block, large - Block + 1, large + 1, 70_000, 3 << 20, 12, 40_000, 40_000, 1 << 20} {
		add(noise(n))
		add(noise(1 + rnd.IntN(60_000)))
	}
	add(slices.Concat(noise(200_000), make([]byte, 300_000), noise(300_000), make([]byte, 200_000), noise(100)))
	add(bytes.Repeat([]byte("the same again"), 200_000))
	for range 60 {
		add(noise(1 + rnd.IntN(90_000)))
	}
	if _, err := erofs.Write(meta, root, w.Blocks()); err != nil {
		t.Fatal(err)
	}
	if err := data.Truncate(int64(w.Blocks()) * erofs.BlockSize); err != nil {
		t.Fatal(err)
	}
	return meta, data
}

func read(t *testing.T, name string) []byte {
	t.Helper()
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b, err := io.ReadAll(f)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
