package image

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image/erofs"
)

// randomLayer makes members with few names, so that they collide.
func randomLayer(r *rand.Rand) []member {
	names := []string{"a", "b", "c", "d"}
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
		switch r.IntN(8) {
		case 0, 1:
			out = append(out, file(n, fmt.Sprint(r.IntN(1000))))
		case 2:
			d := dir(n)
			d.Mode = int64(0o700 | r.IntN(0o100))
			out = append(out, d)
		case 3:
			out = append(out, hardLink(n, name()))
		case 4:
			out = append(out, node(n, tar.TypeFifo, 0, 0))
		case 5:
			out = append(out, file(path.Join(path.Dir(n), ".wh."+path.Base(n)), ""))
		case 6:
			out = append(out, file(path.Join(n, ".wh..wh..opq"), ""))
		case 7:
			out = append(out, file(n, ""))
		}
	}
	return out
}

// unpack applies a layer to a directory with the system's own calls: whiteouts
// first, then the members. It reports whether the layer can be unpacked.
func unpack(root string, members []member) bool {
	at := func(name string) string { return filepath.Join(root, name) }
	for _, m := range members {
		d, base := path.Split(m.Name)
		hidden, ok := strings.CutPrefix(base, ".wh.")
		if !ok || !isDir(at(d)) {
			continue
		}
		if base == ".wh..wh..opq" {
			names, _ := os.ReadDir(at(d))
			for _, n := range names {
				os.RemoveAll(at(path.Join(d, n.Name())))
			}
			continue
		}
		os.RemoveAll(at(path.Join(d, hidden)))
	}
	for _, m := range members {
		if strings.HasPrefix(path.Base(m.Name), ".wh.") {
			continue
		}
		if !place(root, m) {
			return false
		}
	}
	return true
}

func isDir(p string) bool {
	st, err := os.Lstat(p)
	return err == nil && st.IsDir()
}

func place(root string, m member) bool {
	p := filepath.Join(root, m.Name)
	// What is in the way of a parent gives way.
	for i, c := range m.Name {
		if c == '/' {
			if parent := filepath.Join(root, m.Name[:i]); !isDir(parent) {
				os.RemoveAll(parent)
				os.Mkdir(parent, 0o755)
			}
		}
	}
	switch m.Typeflag {
	case tar.TypeDir:
		if !isDir(p) {
			os.RemoveAll(p)
			os.Mkdir(p, 0o755)
		}
		return os.Chmod(p, os.FileMode(m.Mode)) == nil
	case tar.TypeLink:
		from := filepath.Join(root, m.Linkname)
		if st, err := os.Lstat(from); err != nil || st.IsDir() {
			return false
		}
		// Under another name first: the target may be below what is replaced.
		if os.Link(from, filepath.Join(root, ".keep")) != nil {
			return false
		}
		os.RemoveAll(p)
		return os.Rename(filepath.Join(root, ".keep"), p) == nil && removeIfThere(filepath.Join(root, ".keep"))
	case tar.TypeFifo:
		os.RemoveAll(p)
		return mkfifo(p) == nil
	}
	os.RemoveAll(p)
	return os.WriteFile(p, []byte(m.body), 0o644) == nil
}

// removeIfThere: renaming a link onto another link of its inode does nothing
// and leaves both.
func removeIfThere(p string) bool {
	err := os.Remove(p)
	return err == nil || errors.Is(err, os.ErrNotExist)
}

// TestRandomLayersMatchARealUnpack compares the merge with a real file system,
// and our reader with the kernel's, on many small images.
func TestRandomLayersMatchARealUnpack(t *testing.T) {
	seeds := uint64(120)
	if testing.Short() {
		seeds = 50
	}
	good := 0
	for seed := range seeds {
		r := rand.New(rand.NewPCG(seed, 1))
		real, ok := t.TempDir(), true
		var sources []layerSource
		var shown []string
		for range 1 + r.IntN(3) {
			members := randomLayer(r)
			b := makeTar(t, members...)
			sources = append(sources, tarOf(b, true))
			for _, m := range members {
				shown = append(shown, fmt.Sprintf("%c %s %s", m.Typeflag, m.Name, m.Linkname))
			}
			shown = append(shown, "--")
			ok = ok && unpack(real, members)
		}
		c, err := convertLayers(t, sources)
		if (err == nil) != ok {
			// A hard link to a name that the same layer hides works only here.
			if err == nil {
				continue
			}
			t.Errorf("seed %d: real %v, ours: %v\n%s", seed, ok, err, strings.Join(shown, "\n"))
			continue
		}
		if err != nil {
			continue
		}
		good++
		compareTrees(t, fmt.Sprintf("seed %d\n%s", seed, strings.Join(shown, "\n")), real, c)
	}
	if good < int(seeds)/4 {
		t.Errorf("only %d of %d images were good: the test tests little", good, seeds)
	}
}

