package snapshot

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image/erofs"
)

// fillBase makes a tree with something for each change to change.
func fillBase(dir string) {
	for _, d := range []string{"etc", "gone/deep", "replaced/x", "moved/a/b", "deeper/moved/in", "merged/sub", "kept", "swap/one"} {
		_ = os.MkdirAll(filepath.Join(dir, d), 0o755)
	}
	for name, text := range map[string]string{"etc/passwd": "root", "etc/hosts": "base", "gone/deep/f": "x", "gone1": "1", "replaced/x/y": "y", "moved/a/b/f": "lower",
		"moved/g": "g", "deeper/moved/in/f": "in", "merged/f": "f", "merged/sub/g": "g", "kept/k": "k", "swap/one/f": "1", "file": "to be a directory"} {
		_ = os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644)
	}
	_ = os.Link(dir+"/moved/g", dir+"/moved/a/h")
	_ = unix.Lsetxattr(dir+"/moved/g", "user.lower", []byte("v"), 0)
	_ = os.Chown(dir+"/moved/a", 1000, 1001)
}

// nasty changes everything that can be changed.
func nasty(s *stack) {
	t, p := s.t, s.path
	t.Helper()
	must(t, os.RemoveAll(p("gone")))
	must(t, os.Remove(p("gone1")))
	must(t, os.RemoveAll(p("replaced")))
	s.write("replaced/new", "new")
	must(t, os.Rename(p("moved"), p("renamed"))) // a directory of the lower: a redirect
	s.write("renamed/a/added", "added")
	must(t, os.Remove(p("renamed/a/b/f")))
	must(t, os.Rename(p("deeper/moved"), p("renamed/inside"))) // into another renamed one
	must(t, os.MkdirAll(p("moved"), 0o700))                    // the old name again
	s.write("moved/own", "own")
	must(t, os.Rename(p("swap/one"), p("swap/two")))
	must(t, os.Remove(p("file")))
	s.write("file/below", "was a file")
	s.write("merged/f", "changed")
	must(t, os.Chmod(p("merged/sub"), 0o2775))
	must(t, os.Chmod(p("."), 0o711))

	s.write("hard1", "hard")
	must(t, os.Link(p("hard1"), p("hard2")))
	must(t, os.Link(p("hard1"), p("renamed/hard3")))
	must(t, os.Link(p("hard1"), p("replaced/hard4")))
	must(t, os.Symlink("/etc/passwd", p("absolute")))
	must(t, os.Symlink(strings.Repeat("long/", 600), p("long")))
	must(t, os.Symlink("dangling", p("dangling")))
	must(t, unix.Mkfifo(p("fifo"), 0o640))
	must(t, unix.Mknod(p("char"), unix.S_IFCHR|0o600, int(unix.Mkdev(240, 70000))))
	must(t, unix.Mknod(p("block"), unix.S_IFBLK|0o660, int(unix.Mkdev(7, 3))))
	must(t, unix.Lchown(p("absolute"), 12, 34))
	s.write("setuid", "#!/bin/sh\n")
	must(t, os.Chown(p("setuid"), 1000, 100))
	must(t, unix.Chmod(p("setuid"), 0o6755))
	s.write("caps", "program")
	must(t, unix.Lsetxattr(p("caps"), "security.capability", capV2, 0))
	s.write("attrs", "x")
	for i := range 20 {
		must(t, unix.Lsetxattr(p("attrs"), fmt.Sprintf("user.k%d", i), bytes.Repeat([]byte{byte(i)}, i*11), 0))
	}
	must(t, unix.Lsetxattr(p("attrs"), "user.overlay.opaque", []byte("y"), 0)) // looks like overlayfs' own
	must(t, unix.Lremovexattr(p("attrs"), "user.overlay.opaque"))
	acl(t, p("attrs"), "system.posix_acl_access", 1000)
	must(t, os.Mkdir(p("acldir"), 0o755))
	acl(t, p("acldir"), "system.posix_acl_default", 2000)
	sparse(t, p("sparse"))
	s.write("empty", "")
	must(t, os.Mkdir(p("emptydir"), 0o1777))
	for i := range 300 {
		s.write(fmt.Sprintf("many/%03d-%s", i, strings.Repeat("n", 200)), fmt.Sprint(i))
	}
	s.write("bad\xffname/\x01\n", "odd")
	s.write(".wh.real", "a file that is really called so")
	must(t, os.Chtimes(p("hard1"), time.Unix(1, 2), time.Unix(-5, 123456789)))
	must(t, os.Chtimes(p("merged"), time.Time{}, time.Unix(1e9, 987654321)))
}

