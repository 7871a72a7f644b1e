package image

import (
	"archive/tar"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/image/erofs"
)

// nastyLayer makes members with few names, of every kind and with attributes of
// every kind, some with entries for their parents and some without.
func nastyLayer(r *rand.Rand) []member {
	names := []string{"a", "b", "c"}
	name := func() string {
		parts := make([]string, 1+r.IntN(3))
		for i := range parts {
			parts[i] = names[r.IntN(len(names))]
		}
		return strings.Join(parts, "/")
	}
	var out []member
	for range 1 + r.IntN(8) {
		n := name()
		var m member
		switch r.IntN(12) {
		case 0, 1, 2:
			m = file(n, strings.Repeat(fmt.Sprint(r.IntN(1000)), r.IntN(3000)))
		case 3, 4:
			m = dir(n)
		case 5, 6:
			m = hardLink(n, name())
		case 7:
			m = node(n, tar.TypeFifo, 0, 0)
		case 8:
			m = file(path.Join(path.Dir(n), ".wh."+path.Base(n)), "")
		case 9:
			m = file(path.Join(n, ".wh..wh..opq"), "")
		case 10:
			to := name()
			if r.IntN(2) == 0 {
				to = "/" + to
			}
			m = symlink(n, to)
		case 11:
			m = node(n, tar.TypeBlock, int64(r.IntN(300)), int64(1+r.IntN(300)))
		}
		m.Mode, m.Uid, m.Gid = int64(r.IntN(0o10000)), r.IntN(70000), r.IntN(70000)
		m.ModTime, m.Format = time.Unix(int64(r.IntN(2e9)), int64(r.IntN(1e9))), tar.FormatPAX
		if r.IntN(4) == 0 {
			m = xattr(m, "trusted.x", fmt.Sprint(r.IntN(10)))
		}
		if r.IntN(3) == 0 { // as most tools write it
			for i, c := range n {
				if c == '/' {
					out = append(out, dir(n[:i]))
				}
			}
		}
		out = append(out, m)
	}
	if r.IntN(3) == 0 {
		r.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	}
	return out
}

// consistent drops members that contradict earlier ones: a name that is a
// directory and is not, or twice something, or a link to a name yet to come.
func consistent(members []member) (out []member) {
	dirs, others := map[string]bool{}, map[string]bool{}
	linked := map[string]bool{} // to names below
	for _, m := range members {
		base := path.Base(m.Name)
		hides := strings.HasPrefix(base, ".wh.")
		var parents []string
		for i, c := range m.Name {
			if c == '/' {
				parents = append(parents, m.Name[:i])
			}
		}
		bad := slices.ContainsFunc(parents, func(p string) bool { return others[p] || linked[p] })
		switch {
		case hides:
		case m.Typeflag == tar.TypeDir:
			bad = bad || others[m.Name] || linked[m.Name]
		default:
			bad = bad || others[m.Name] || dirs[m.Name] || linked[m.Name]
		}
		if m.Typeflag == tar.TypeLink {
			bad = bad || dirs[m.Linkname] || m.Linkname == m.Name
		}
		if bad {
			continue
		}
		for _, p := range parents {
			dirs[p] = true
		}
		switch {
		case hides:
		case m.Typeflag == tar.TypeDir:
			dirs[m.Name] = true
		default:
			others[m.Name] = true
		}
		if m.Typeflag == tar.TypeLink && !others[m.Linkname] {
			linked[m.Linkname] = true
		}
		out = append(out, m)
	}
	return out
}

// stackOf converts each layer on its own and settles what depends on others.
func stackOf(t testing.TB, sources []layerSource) (layers []converted, settled int, err error) {
	t.Helper()
	below, err := NewBelow(Options{})
	if err != nil {
		t.Fatal(err)
	}
	for _, src := range sources {
		c, err := convertWith(t, []layerSource{src}, Options{Loose: true})
		if err != nil {
			return nil, 0, err
		}
		loose, empty, err := IsLoose(openConverted(t, c))
		if err != nil {
			t.Fatal(err)
		}
		if empty {
			continue
		}
		if loose {
			settled++
			if c, err = settle(t, below, c); err != nil {
				return nil, 0, err
			}
			if c.Entries == 1 {
				continue
			}
		}
		if err := below.Add(context.Background(), openConverted(t, c)); err != nil {
			t.Fatal(err)
		}
		layers = append(layers, c)
	}
	return layers, settled, nil
}

func settle(t testing.TB, below *Below, c converted) (converted, error) {
	t.Helper()
	out, err := made(t, func(to Files) (Result, error) { return below.Settle(context.Background(), openConverted(t, c), to) })
	if err == nil {
		if checkErr := openConverted(t, out).Check(); checkErr != nil {
			t.Error(checkErr)
		}
	}
	return out, err
}

