package erofs_test

import (
	"bytes"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opendsec/dsec/image/erofs"
)

func noise(seed uint64, n int) []byte {
	b, r := make([]byte, n), rand.New(rand.NewPCG(seed, 9))
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

// manyKinds is a tree with everything that has contents or looks like it.
func manyKinds(t testing.TB) built {
	t.Helper()
	f, d := dataFile(t)
	root := erofs.NewDir(0o755)
	sub := erofs.NewDir(0o700)
	link(t, root, "sub", sub)
	for i, size := range []int{1, 4096, 5000, 100 << 10, 128 << 10, 300<<10 + 5, 3 << 20} {
		n := file(t, d, noise(uint64(i), size))
		n.Mtime, n.UID = int64(i)*1000, uint32(i)
		link(t, root, "f"+string(rune('0'+i)), n)
		link(t, sub, "again"+string(rune('0'+i)), n)
		if err := n.SetXattr("user.n", bytes.Repeat([]byte("x"), i)); err != nil {
			t.Fatal(err)
		}
	}
	holes := append(append(noise(50, 200<<10), make([]byte, 1<<20)...), noise(51, 700<<10)...)
	link(t, root, "holes", file(t, d, holes))
	link(t, root, "zeros", file(t, d, make([]byte, 1<<20)))
	link(t, root, "empty", file(t, d, nil))
	link(t, root, "link", &erofs.Inode{Mode: erofs.TypeSymlink | 0o777, Target: "sub/again1"})
	link(t, root, "gone", &erofs.Inode{Mode: erofs.TypeChar})
	return write(t, root, f, d.Blocks())
}

func arrange(t testing.TB, b built, first []erofs.Part) (built, erofs.Arrangement) {
	t.Helper()
	root, err := openImage(t, b).Tree()
	if err != nil {
		t.Fatal(err)
	}
	a, err := erofs.Arrange(root, first)
	if err != nil {
		t.Fatal(err)
	}
	old, err := os.Open(b.data)
	if err != nil {
		t.Fatal(err)
	}
	defer old.Close()
	f, err := os.Create(filepath.Join(t.TempDir(), "data"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := a.Copy(f, old); err != nil {
		t.Fatal(err)
	}
	return write(t, root, f, a.Blocks), a
}

// TestTreeGivesTheSameImage: reading an image and writing it again changes no byte.
func TestTreeGivesTheSameImage(t *testing.T) {
	b := manyKinds(t)
	again, a := arrange(t, b, nil)
	for _, pair := range [][2]string{{b.meta, again.meta}, {b.data, again.data}} {
		x, errX := os.ReadFile(pair[0])
		y, errY := os.ReadFile(pair[1])
		if errX != nil || errY != nil || !bytes.Equal(x, y) {
			t.Errorf("%s: %v %v", pair[0], errX, errY)
		}
	}
	if a.First != 0 {
		t.Errorf("%d blocks first", a.First)
	}
}

// TestArrangedTreesAreTheSame: whatever is asked to be first, the tree stays, the
// reader, fsck and the kernel agree, and what was asked for is first.
func TestArrangedTreesAreTheSame(t *testing.T) {
	b := manyKinds(t)
	want := describeImage(t, openImage(t, b))
	r := rand.New(rand.NewPCG(7, 8))
	for round := range 30 {
		var first []erofs.Part
		for range r.IntN(12) {
			first = append(first, erofs.Part{Block: r.Uint32N(uint32(b.blocks) + 10), Count: r.Uint32N(40)})
		}
		if round == 0 {
			first = []erofs.Part{{Block: 0, Count: 1<<32 - 1}}
		}
		got, a := arrange(t, b, first)
		im := openImage(t, got)
		if err := im.Check(); err != nil {
			t.Fatal(err)
		}
		if is := describeImage(t, im); is != want {
			t.Fatalf("%v:\n%s\nwant\n%s", first, is, want)
		}
		if a.Blocks != b.blocks {
			t.Fatalf("%d blocks, were %d", a.Blocks, b.blocks)
		}
		checkFirst(t, b, got, a, first)
		if round < 6 {
			fsck(t, got)
			sameFiles(t, mount(t, b), mount(t, got))
		}
	}
}

// checkFirst: each block that was asked for is in the first part, with its content.
func checkFirst(t *testing.T, old, now built, a erofs.Arrangement, first []erofs.Part) {
	t.Helper()
	x, errX := os.ReadFile(old.data)
	y, errY := os.ReadFile(now.data)
	if errX != nil || errY != nil {
		t.Fatal(errX, errY)
	}
	for _, p := range first {
		for i := range min(p.Count, 100) {
			n := p.Block + i
			to, ok := a.Place(n)
			if uint64(n) >= old.blocks {
				if ok {
					t.Fatalf("block %d, of none, is at %d", n, to)
				}
				continue
			}
			if !ok || uint64(to) >= a.First || !bytes.Equal(x[n*erofs.BlockSize:(n+1)*erofs.BlockSize], y[to*erofs.BlockSize:(to+1)*erofs.BlockSize]) {
				t.Fatalf("block %d is at %d of %d: %v", n, to, a.First, ok)
			}
		}
	}
}

func sameFiles(t *testing.T, one, two string) {
	t.Helper()
	err := filepath.WalkDir(one, func(p string, d os.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		x, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		y, err := os.ReadFile(two + strings.TrimPrefix(p, one))
		if err == nil && !bytes.Equal(x, y) {
			t.Errorf("%s differs as the kernel reads it", p)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

// TestArrangeOrder: parts come in the order that was asked for, small files whole
// and large ones in pieces of 16 KiB.
func TestArrangeOrder(t *testing.T) {
	f, d := dataFile(t)
	root := erofs.NewDir(0o755)
	link(t, root, "a", file(t, d, noise(1, 3*4096)))  // blocks 0 to 2
	link(t, root, "b", file(t, d, noise(2, 1<<20)))   // blocks 3 to 258
	link(t, root, "c", file(t, d, noise(3, 60<<10)))  // blocks 259 to 273
	link(t, root, "d", file(t, d, noise(4, 200<<10))) // from 274
	b := write(t, root, f, d.Blocks())
	got, a := arrange(t, b, []erofs.Part{{Block: 260, Count: 1}, {Block: 3 + 21, Count: 1}, {Block: 1, Count: 1}, {Block: 3, Count: 1}, {Block: 259, Count: 1}})
	if a.First != 15+4+3+4 {
		t.Errorf("%d blocks first", a.First)
	}
	im := openImage(t, got)
	top, err := im.Root()
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string][]erofs.Run{
		"c": {{Off: 0, Block: 0, Count: 15}}, "a": {{Off: 0, Block: 19, Count: 3}},
		"b": {{Off: 0, Block: 22, Count: 20}, {Off: 80 << 10, Block: 15, Count: 4}, {Off: 96 << 10, Block: 42, Count: 232}},
		"d": {{Off: 0, Block: 274, Count: 50}},
	} {
		n, err := top.Lookup(name)
		if err != nil || n == nil {
			t.Fatal(name, err)
		}
		runs, err := n.Runs()
		if err != nil || len(runs) != len(want) {
			t.Fatalf("%s: %v, %v", name, runs, err)
		}
		for i := range want {
			if runs[i] != want[i] {
				t.Errorf("%s: %v, want %v", name, runs, want)
			}
		}
	}
}

func TestBlocksOfTwoFilesAreNotArranged(t *testing.T) {
	f, d := dataFile(t)
	root := erofs.NewDir(0o755)
	n := file(t, d, noise(1, 300<<10))
	link(t, root, "a", n)
	link(t, root, "b", &erofs.Inode{Mode: n.Mode, Size: n.Size, Runs: append([]erofs.Run(nil), n.Runs...)})
	tree, err := openImage(t, write(t, root, f, d.Blocks())).Tree()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := erofs.Arrange(tree, nil); err == nil {
		t.Error("accepted")
	}
}

// TestIndexesOfASplitFileAreFew: a large file with one part elsewhere has pieces
// that grow with it.
func TestIndexesOfASplitFileAreFew(t *testing.T) {
	root := erofs.NewDir(0o755)
	const size = 8 << 30
	link(t, root, "big", &erofs.Inode{Mode: erofs.TypeRegular | 0o644, Size: size, Runs: []erofs.Run{{Block: 0, Count: size / erofs.BlockSize}}})
	a, err := erofs.Arrange(root, []erofs.Part{{Block: 12345, Count: 1}, {Block: 77, Count: 1}})
	if err != nil {
		t.Fatal(err)
	}
	st, err := erofs.Write(io.Discard, root, a.Blocks)
	if err != nil || st.MetaSize > 64<<10 {
		t.Errorf("%d bytes of metadata, %v", st.MetaSize, err)
	}
}