func convertLayers(t testing.TB, layers []layerSource) (converted, error) {
	t.Helper()
	return convertWith(t, layers, Options{})
}

func convertWith(t testing.TB, layers []layerSource, opts Options) (converted, error) {
	t.Helper()
	if err := opts.fill(); err != nil {
		t.Fatal(err)
	}
	return made(t, func(to Files) (Result, error) {
		return convert(context.Background(), &opened{layers: layers}, to, opts)
	})
}

// made is what write makes in files of its own.
func made(t testing.TB, write func(to Files) (Result, error)) (converted, error) {
	t.Helper()
	d := t.TempDir()
	meta, err := os.Create(filepath.Join(d, "meta"))
	if err != nil {
		t.Fatal(err)
	}
	defer meta.Close()
	data, err := os.Create(filepath.Join(d, "data"))
	if err != nil {
		t.Fatal(err)
	}
	defer data.Close()
	res, err := write(Files{Meta: meta, Data: data})
	return converted{res, meta.Name(), data.Name()}, err
}

// tarOf is a layer of those bytes.
func tarOf(b []byte, oci bool) tarLayer {
	return tarLayer{oci: oci, open: func(context.Context) (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b)), nil }}
}

func compareTrees(t testing.TB, what, real string, c converted) {
	t.Helper()
	want := describeTree(t, real)
	got := describeTree(t, mount(t, c))
	if !slices.Equal(want, got) {
		t.Errorf("%s\nreal:\n%s\nours:\n%s", what, strings.Join(want, "\n"), strings.Join(got, "\n"))
	}
	im := openConverted(t, c)
	if err := im.Check(); err != nil {
		t.Errorf("%s: %v", what, err)
	}
}

func openConverted(t testing.TB, c converted) *erofs.Image {
	t.Helper()
	meta := readFile(t, c.meta)
	im, err := erofs.Open(bytes.NewReader(meta), int64(len(meta)), bytes.NewReader(readFile(t, c.data)))
	if err != nil {
		t.Fatal(err)
	}
	return im
}

// describeTree is a line for each name: type, mode, links, content.
func describeTree(t testing.TB, root string) (out []string) {
	t.Helper()
	err := filepath.WalkDir(root, func(p string, d os.DirEntry, err error) error {
		if err != nil || p == root {
			return err
		}
		rel, _ := filepath.Rel(root, p)
		st, err := d.Info()
		if err != nil {
			return err
		}
		body := ""
		if d.Type().IsRegular() {
			body = string(readFile(t, p))
		}
		links := uint64(0)
		if !d.IsDir() {
			links = nlink(st)
		}
		out = append(out, fmt.Sprintf("%s %v %d %q", rel, st.Mode(), links, body))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// FuzzConvert: any bytes give a layer that passes our own check, or an error
// that blames the source.
func FuzzConvert(f *testing.F) {
	f.Add(makeTar(f, file("a", "1"), hardLink("b", "a"), symlink("c", "a"), dir("d"), xattr(file("e", "2"), "user.x", "y")), true)
	f.Add(makeTar(f, file("d/.wh..wh..opq", ""), file(".wh.a", ""), node("n", tar.TypeBlock, 8, 1)), true)
	f.Fuzz(func(t *testing.T, b []byte, oci bool) {
		src := tarOf(b, oci)
		c, err := convertLayers(t, []layerSource{src})
		if err != nil {
			if class := dsec.ClassOf(classify("convert", "fuzz", err)); class != dsec.Invalid {
				t.Errorf("%s: %v", class, err)
			}
			return
		}
		if err := openConverted(t, c).Check(); err != nil {
			t.Error(err)
		}
	})
}
