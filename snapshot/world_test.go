package snapshot

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/image/erofs"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/rootfs"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// stack is a disk on layers, mounted as a sandbox has it but for the ids.
type stack struct {
	t      testing.TB
	mounts *rootfs.Mounts
	layers []layer.Local
	dir    *os.File // holds upper and work
	root   *os.File // the overlay
}

func openMounts(t testing.TB) *rootfs.Mounts {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("overlays need root and this test runs without it")
	}
	k := linux.NewKeeper()
	m, err := rootfs.Open(t.Context(), rootfs.Options{Keeper: k})
	must(t, err)
	t.Cleanup(func() {
		must(t, m.Close())
		k.Close()
	})
	return m
}

// newStack mounts an empty disk on layers.
func newStack(t testing.TB, m *rootfs.Mounts, layers ...layer.Local) *stack {
	t.Helper()
	s := &stack{t: t, mounts: m, layers: layers}
	d, err := os.Open(t.TempDir())
	must(t, err)
	s.dir = d
	must(t, rootfs.PrepareDir(d, 0, 0))
	must(t, m.Use(t.Context(), d.Name(), layers))
	s.root, err = m.Stack(rootfs.Root{User: d.Name(), Layers: s.digests(), Dir: d})
	must(t, err)
	t.Cleanup(func() { s.root.Close(); d.Close(); m.Unuse(d.Name()) })
	return s
}

func (s *stack) digests() (all []layer.Digest) {
	for _, l := range s.layers {
		all = append(all, l.Digest)
	}
	return all
}

// path is a path of this process to a file of the mounted root.
func (s *stack) path(name string) string {
	return fmt.Sprintf("/proc/self/fd/%d/%s", s.root.Fd(), name)
}

func (s *stack) write(name, content string) {
	s.t.Helper()
	must(s.t, os.MkdirAll(filepath.Dir(s.path(name)), 0o755))
	must(s.t, os.WriteFile(s.path(name), []byte(content), 0o644))
}

func (s *stack) upper() *os.File {
	u, err := os.Open(filepath.Join(s.dir.Name(), rootfs.Upper))
	must(s.t, err)
	s.t.Cleanup(func() { u.Close() })
	return u
}

func (s *stack) source() Source {
	return Source{Upper: s.upper(), IDs: 65536, View: func() (*os.File, error) {
		return s.mounts.View(rootfs.Root{User: s.dir.Name(), Layers: s.digests(), Dir: s.dir})
	}}
}

// made is a pair of files that a layer was written into.
type made struct {
	layer.Local
	Result
	meta, data []byte
}

// pack packs the disk, checks what was written, and returns it as a layer.
func (s *stack) pack(o Options) made {
	s.t.Helper()
	m, err := packInto(s.t, s.source(), o)
	must(s.t, err)
	return m
}

func packInto(t testing.TB, src Source, o Options) (made, error) {
	return written(t, func(f image.Files) (Result, error) { return Pack(t.Context(), src, f, o) })
}

// written has two files written, reads them back and describes them.
func written(t testing.TB, write func(image.Files) (Result, error)) (m made, err error) {
	t.Helper()
	dir := t.TempDir()
	var f image.Files
	f.Meta, err = os.Create(dir + "/meta")
	must(t, err)
	defer f.Meta.Close()
	f.Data, err = os.Create(dir + "/data")
	must(t, err)
	defer f.Data.Close()
	if m.Result, err = write(f); err != nil {
		return m, err
	}
	m.meta, err = os.ReadFile(dir + "/meta")
	must(t, err)
	m.data, err = os.ReadFile(dir + "/data")
	must(t, err)
	im, err := erofs.Open(f.Meta, int64(len(m.meta)), f.Data)
	must(t, err)
	must(t, im.Check())
	if int64(len(m.meta)) != m.MetaSize || int64(len(m.data)) != m.DataSize || im.DataBlocks()*erofs.BlockSize != uint64(m.DataSize) {
		t.Fatalf("files of %d and %d bytes, result %+v", len(m.meta), len(m.data), m.Result)
	}
	m.Local = layer.Local{Meta: dir + "/meta", Info: layer.Info{MetaSize: m.MetaSize, DataSize: m.DataSize,
		Digest: layer.FromSum(sumOf(m.meta, m.data))}}
	if m.DataSize > 0 {
		m.Data = dir + "/data"
	}
	return m, nil
}

