package image

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image/erofs"
)

// writable is an overlay on layers, the lowest first, and what is written in it.
type writable struct{ root, upper string }

func onTop(t testing.TB, layers []converted) writable {
	t.Helper()
	d := t.TempDir()
	w := writable{root: filepath.Join(d, "root"), upper: filepath.Join(d, "upper")}
	for _, dir := range []string{w.root, w.upper, filepath.Join(d, "work")} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	opts := "upperdir=" + w.upper + ",workdir=" + filepath.Join(d, "work") + ",redirect_dir=on,index=off,metacopy=off,lowerdir=" + lowers(t, layers)
	if err := unix.Mount("overlay", w.root, "overlay", 0, opts); err != nil {
		t.Fatalf("mount overlay: %v", err)
	}
	return w
}

// lowers mounts layers, the lowest first, and names them as overlayfs wants.
func lowers(t testing.TB, layers []converted) string {
	var dirs []string
	for _, l := range layers {
		dirs = append(dirs, mount(t, l))
	}
	slices.Reverse(dirs)
	return strings.Join(dirs, ":")
}

// shown describes the tree that the layers, the lowest first, show.
func shown(t testing.TB, layers []converted) []string {
	t.Helper()
	if len(layers) == 1 {
		return describeAll(t, mount(t, layers[0]))
	}
	return describeAll(t, overlay(t, ",redirect_dir=follow", strings.Split(lowers(t, layers), ":")...))
}