var capV2 = append([]byte{1, 0, 0, 2, 0, 4, 0, 0}, make([]byte, 12)...)

func acl(t testing.TB, name, key string, id uint32) {
	t.Helper()
	v := binary.LittleEndian.AppendUint32(nil, 2)
	for _, e := range []struct {
		tag, perm uint16
		id        uint32
	}{{1, 6, ^uint32(0)}, {2, 7, id}, {4, 4, ^uint32(0)}, {8, 5, id + 1}, {16, 7, ^uint32(0)}, {32, 0, ^uint32(0)}} {
		v = binary.LittleEndian.AppendUint16(v, e.tag)
		v = binary.LittleEndian.AppendUint16(v, e.perm)
		v = binary.LittleEndian.AppendUint32(v, e.id)
	}
	must(t, unix.Lsetxattr(name, key, v, 0))
}

// sparse makes a file with holes before, between and behind its data.
func sparse(t testing.TB, name string) {
	t.Helper()
	f, err := os.Create(name)
	must(t, err)
	defer f.Close()
	for _, off := range []int64{1 << 20, 5<<20 + 123, 60 << 20} {
		_, err := f.WriteAt([]byte("data"), off)
		must(t, err)
	}
	must(t, f.Truncate(70<<20+1))
}

func TestAPackedDiskShowsWhatTheSandboxSaw(t *testing.T) {
	m := openMounts(t)
	base := treeLayer(t, fillBase)
	s := newStack(t, m, base)
	nasty(s)
	want := tree(t, s.path("."))
	packed := s.pack(Options{})
	again := newStack(t, m, base, packed.Local)
	sameTrees(t, want, tree(t, again.path(".")))
	if root := rootOf(t, packed); root.Mode&0o7777 != 0o711 {
		t.Errorf("the root has mode %o", root.Mode)
	}
	if packed.DataSize > 4<<20 {
		t.Errorf("%d bytes of data: the holes are not holes", packed.DataSize)
	}
	// Not one of overlayfs' own attributes but opaque, and no whiteout where nothing is hidden.
	im, err := erofs.Open(bytes.NewReader(packed.meta), packed.MetaSize, nil)
	must(t, err)
	must(t, im.Walk(func(p string, n *erofs.Node) error {
		xs, err := n.Xattrs()
		for _, x := range xs {
			if isOverlays(x.Name) && (x.Name != opaqueXattr || n.Mode&erofs.TypeMask != erofs.TypeDir) {
				t.Errorf("/%s has %s", p, x.Name)
			}
		}
		if n.IsWhiteout() && (strings.HasPrefix(p, "renamed/") || strings.HasPrefix(p, "replaced/")) {
			t.Errorf("/%s is a whiteout in a directory that shows nothing from below", p)
		}
		return err
	}))
	// The same disk gives the same bytes.
	if twice := s.pack(Options{}); !bytes.Equal(twice.meta, packed.meta) || !bytes.Equal(twice.data, packed.data) {
		t.Error("packed twice, two layers")
	}
}

func TestPackedLayersStack(t *testing.T) {
	m := openMounts(t)
	layers := []layerOf{{treeLayer(t, fillBase)}}
	for i := range 3 {
		s := newStack(t, m, locals(layers)...)
		switch i {
		case 0:
			nasty(s)
		case 1:
			must(t, os.Remove(s.path("renamed/hard3"))) // its other names stay in the layer below
			must(t, os.Rename(s.path("renamed"), s.path("again")))
			must(t, os.RemoveAll(s.path("many")))
			must(t, os.Remove(s.path("file/below")))
		case 2:
			s.write("gone/back", "back")
			s.write("many/one", "one")
		}
		want := tree(t, s.path("."))
		layers = append(layers, layerOf{s.pack(Options{}).Local})
		sameTrees(t, want, tree(t, newStack(t, m, locals(layers)...).path(".")))
	}
}