// TestAStackShowsTheTreeOfTheMergedImage: an image converted layer by layer and
// mounted as a stack, and the image converted into one layer, show one tree.
func TestAStackShowsTheTreeOfTheMergedImage(t *testing.T) {
	seeds := uint64(1500)
	if testing.Short() {
		seeds = 300
	}
	good, settled, plain := 0, 0, 0
	for seed := range seeds {
		r := rand.New(rand.NewPCG(seed, 3))
		var sources []layerSource
		var text []string
		for range 2 + r.IntN(3) {
			members := consistent(nastyLayer(r))
			b := makeTar(t, members...)
			sources = append(sources, tarOf(b, true))
			for _, m := range members {
				text = append(text, fmt.Sprintf("%c %s %s", m.Typeflag, m.Name, m.Linkname))
			}
			text = append(text, "--")
		}
		one, mergedErr := convertLayers(t, sources)
		layers, n, err := stackOf(t, sources)
		if (err == nil) != (mergedErr == nil) {
			t.Errorf("seed %d: merged %v, stacked %v\n%s", seed, mergedErr, err, strings.Join(text, "\n"))
		}
		if err != nil || mergedErr != nil || len(layers) == 0 {
			continue
		}
		good, settled, plain = good+1, settled+n, plain+len(layers)-n
		want, got := shown(t, []converted{one}), shown(t, layers)
		if !slices.Equal(got, want) {
			t.Fatalf("seed %d\n%s\nstack:\n%s\nmerged:\n%s", seed, strings.Join(text, "\n"), strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
	}
	if good < int(seeds)/8 || settled < good/2 {
		t.Errorf("%d of %d images were good, %d layers settled, %d not: the test tests little", good, seeds, settled, plain)
	}
	t.Logf("%d of %d images, %d layers settled, %d stood alone", good, seeds, settled, plain)
}

// stacked pushes nothing: it makes the stack of tars and mounts it.
func stacked(t testing.TB, tars ...[]byte) (root string, layers []converted) {
	t.Helper()
	var sources []layerSource
	for _, b := range tars {
		sources = append(sources, tarOf(b, true))
	}
	layers, _, err := stackOf(t, sources)
	if err != nil {
		t.Fatal(err)
	}
	if len(layers) == 1 {
		return mount(t, layers[0]), layers
	}
	return overlay(t, "", strings.Split(lowers(t, layers), ":")...), layers
}

func TestE13_AnImpliedDirectoryIsWhatItIsBelow(t *testing.T) {
	EachWay(t, func(t testing.TB) {
		base := dir("a")
		base.Mode, base.Uid, base.Gid = 0o2710, 5, 6
		root, _ := stacked(t, makeTar(t, xattr(base, "user.x", "y"), symlink("lib", "usr/lib"), dir("usr/lib")),
			makeTar(t, file("a/b/c", "1"), file("lib/f", "2")))
		var st unix.Stat_t
		if err := unix.Stat(filepath.Join(root, "a"), &st); err != nil || st.Mode&0o7777 != 0o2710 || st.Uid != 5 || st.Gid != 6 {
			t.Errorf("a: %o %d:%d, %v", st.Mode, st.Uid, st.Gid, err)
		}
		if got := xattrsOf(t, filepath.Join(root, "a")); !strings.Contains(got, `user.x="y"`) {
			t.Errorf("a: %s", got)
		}
		if err := unix.Stat(filepath.Join(root, "a/b"), &st); err != nil || st.Mode&0o7777 != 0o755 || st.Uid != 0 {
			t.Errorf("a/b: %o %d, %v", st.Mode, st.Uid, err)
		}
		if b := readFile(t, filepath.Join(root, "usr/lib/f")); string(b) != "2" {
			t.Errorf("usr/lib/f: %q", b)
		}
		if to, err := os.Readlink(filepath.Join(root, "lib")); err != nil || to != "usr/lib" {
			t.Errorf("lib: %q, %v", to, err)
		}
	})
}

func TestE8_ALinkToAFileOfALayerBelow(t *testing.T) {
	EachWay(t, func(t testing.TB) {
		body := strings.Repeat("perl", 3000)
		root, layers := stacked(t, makeTar(t, dir("bin"), file("bin/perl", body), hardLink("bin/perl5.1", "bin/perl"), file("bin/perl5", "old"), dir("bin/perl6")),
			makeTar(t, dir("bin"), hardLink("bin/perl5", "bin/perl"), hardLink("bin/perl6", "bin/perl")))
		var first, st unix.Stat_t
		if err := unix.Stat(filepath.Join(root, "bin/perl"), &first); err != nil || first.Nlink != 4 {
			t.Errorf("bin/perl: %d links, %v", first.Nlink, err)
		}
		for _, n := range []string{"perl5", "perl5.1", "perl6"} {
			if err := unix.Stat(filepath.Join(root, "bin", n), &st); err != nil || st.Ino != first.Ino || string(readFile(t, filepath.Join(root, "bin", n))) != body {
				t.Errorf("bin/%s: inode %d, want %d, %v", n, st.Ino, first.Ino, err)
			}
		}
		if want := int64(3 * erofs.BlockSize); len(layers) != 2 || layers[1].DataSize != want {
			t.Errorf("the contents are not in the second layer once: %+v", layers)
		}
	})
}

// TestE3_WhiteoutsAcrossTheLayersOfAStack also is E1, E5 and E10.
func TestE3_WhiteoutsAcrossTheLayersOfAStack(t *testing.T) {
	EachWay(t, func(t testing.TB) {
		root, layers := stacked(t, makeTar(t, file("x", "1"), file("a", "kept"), hardLink("b", "a"), dir("d"), file("d/low", "1"), file(".wh.nothing", "")),
			makeTar(t, file(".wh.x", ""), file(".wh.a", ""), dir("d"), file("d/new", "2"), file("d/.wh..wh..opq", ""), file("d/.wh.low", ""), dir("e"), file("e/.wh.none", "")),
			makeTar(t), makeTar(t, file("x", "3"), file(".wh.never", "")))
		expect(t, root, map[string]string{"x": "3", "b": "kept", "d/new": "2"})
		if len(layers) != 3 {
			t.Errorf("%d layers, want 3: an empty one stays", len(layers))
		}
	})
}