// describeAll is a line for each name with everything that a program can see,
// but the attributes of the root, which every sandbox has of its own.
func describeAll(t testing.TB, root string) (out []string) {
	t.Helper()
	first := map[[2]uint64]string{}
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if p == root {
			return err
		}
		if d.Type()&fs.ModeCharDevice != 0 && errors.Is(unix.Access(p, 0), unix.ENOENT) {
			return nil // overlayfs lists a whiteout where only its layer has the directory
		}
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(root, p)
		var st unix.Stat_t
		if err := unix.Lstat(p, &st); err != nil {
			return err
		}
		line := fmt.Sprintf("%s %o %d:%d %d.%d", rel, st.Mode, st.Uid, st.Gid, st.Mtim.Sec, st.Mtim.Nsec)
		switch {
		case d.IsDir():
		case first[[2]uint64{st.Dev, st.Ino}] != "":
			line += " = " + first[[2]uint64{st.Dev, st.Ino}]
		default:
			first[[2]uint64{st.Dev, st.Ino}] = rel
		}
		switch d.Type() {
		case 0:
			line += fmt.Sprintf(" %d %x", st.Size, sha256.Sum256(readFile(t, p)))
		case fs.ModeSymlink:
			to, err := os.Readlink(p)
			if err != nil {
				return err
			}
			line += " -> " + to
		case fs.ModeDevice, fs.ModeDevice | fs.ModeCharDevice:
			line += fmt.Sprintf(" %d", st.Rdev)
		}
		out = append(out, line+xattrsOf(t, p))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func xattrsOf(t testing.TB, p string) (out string) {
	t.Helper()
	b := make([]byte, 1<<16)
	n, err := unix.Llistxattr(p, b)
	if err != nil {
		t.Fatal(p, err)
	}
	names := strings.Split(strings.TrimSuffix(string(b[:n]), "\x00"), "\x00")
	slices.Sort(names)
	for _, name := range names {
		if name == "" || strings.Contains(name, ".overlay.") {
			continue
		}
		v := make([]byte, 1<<16)
		n, err := unix.Lgetxattr(p, name, v)
		if err != nil {
			t.Fatal(p, name, err)
		}
		out += fmt.Sprintf(" %s=%q", name, v[:n])
	}
	return out
}

// scribble changes a tree at random with the system's calls. What does not
// work at the moment is left.
func scribble(t testing.TB, r *rand.Rand, root string) {
	t.Helper()
	names := []string{"a", "b", "c", "d"}
	name := func() string {
		p := root
		for range 1 + r.IntN(3) + r.IntN(2) {
			p = filepath.Join(p, names[r.IntN(len(names))])
		}
		return p
	}
	for range 4 + r.IntN(16) {
		n := name()
		var err error
		switch r.IntN(12) {
		case 0, 1:
			err = os.Mkdir(n, os.FileMode(0o700|r.IntN(0o100)))
		case 2, 3:
			err = os.WriteFile(n, bytes.Repeat([]byte(fmt.Sprint(r.IntN(1000))), r.IntN(3000)), 0o640)
		case 4:
			err = os.RemoveAll(n)
		case 5, 6:
			err = os.Rename(n, name())
		case 7:
			err = os.Link(n, name())
		case 8:
			err = os.Lchown(n, r.IntN(70000), r.IntN(70000))
		case 9:
			err = unix.Lsetxattr(n, "trusted.x", []byte(fmt.Sprint(r.IntN(9))), 0)
		case 10:
			err = os.Symlink(name(), n)
		case 11:
			err = sparse(n, int64(r.IntN(1<<20)))
		}
		if err != nil && !errors.As(err, new(*fs.PathError)) && !errors.As(err, new(*os.LinkError)) && !errors.As(err, new(unix.Errno)) {
			t.Fatal(err)
		}
	}
}

func sparse(name string, hole int64) error {
	f, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteAt([]byte("behind a hole"), hole)
	return errors.Join(err, f.Close())
}

// written makes a layer of each of several sessions on one another.
func written(t testing.TB, r *rand.Rand, n int) []converted {
	t.Helper()
	var members []member
	for i := range 64 {
		n := string([]byte{'a' + byte(i/16), '/', 'a' + byte(i/4%4), '/', 'a' + byte(i%4)})
		if members = append(members, dir(n[:1]), dir(n[:3]), file(n, n)); i%3 == 0 {
			members = append(members, dir(n), file(n+"/e", n))
		}
	}
	layers := []converted{mustConvert(t, writeFile(t, makeTar(t, members...)), Options{})}
	for range n {
		w := onTop(t, layers)
		scribble(t, r, w.root)
		if err := unix.Unmount(w.root, 0); err != nil {
			t.Fatal(err)
		}
		layers = append(layers, mustConvert(t, w.upper, Options{KeepWhiteouts: true}))
	}
	return layers
}

func mergeLayers(t testing.TB, layers []converted, opts MergeOptions) converted {
	t.Helper()
	var images []*erofs.Image
	for _, l := range layers {
		images = append(images, openConverted(t, l))
	}
	c, err := made(t, func(to Files) (Result, error) { return Merge(context.Background(), images, to, opts) })
	if err != nil {
		t.Fatal(err)
	}
	if err := openConverted(t, c).Check(); err != nil {
		t.Error(err)
	}
	return c
}

// converts makes a layer of each of some random OCI layers.
func converts(t testing.TB, r *rand.Rand, n int) (layers []converted) {
	t.Helper()
	for len(layers) < n {
		src := writeFile(t, makeTar(t, randomLayer(r)...))
		c, err := tryConvertAt(t, Location{Source: src, Path: src, Kind: KindFile, Tar: true, Whiteouts: true}, Options{KeepWhiteouts: true})
		if err == nil { // else a hard link to nothing
			layers = append(layers, c)
		}
	}
	return layers
}

// TestMergedLayersShowTheSameTree: sessions that rename, link, hide and replace
// at random on one another give layers, and so do OCI layers; any run of them
// merged into one, in the place of the run, shows the same tree to the kernel.
func TestMergedLayersShowTheSameTree(t *testing.T) {
	seeds := uint64(60)
	if testing.Short() {
		seeds = 16
	}
	redirects := 0
	for seed := range seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 2))
			layers := written(t, r, 5)
			if seed%4 == 0 {
				layers = converts(t, r, 5)
			}
			want := shown(t, layers)
			for _, l := range layers {
				redirects += bytes.Count(readFile(t, l.meta), []byte("overlay.redirect"))
			}
			for from := range len(layers) {
				for to := from + 2; to <= len(layers); to++ {
					c := mergeLayers(t, layers[from:to], MergeOptions{KeepWhiteouts: from > 0})
					stack := append(append(slices.Clone(layers[:from]), c), layers[to:]...)
					if got := shown(t, stack); !slices.Equal(got, want) {
						t.Fatalf("%d to %d\nmerged:\n%s\nthe layers:\n%s", from, to, strings.Join(got, "\n"), strings.Join(want, "\n"))
					}
				}
			}
		})
	}
	if redirects < int(seeds)/4 {
		t.Errorf("only %d renamed directories: the test tests little", redirects)
	}
}

func TestMergeKeepsWhatIsSeenOnceAndInOrder(t *testing.T) {
	body := strings.Repeat("x", 10_000)
	low := mustConvert(t, writeFile(t, makeTar(t, file("a", body), hardLink("b", "a"), file("gone", body), file("replaced", body))), Options{})
	top := mustConvert(t, push(t, newRegistry(t)+"/test:1", makeImage(t, makeTar(t, file(".wh.gone", ""), file("replaced", "y")))), Options{KeepWhiteouts: true})
	c := mergeLayers(t, []converted{low, top}, MergeOptions{})
	if want := int64(4 * erofs.BlockSize); c.DataSize != want {
		t.Errorf("%d bytes of data, want %d", c.DataSize, want)
	}
	again := mergeLayers(t, []converted{low, top}, MergeOptions{})
	if !bytes.Equal(readFile(t, c.meta), readFile(t, again.meta)) || !bytes.Equal(readFile(t, c.data), readFile(t, again.data)) {
		t.Error("the same layers gave other bytes")
	}
}