func TestIDsBecomeThoseOfTheSandbox(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("owners need root and this test runs without it")
	}
	const base = 700_000_000
	dir := t.TempDir()
	must(t, os.Chown(dir, base, base))
	name := dir + "/f"
	must(t, os.WriteFile(name, nil, 0o644))
	must(t, os.Chown(name, base+1000, base+65535))
	acl(t, name, "system.posix_acl_access", base+7)
	v3 := append(append([]byte{}, capV2...), binary.LittleEndian.AppendUint32(nil, base)...)
	v3[3] = 3
	must(t, unix.Lsetxattr(name, "security.capability", v3, 0))
	must(t, os.WriteFile(dir+"/stranger", nil, 0o644))
	must(t, os.Chown(dir+"/stranger", 5_000_000, 12))
	up, err := os.Open(dir)
	must(t, err)
	defer up.Close()
	got, err := packInto(t, Source{Upper: up, Base: base, IDs: 65536}, Options{})
	must(t, err)
	root := rootOf(t, got)
	f, err := root.Lookup("f")
	must(t, err)
	s, err := root.Lookup("stranger")
	must(t, err)
	if root.UID != 0 || f.UID != 1000 || f.GID != 65535 || s.UID != 65534 || s.GID != 12 {
		t.Errorf("root %d, f %d:%d, stranger %d:%d", root.UID, f.UID, f.GID, s.UID, s.GID)
	}
	xs, err := f.Xattrs()
	must(t, err)
	for _, x := range xs {
		switch x.Name {
		case "security.capability":
			if !bytes.Equal(x.Value, capV2) {
				t.Errorf("capabilities %x", x.Value)
			}
		case "system.posix_acl_access":
			if id := binary.LittleEndian.Uint32(x.Value[4+8+4:]); id != 7 {
				t.Errorf("ACL of user %d", id)
			}
		}
	}
	if len(xs) != 2 {
		t.Errorf("attributes %v", xs)
	}
}

// TestHostileDisk packs a directory while names in it change their meaning,
// grow and shrink, and looks for what must not be followed or waited for.
func TestHostileDisk(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("a pack needs root and this test runs without it")
	}
	outside := filepath.Join(t.TempDir(), "outside")
	secret := "what is outside of the disk"
	must(t, os.MkdirAll(outside, 0o755))
	must(t, os.WriteFile(outside+"/f", []byte(strings.Repeat(secret, 400)), 0o644))
	dir := t.TempDir()
	must(t, os.WriteFile(dir+"/swap", []byte("inside"), 0o644))
	must(t, os.MkdirAll(dir+"/d/e", 0o755))
	must(t, unix.Mkfifo(dir+"/fifo", 0o644))
	stop, wg := make(chan struct{}), sync.WaitGroup{}
	defer func() { close(stop); wg.Wait() }()
	wg.Go(func() {
		r := rand.New(rand.NewPCG(1, 2))
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			shift(dir, outside, r)
		}
	})
	up, err := os.Open(dir)
	must(t, err)
	defer up.Close()
	packed := 0
	for range 300 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		got, err := packInto(t, Source{Upper: up, IDs: 65536}, Options{})
		cancel()
		if ctx.Err() == context.DeadlineExceeded {
			t.Fatal("it waits")
		}
		switch {
		case err == nil:
			packed++
			if bytes.Contains(got.data, []byte(secret)) {
				t.Fatal("what is outside is in the layer")
			}
		case dsec.ClassOf(err) == dsec.Invalid || dsec.ClassOf(err) == dsec.Internal || dsec.ClassOf(err) == dsec.NotFound:
		default:
			t.Fatal(err)
		}
	}
	if packed == 0 {
		t.Error("it was never packed")
	}
}

// shift gives a name another meaning.
func shift(dir, outside string, r *rand.Rand) {
	name := dir + "/swap"
	switch r.IntN(8) {
	case 0, 1:
		_ = os.Remove(dir + "/new")
		_ = os.Symlink(outside+"/f", dir+"/new")
		_ = os.Rename(dir+"/new", name)
	case 2:
		_ = os.Remove(dir + "/new")
		_ = unix.Mkfifo(dir+"/new", 0o644)
		_ = os.Rename(dir+"/new", name)
	case 3, 4:
		_ = os.WriteFile(dir+"/new", bytes.Repeat([]byte("grow"), r.IntN(100_000)), 0o644)
		_ = os.Rename(dir+"/new", name)
	case 5:
		_ = os.Truncate(name, int64(r.IntN(200_000)))
	case 6: // a directory on the way becomes a link out
		_ = os.Rename(dir+"/d", dir+"/was")
		_ = os.Symlink(outside, dir+"/d")
	case 7:
		_ = os.Remove(dir + "/d")
		_ = os.Rename(dir+"/was", dir+"/d")
	}
}

func TestWhatIsTooMuchIsAnErrorThatSaysWhat(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("a pack needs root and this test runs without it")
	}
	dir, err := os.MkdirTemp("/dev/shm", "dsec-pack-") // where a file can seem as large as one likes
	must(t, err)
	defer os.RemoveAll(dir)
	up, err := os.Open(dir)
	must(t, err)
	defer up.Close()
	refused := func(what string, o Options) {
		t.Helper()
		_, err := packInto(t, Source{Upper: up, IDs: 65536}, o)
		if dsec.ClassOf(err) != dsec.Invalid || !strings.Contains(err.Error(), what) {
			t.Errorf("want an error with %q, got %v", what, err)
		}
	}
	for i := range 100 {
		must(t, os.WriteFile(fmt.Sprintf("%s/%d", dir, i), nil, 0o644))
	}
	refused("more than 50 names", Options{MaxEntries: 50})
	must(t, os.Truncate(dir+"/7", maxFile+1))
	refused("/7: ", Options{})
	must(t, os.Remove(dir+"/7"))
	must(t, os.Symlink("x", dir+"/7"))
	_, err = packInto(t, Source{Upper: up, IDs: 65536}, Options{})
	must(t, err)
}

