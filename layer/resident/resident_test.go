package resident_test

import (
	"bytes"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/image/erofs"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/layer/resident"
)

type mounted struct {
	dir  string
	root *os.File
	im   *erofs.Image
	runs map[string][]erofs.Run
}

// mount makes a layer of a few files, twice linked, with a hole, deep and large,
// and mounts it with nothing of it in memory.
func mount(t *testing.T, opts string) mounted {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root: uid is", os.Geteuid())
	}
	dir := t.TempDir()
	data, err := os.Create(filepath.Join(dir, "data"))
	if err != nil {
		t.Fatal(err)
	}
	defer data.Close()
	d, r := erofs.NewData(data), rand.New(rand.NewPCG(1, 2))
	file := func(parts ...int) *erofs.Inode { // bytes of noise, or, negative, of zeros
		var b []byte
		for _, n := range parts {
			for range max(n, -n) {
				b = append(b, byte(r.Uint32())*byte(min(1, max(0, n))))
			}
		}
		runs, err := d.Append(bytes.NewReader(b), int64(len(b)))
		if err != nil {
			t.Fatal(err)
		}
		return &erofs.Inode{Mode: erofs.TypeRegular | 0o600, Size: int64(len(b)), Runs: runs}
	}
	root, a, b := erofs.NewDir(0o755), erofs.NewDir(0o755), erofs.NewDir(0o755)
	big := file(4 << 20)
	for _, l := range []struct {
		in   *erofs.Inode
		name string
		n    *erofs.Inode
	}{{root, "a", a}, {a, "b", b}, {root, "other", file(9000)}, {root, "big", big}, {b, "deep", file(5000)}, {a, "second", big},
		{root, "hole", file(100<<10, -1<<20, 70<<10)}, {root, "empty", file()}} {
		if err := l.in.Link(l.name, l.n); err != nil {
			t.Fatal(err)
		}
	}
	meta, err := os.Create(filepath.Join(dir, "meta"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { meta.Close() })
	if _, err := erofs.Write(meta, root, d.Blocks()); err != nil {
		t.Fatal(err)
	}
	st, err := meta.Stat()
	if err != nil {
		t.Fatal(err)
	}
	m := mounted{dir: t.TempDir(), runs: map[string][]erofs.Run{}}
	if m.im, err = erofs.Open(meta, st.Size(), nil); err != nil {
		t.Fatal(err)
	}
	if err := m.im.Walk(func(p string, n *erofs.Node) (err error) {
		if n.Mode&erofs.TypeMask == erofs.TypeRegular {
			m.runs[p], err = n.Runs()
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(meta.Name(), m.dir, "erofs", unix.MS_RDONLY|unix.MS_NODEV, "device="+data.Name()+opts); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		m.root.Close()
		if err := unix.Unmount(m.dir, 0); err != nil {
			t.Error("unmount:", err)
		}
	})
	fd, err := unix.Open(m.dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	m.root = os.NewFile(uintptr(fd), m.dir)
	return m
}

func (m mounted) look(t *testing.T) []layer.Range {
	t.Helper()
	got, err := resident.Of(m.root, m.im)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// read reads without readahead.
func (m mounted) read(t *testing.T, name string, off, n int64) {
	t.Helper()
	f, err := os.Open(filepath.Join(m.dir, name))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_RANDOM); err != nil {
		t.Fatal(err)
	}
	if _, err := f.ReadAt(make([]byte, n), off); err != nil {
		t.Fatal(err)
	}
}

func (m mounted) at(name string, off int64) int64 {
	for _, r := range m.runs[name] {
		if off >= r.Off && off < r.Off+int64(r.Count)*erofs.BlockSize {
			return int64(r.Block)*erofs.BlockSize + off - r.Off
		}
	}
	return -1
}

// TestWhatWasReadIsResident: exactly the pages that were read, at their places
// in the data file, whichever name of the file was used.
func TestWhatWasReadIsResident(t *testing.T) {
	for what, opts := range map[string]string{"buffered": "", "directio": ",directio"} {
		t.Run(what, func(t *testing.T) {
			m := mount(t, opts)
			if got := m.look(t); len(got) != 0 {
				t.Fatalf("before any read: %v", got)
			}
			m.read(t, "a/second", 1<<20, 8<<10)
			m.read(t, "a/b/deep", 0, 5000)
			m.read(t, "hole", 100<<10-10, 20) // the last of the first run and the first of the hole
			want := []layer.Range{{Off: m.at("big", 1<<20), Len: 8 << 10}, {Off: m.at("a/b/deep", 0), Len: 8 << 10}, {Off: m.at("hole", 96<<10), Len: 4 << 10}}
			slices.SortFunc(want, func(a, b layer.Range) int { return int(a.Off - b.Off) })
			got := m.look(t)
			for _, w := range want {
				if !covers(got, w) {
					t.Errorf("%v is not in %v", w, got)
				}
			}
			// The kernel reads whole folios and may take a little more than was asked for.
			if n := total(got); n > 4*total(want) {
				t.Errorf("%d bytes resident, %d were read: %v", n, total(want), got)
			}
			if again := m.look(t); !slices.Equal(again, got) {
				t.Errorf("looking changed it: %v, was %v", again, got)
			}
		})
	}
}

// TestLookingBringsNoNamesIn: what was never looked up is not looked up for this.
func TestLookingBringsNoNamesIn(t *testing.T) {
	m := mount(t, "")
	for range 3 {
		m.look(t)
	}
	how := unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: 0x20 /* RESOLVE_CACHED */}
	for _, name := range []string{"a", "other", "big"} {
		fd, err := unix.Openat2(int(m.root.Fd()), name, &how)
		if err == nil {
			unix.Close(fd)
			t.Errorf("%s is in the cache of names", name)
		} else if err != unix.EAGAIN {
			t.Error(err)
		}
	}
}

func covers(have []layer.Range, r layer.Range) bool {
	return slices.ContainsFunc(have, func(h layer.Range) bool { return h.Off <= r.Off && r.Off+r.Len <= h.Off+h.Len })
}

func total(all []layer.Range) (n int64) {
	for _, r := range all {
		n += r.Len
	}
	return n
}

// TestReadThroughAnOverlayIsResident: a sandbox sees the layer in a stack, and
// its pages are still those of the layer.
func TestReadThroughAnOverlayIsResident(t *testing.T) {
	m := mount(t, "")
	stack := t.TempDir()
	if err := unix.Mount("none", stack, "overlay", unix.MS_RDONLY, "lowerdir="+m.dir+":"+t.TempDir()); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(stack, 0); err != nil {
			t.Error("unmount:", err)
		}
	}()
	if _, err := os.ReadFile(filepath.Join(stack, "a/b/deep")); err != nil {
		t.Fatal(err)
	}
	if got, want := m.look(t), (layer.Range{Off: m.at("a/b/deep", 0), Len: 8 << 10}); !slices.Equal(got, []layer.Range{want}) {
		t.Errorf("%v, want %v", got, want)
	}
}