func TestMergeHasLimits(t *testing.T) {
	l := mustConvert(t, writeFile(t, makeTar(t, file("a", "12345"), file("b", "12345"), dir("c"))), Options{})
	d := t.TempDir()
	for _, opts := range []MergeOptions{{MaxBytes: 9}, {MaxEntries: 2}} {
		f, err := os.Create(filepath.Join(d, "f"))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Merge(context.Background(), []*erofs.Image{openConverted(t, l)}, Files{Meta: f, Data: f}, opts); !errors.Is(err, dsec.Invalid.Err()) {
			t.Errorf("%+v: %v", opts, err)
		}
		f.Close()
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := Merge(ctx, []*erofs.Image{openConverted(t, l)}, Files{}, MergeOptions{}); !errors.Is(err, dsec.Canceled.Err()) {
		t.Errorf("cancelled: %v", err)
	}
}

// TestMergeFollowsADirectoryThatMovedTwice: what was renamed inside what was
// renamed before is found in the layers below the merged ones.
func TestMergeFollowsADirectoryThatMovedTwice(t *testing.T) {
	layers := []converted{mustConvert(t, writeFile(t, makeTar(t, file("a/b/x/f", "1"), file("a/b/g", "2"), file("a/h", "3"))), Options{})}
	for _, moves := range [][2]string{{"a/b", "q"}, {"q/x", "r"}, {"a", "q/a"}} {
		w := onTop(t, layers)
		err := os.Rename(filepath.Join(w.root, moves[0]), filepath.Join(w.root, moves[1]))
		if err = errors.Join(err, unix.Unmount(w.root, 0)); err != nil {
			t.Fatal(err)
		}
		layers = append(layers, mustConvert(t, w.upper, Options{KeepWhiteouts: true}))
	}
	c := mergeLayers(t, layers[1:], MergeOptions{KeepWhiteouts: true})
	want := map[string]string{"q/a/h": "3", "q/g": "2", "r/f": "1"}
	expect(t, overlay(t, ",redirect_dir=follow", mount(t, c), mount(t, layers[0])), want)
	expect(t, mount(t, mergeLayers(t, layers, MergeOptions{})), want)
}

// TestMergeLeavesOutWhiteoutsThatHideNothing: in a directory through which
// nothing shines they would be listed, however deep they are.
func TestMergeLeavesOutWhiteoutsThatHideNothing(t *testing.T) {
	var layers []converted
	for _, members := range [][]member{
		{dir("d"), file("d/.wh..wh..opq", ""), dir("d/sub"), file("d/sub/y", "y"), file("d/sub/z", "z"), file(".wh.low", "")},
		{dir("d"), dir("d/sub"), file("d/sub/.wh.y", ""), dir("e"), file("e/.wh.not", "")}} {
		src := writeFile(t, makeTar(t, members...))
		c, err := tryConvertAt(t, Location{Source: src, Path: src, Kind: KindFile, Tar: true, Whiteouts: true}, Options{KeepWhiteouts: true})
		if err != nil {
			t.Fatal(err)
		}
		layers = append(layers, c)
	}
	var asked []string
	hides := func(name string) (bool, error) {
		asked = append(asked, name)
		return name == "low", nil
	}
	for want, opts := range map[string]MergeOptions{
		"low e/not": {KeepWhiteouts: true}, "low": {KeepWhiteouts: true, Hides: hides}, "": {}} {
		var got []string
		im := openConverted(t, mergeLayers(t, layers, opts))
		if err := im.Walk(func(name string, n *erofs.Node) error {
			if n.IsWhiteout() {
				got = append(got, name)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		slices.SortFunc(got, func(a, b string) int { return len(a) - len(b) })
		if strings.Join(got, " ") != want {
			t.Errorf("%v, want %s", got, want)
		}
	}
	if slices.Sort(asked); !slices.Equal(asked, []string{"e/not", "low"}) {
		t.Errorf("asked for %v", asked)
	}
	broken := errors.New("broken")
	var images []*erofs.Image
	for _, l := range layers {
		images = append(images, openConverted(t, l))
	}
	_, err := Merge(t.Context(), images, Files{}, MergeOptions{KeepWhiteouts: true, Hides: func(string) (bool, error) { return false, broken }})
	if !errors.Is(err, broken) {
		t.Error(err)
	}
}