// TestDeepAndWide: a tree deeper than a path of the kernel, and a directory of
// more names than one reading returns, with few descriptors.
func TestDeepAndWide(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("a pack needs root and this test runs without it")
	}
	dir := t.TempDir()
	must(t, os.Mkdir(dir+"/wide", 0o755))
	for i := range 5000 {
		must(t, os.WriteFile(fmt.Sprintf("%s/wide/%d", dir, i), nil, 0o644))
	}
	const depth, part = 60, 200
	at, err := os.Open(dir)
	must(t, err)
	for range depth { // 12,000 bytes
		must(t, unix.Mkdirat(int(at.Fd()), strings.Repeat("d", part), 0o755))
		next, err := openDir(at, strings.Repeat("d", part))
		must(t, err)
		at.Close()
		at = next
	}
	at.Close()
	up, err := os.Open(dir)
	must(t, err)
	defer up.Close()
	got, err := packInto(t, Source{Upper: up, IDs: 65536}, Options{})
	must(t, err)
	if got.Entries != 5000+depth+2 {
		t.Errorf("%d inodes", got.Entries)
	}
}

func TestACancelledPackEnds(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("a pack needs root and this test runs without it")
	}
	dir := t.TempDir()
	must(t, os.WriteFile(dir+"/f", nil, 0o644))
	up, err := os.Open(dir)
	must(t, err)
	defer up.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	f, err := os.CreateTemp(t.TempDir(), "")
	must(t, err)
	defer f.Close()
	_, err = Pack(ctx, Source{Upper: up, IDs: 65536}, filesOf(f, f), Options{})
	if dsec.ClassOf(err) != dsec.Canceled {
		t.Error(err)
	}
}

// TestAHugeSparseFileCostsWhatItHolds: the units in which holes are kept grow
// with the file; neither time nor the layer does.
func TestAHugeSparseFileCostsWhatItHolds(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("a pack needs root and this test runs without it")
	}
	dir, err := os.MkdirTemp("/dev/shm", "dsec-pack-")
	must(t, err)
	defer os.RemoveAll(dir)
	f, err := os.Create(dir + "/f")
	must(t, err)
	defer f.Close()
	at := []int64{5 << 20, 3<<30 + 77, 700 << 30, 1<<40 - 1}
	for _, off := range at {
		_, err := f.WriteAt([]byte{42}, off)
		must(t, err)
	}
	up, err := os.Open(dir)
	must(t, err)
	defer up.Close()
	got, err := packInto(t, Source{Upper: up, IDs: 65536}, Options{})
	must(t, err)
	if got.DataSize > 4*32<<20 { // the unit of a file of 1 TiB
		t.Errorf("%d bytes of data for four", got.DataSize)
	}
	im, err := erofs.Open(bytes.NewReader(got.meta), got.MetaSize, bytes.NewReader(got.data))
	must(t, err)
	root, err := im.Root()
	must(t, err)
	n, err := root.Lookup("f")
	must(t, err)
	r, err := n.Contents()
	must(t, err)
	if r.Size() != 1<<40 {
		t.Errorf("size %d", r.Size())
	}
	for _, off := range at {
		b := make([]byte, 3)
		k, err := r.ReadAt(b[:min(3, 1<<40-off)], off)
		if b[0] != 42 || k > 1 && b[1] != 0 {
			t.Errorf("at %d: %v %v", off, b, err)
		}
	}
	// What is scattered too widely would fill the store.
	for off := int64(0); off < 1<<40; off += 16 << 20 {
		_, err := f.WriteAt([]byte{1}, off)
		must(t, err)
		if off > 3<<30 {
			break
		}
	}
	if _, err := packInto(t, Source{Upper: up, IDs: 65536}, Options{}); dsec.ClassOf(err) != dsec.Invalid || !strings.Contains(err.Error(), "scattered") {
		t.Errorf("scattered: %v", err)
	}
}

func rootOf(t testing.TB, m made) *erofs.Node {
	t.Helper()
	im, err := erofs.Open(bytes.NewReader(m.meta), m.MetaSize, nil)
	must(t, err)
	root, err := im.Root()
	must(t, err)
	return root
}