func sumOf(parts ...[]byte) []byte {
	h := sha256.New()
	for _, p := range parts {
		h.Write(p)
	}
	return h.Sum(nil)
}

// treeLayer makes a layer of a directory that fill fills.
func treeLayer(t testing.TB, fill func(dir string)) layer.Local {
	t.Helper()
	dir := t.TempDir()
	must(t, os.Chmod(dir, 0o755))
	fill(dir)
	m, err := written(t, func(f image.Files) (Result, error) {
		loc, err := image.Locate("dir:" + dir)
		if err != nil {
			return Result{}, err
		}
		r, err := image.Convert(t.Context(), loc, f, image.Options{})
		return Result{MetaSize: r.MetaSize, DataSize: r.DataSize}, err
	})
	must(t, err)
	return m.Local
}

// tree describes everything below a root, a line for each name.
func tree(t testing.TB, root string, skip ...string) map[string]string {
	t.Helper()
	out := map[string]string{}
	group := map[[2]uint64]int{}
	err := filepath.WalkDir(root+"/.", func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, p)
		if err != nil || rel == "." || slices.Contains(skip, rel) {
			return err // a root shows its own upper's attributes
		}
		var st unix.Stat_t
		if err := unix.Lstat(p, &st); err != nil {
			return err
		}
		line := fmt.Sprintf("%o %d:%d %d.%09d", st.Mode, st.Uid, st.Gid, st.Mtim.Sec, st.Mtim.Nsec)
		if st.Mode&unix.S_IFMT != unix.S_IFDIR {
			line += fmt.Sprintf(" links %d", st.Nlink)
			if st.Nlink > 1 {
				k := [2]uint64{st.Dev, st.Ino}
				if group[k] == 0 {
					group[k] = len(group) + 1
				}
				line += fmt.Sprintf(" group %d", group[k])
			}
		}
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			line += fmt.Sprintf(" size %d %s", st.Size, contentOf(t, p))
		case unix.S_IFLNK:
			to, err := os.Readlink(p)
			must(t, err)
			line += " → " + to
		case unix.S_IFCHR, unix.S_IFBLK:
			line += fmt.Sprintf(" dev %d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev))
		}
		out[rel] = line + xattrsOf(t, p)
		return nil
	})
	must(t, err)
	return out
}

func contentOf(t testing.TB, p string) string {
	f, err := os.Open(p)
	must(t, err)
	defer f.Close()
	h := sha256.New()
	_, err = io.Copy(h, f)
	must(t, err)
	return fmt.Sprintf("%x", h.Sum(nil)[:8])
}

func xattrsOf(t testing.TB, p string) string {
	buf := make([]byte, 64<<10)
	n, err := unix.Llistxattr(p, buf)
	if errors.Is(err, unix.ENOTSUP) {
		return ""
	}
	must(t, err)
	var all []string
	for name := range strings.SplitSeq(strings.TrimRight(string(buf[:n]), "\x00"), "\x00") {
		if name == "" {
			continue
		}
		v := make([]byte, 64<<10)
		k, err := unix.Lgetxattr(p, name, v)
		must(t, err)
		all = append(all, fmt.Sprintf(" %s=%x", name, sumOf(v[:k])[:6]))
	}
	slices.Sort(all)
	return strings.Join(all, "")
}

// sameTrees reports every difference.
func sameTrees(t testing.TB, want, got map[string]string) {
	t.Helper()
	for p, w := range want {
		if g, ok := got[p]; !ok {
			t.Errorf("%s is missing: %s", p, w)
		} else if g != w {
			t.Errorf("%s:\n got %s\nwant %s", p, g, w)
		}
	}
	for p, g := range got {
		if _, ok := want[p]; !ok {
			t.Errorf("%s is there: %s", p, g)
		}
	}
}

type layerOf struct{ layer.Local }

func locals(all []layerOf) (out []layer.Local) {
	for _, l := range all {
		out = append(out, l.Local)
	}
	return out
}

func filesOf(meta, data *os.File) image.Files { return image.Files{Meta: meta, Data: data} }
