package erofs_test

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/image/erofs"
	"github.com/opendsec/dsec/layer/ondemand/ondemandtest"
)

func openImage(t testing.TB, b built) *erofs.Image {
	t.Helper()
	meta, err := os.ReadFile(b.meta)
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.Open(b.data)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { data.Close() })
	im, err := erofs.Open(bytes.NewReader(meta), int64(len(meta)), data)
	if err != nil {
		t.Fatal(err)
	}
	return im
}

// describe is one line for each name of a tree, whoever reads it.
func describeImage(t testing.TB, im *erofs.Image) string {
	t.Helper()
	var out strings.Builder
	err := im.Walk(func(path string, n *erofs.Node) error {
		xs, err := n.Xattrs()
		if err != nil {
			return err
		}
		what := ""
		size := n.Size
		switch n.Mode & erofs.TypeMask {
		case erofs.TypeRegular:
			r, err := n.Contents()
			if err != nil {
				return err
			}
			b, err := io.ReadAll(r)
			if err != nil {
				return err
			}
			what = sumOf(b)
		case erofs.TypeSymlink:
			what, err = n.Target()
			if err != nil {
				return err
			}
		case erofs.TypeDir:
			size = 0
		}
		fmt.Fprintf(&out, "%q %o %d:%d %d.%09d rdev %d size %d links %d %q", path, n.Mode, n.UID, n.GID, n.Mtime, n.Nsec, n.Rdev, size, n.Nlink, what)
		for _, x := range xs {
			fmt.Fprintf(&out, " %s=%q", x.Name, x.Value)
		}
		out.WriteByte('\n')
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func describeMount(t testing.TB, root string) string {
	t.Helper()
	var out strings.Builder
	var visit func(dir, rel string)
	visit = func(dir, rel string) {
		names, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range names {
			p, path := filepath.Join(dir, d.Name()), filepath.Join(rel, d.Name())
			var st unix.Stat_t
			if err := unix.Lstat(p, &st); err != nil {
				t.Fatal(err)
			}
			what, size, rdev := "", st.Size, uint32(0)
			switch st.Mode & erofs.TypeMask {
			case erofs.TypeRegular:
				b, err := os.ReadFile(p)
				if err != nil {
					t.Fatal(err)
				}
				what = sumOf(b)
			case erofs.TypeSymlink:
				what, err = os.Readlink(p)
				if err != nil {
					t.Fatal(err)
				}
			case erofs.TypeDir:
				size = 0
			case erofs.TypeChar, erofs.TypeBlock:
				rdev = erofs.Rdev(unix.Major(st.Rdev), unix.Minor(st.Rdev))
			}
			fmt.Fprintf(&out, "%q %o %d:%d %d.%09d rdev %d size %d links %d %q", path, st.Mode, st.Uid, st.Gid, st.Mtim.Sec, st.Mtim.Nsec, rdev, size, st.Nlink, what)
			for _, name := range listXattrs(t, p) {
				v := make([]byte, erofs.MaxXattr)
				n, err := unix.Lgetxattr(p, name, v)
				if err != nil {
					t.Fatalf("%s: %s: %v", p, name, err)
				}
				fmt.Fprintf(&out, " %s=%q", name, v[:n])
			}
			out.WriteByte('\n')
			if st.Mode&erofs.TypeMask == erofs.TypeDir {
				visit(p, path)
			}
		}
	}
	visit(root, "")
	return out.String()
}

func listXattrs(t testing.TB, p string) []string {
	t.Helper()
	buf := make([]byte, 64<<10)
	n, err := unix.Llistxattr(p, buf)
	if err != nil {
		t.Fatalf("%s: list attributes: %v", p, err)
	}
	return strings.FieldsFunc(string(buf[:n]), func(r rune) bool { return r == 0 })
}

func sumOf(b []byte) string { return fmt.Sprintf("%x", sha256.Sum256(b)) }

// everything is a tree with one of each thing the format can hold.
func everything(t testing.TB, d *erofs.Data) *erofs.Inode {
	t.Helper()
	root := erofs.NewDir(0o755)
	sparse := make([]byte, 1<<20)
	copy(sparse[200<<10:], "middle")
	copy(sparse[len(sparse)-3:], "end")
	big := make([]byte, 300<<10)
	for i := range big {
		big[i] = byte(i * 7 >> 3)
	}
	for name, content := range map[string][]byte{"empty": nil, "small": []byte("x"), "block": big[:4096], "big": big, "sparse": sparse,
		"zero": make([]byte, 10000), "zeros": make([]byte, 200<<10)} {
		n := file(t, d, content)
		n.UID, n.GID, n.Mtime, n.Nsec = 70000, 80000, 1234567890, 987654321
		link(t, root, name, n)
	}
	root.Child("big").Mode |= 0o4000
	link(t, root, "hard", root.Child("big"))
	sub := erofs.NewDir(0o1777)
	sub.Mtime = -5
	link(t, root, "sub", sub)
	link(t, sub, "hard2", root.Child("big"))
	link(t, sub, "!bang", file(t, d, []byte("!")))
	link(t, sub, "-dash", erofs.NewDir(0o700))
	link(t, sub, "\xff\xfe", file(t, d, []byte("bytes")))
	link(t, sub, strings.Repeat("n", 255), file(t, d, []byte("long")))
	for i, target := range []string{"a", "../big", strings.Repeat("t", 2048), strings.Repeat("t", 2049), strings.Repeat("t", 4000), strings.Repeat("t", 4095)} {
		link(t, root, fmt.Sprintf("link%d", i), &erofs.Inode{Mode: erofs.TypeSymlink | 0o777, Target: target})
	}
	for name, n := range map[string]*erofs.Inode{
		"chr": {Mode: erofs.TypeChar | 0o600, Rdev: erofs.Rdev(300, 70000)}, "blk": {Mode: erofs.TypeBlock | 0o660, Rdev: erofs.Rdev(8, 1)},
		"fifo": {Mode: erofs.TypeFifo | 0o600}, "sock": {Mode: erofs.TypeSocket | 0o600}, "whiteout": {Mode: erofs.TypeChar},
	} {
		link(t, root, name, n)
	}
	acl := "\x02\x00\x00\x00\x01\x00\x06\x00\xff\xff\xff\xff\x04\x00\x04\x00\xff\xff\xff\xff\x20\x00\x04\x00\xff\xff\xff\xff"
	for _, x := range []struct{ file, name, value string }{
		{"small", "user.a", "1"}, {"small", "user.b", ""}, {"small", "user.long", strings.Repeat("v", 60000)},
		{"big", "security.capability", "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"},
		{"sub", "trusted.overlay.opaque", "y"}, {"sub", "system.posix_acl_default", acl}, {"sub", "system.posix_acl_access", acl},
		{"link0", "trusted.note", "on a link"}, {"fifo", "security.x", "on a fifo"},
	} {
		if err := root.Child(x.file).SetXattr(x.name, []byte(x.value)); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

// diffLines reports the lines in which two descriptions differ, shortened.
func diffLines(t testing.TB, nameA, a, nameB, b string) {
	t.Helper()
	as, bs := strings.Split(a, "\n"), strings.Split(b, "\n")
	for i := range max(len(as), len(bs)) {
		la, lb := "", ""
		if i < len(as) {
			la = as[i]
		}
		if i < len(bs) {
			lb = bs[i]
		}
		if la != lb {
			t.Errorf("%s: %.300s\n%s: %.300s", nameA, la, nameB, lb)
		}
	}
}

func TestKernelAndReaderAgreeOnEverything(t *testing.T) {
	f, d := dataFile(t)
	b := write(t, everything(t, d), f, d.Blocks())
	fsck(t, b)
	im := openImage(t, b)
	if err := im.Check(); err != nil {
		t.Error(err)
	}
	ours, kernels := describeImage(t, im), describeMount(t, mount(t, b))
	diffLines(t, "kernel", kernels, "reader", ours)
	if !strings.Contains(ours, `rdev `+fmt.Sprint(erofs.Rdev(300, 70000))) || !strings.Contains(ours, "links 3") {
		t.Errorf("device or links lost:\n%s", ours)
	}
}

// TestOneDevice mounts metadata and data laid behind one another, each from a
// 2 MiB border, as a VM sees them.
func TestOneDevice(t *testing.T) {
	f, d := dataFile(t)
	b := write(t, everything(t, d), f, d.Blocks())
	want := describeImage(t, openImage(t, b))
	meta, err := os.ReadFile(b.meta)
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(b.data)
	if err != nil {
		t.Fatal(err)
	}
	whole := append(meta, make([]byte, (erofs.Align-len(meta)%erofs.Align)%erofs.Align)...)
	flat := filepath.Join(t.TempDir(), "flat")
	if err := os.WriteFile(flat, append(whole, data...), 0o600); err != nil {
		t.Fatal(err)
	}
	got := describeMount(t, mount(t, built{meta: flat}))
	diffLines(t, "two files", want, "one device", got)
}

func TestSameTreeSameBytes(t *testing.T) {
	var metas, datas [2][]byte
	for i := range 2 {
		f, d := dataFile(t)
		root := erofs.NewDir(0o755)
		for _, name := range []string{"c", "a", "b"} {
			link(t, root, name, file(t, d, []byte(name)))
		}
		b := write(t, root, f, d.Blocks())
		metas[i], _ = os.ReadFile(b.meta)
		datas[i], _ = os.ReadFile(b.data)
	}
	if !bytes.Equal(metas[0], metas[1]) || !bytes.Equal(datas[0], datas[1]) || len(metas[0]) == 0 {
		t.Error("two runs differ")
	}
}

// TestE11_ManyLinksOneFile: the contents are there once.
func TestE11_ManyLinksOneFile(t *testing.T) {
	f, d := dataFile(t)
	content := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	n := file(t, d, content)
	root := erofs.NewDir(0o755)
	for i := range 10000 {
		link(t, root, fmt.Sprintf("link%d", i), n)
	}
	b := write(t, root, f, d.Blocks())
	fsck(t, b)
	if total := b.stats.MetaSize + int64(b.blocks)*erofs.BlockSize; total > 2<<20 {
		t.Errorf("10,000 links to 1 MiB take %d bytes", total)
	}
	ondemandtest.EachWay(t, func(t testing.TB) {
		name := filepath.Join(mount(t, b), "link77")
		var st unix.Stat_t
		if err := unix.Stat(name, &st); err != nil || st.Nlink != 10000 {
			t.Errorf("%d links, %v", st.Nlink, err)
		}
		if got, err := os.ReadFile(name); err != nil || !bytes.Equal(got, content) {
			t.Errorf("%d bytes of %d, or others, %v", len(got), len(content), err)
		}
	})
}

// TestHugeSparseFile: a file of 5 GiB with three islands, and one that claims 1 PiB.
func TestHugeSparseFile(t *testing.T) {
	f, d := dataFile(t)
	islands := map[int64]string{0: "first", 4<<30 + 12345: "behind 4 GiB", 5<<30 - 4: "last"}
	runs, err := d.Append(&island{size: 5 << 30, at: islands}, 5<<30)
	if err != nil {
		t.Fatal(err)
	}
	root := erofs.NewDir(0o755)
	link(t, root, "huge", &erofs.Inode{Mode: erofs.TypeRegular | 0o600, Size: 5 << 30, Runs: runs})
	link(t, root, "hole", &erofs.Inode{Mode: erofs.TypeRegular | 0o600, Size: 1 << 50})
	b := write(t, root, f, d.Blocks())
	if b.stats.MetaSize > 160<<20 || d.Blocks() > 100 {
		t.Errorf("metadata %d bytes, data %d blocks", b.stats.MetaSize, d.Blocks())
	}
	m, err := os.Open(filepath.Join(mount(t, b), "huge"))
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	im := openImage(t, b)
	r, err := im.Root()
	if err != nil {
		t.Fatal(err)
	}
	n, err := r.Lookup("huge")
	if err != nil {
		t.Fatal(err)
	}
	ours, err := n.Contents()
	if err != nil {
		t.Fatal(err)
	}
	for off, want := range islands {
		for _, r := range []io.ReaderAt{m, ours} {
			got := make([]byte, len(want))
			if _, err := r.ReadAt(got, off); err != nil || string(got) != want {
				t.Errorf("%T at %d: %q, %v", r, off, got, err)
			}
		}
	}
}

// island reads zeros with some strings in them.
type island struct {
	pos, size int64
	at        map[int64]string
}

func (i *island) Read(p []byte) (int, error) {
	if i.pos >= i.size {
		return 0, io.EOF
	}
	p = p[:min(int64(len(p)), i.size-i.pos)]
	clear(p)
	for off, s := range i.at {
		for k := range len(s) {
			if q := off + int64(k) - i.pos; q >= 0 && q < int64(len(p)) {
				p[q] = s[k]
			}
		}
	}
	i.pos += int64(len(p))
	return len(p), nil
}

func TestCompactDropsWhatNobodyHas(t *testing.T) {
	f, d := dataFile(t)
	root := erofs.NewDir(0o755)
	body := func(i int) []byte { return bytes.Repeat([]byte{byte(i + 1)}, 3000*(i+1)) }
	for i := range 40 {
		n := file(t, d, body(i))
		if i%3 != 0 {
			link(t, root, fmt.Sprint(i), n)
		}
	}
	before := d.Blocks()
	blocks, err := erofs.Compact(f, root)
	if err != nil || blocks >= before {
		t.Fatalf("%d of %d blocks: %v", blocks, before, err)
	}
	b := write(t, root, f, blocks)
	dir := mount(t, b)
	for i := range 40 {
		got, err := os.ReadFile(filepath.Join(dir, fmt.Sprint(i)))
		if i%3 == 0 {
			continue
		}
		if err != nil || !bytes.Equal(got, body(i)) {
			t.Errorf("%d: %v", i, err)
		}
	}
}

// TestSameAsMkfs compares the tree that the kernel shows of our image with the
// one of mkfs.erofs of the same source.
func TestSameAsMkfs(t *testing.T) {
	tool, err := exec.LookPath("mkfs.erofs")
	if err != nil {
		t.Skip("mkfs.erofs is not installed:", err)
	}
	f, d := dataFile(t)
	root := everything(t, d)
	root.Child("sub").Unlink(strings.Repeat("n", 255)) // mkfs.erofs 1.5 cuts the path
	b := write(t, root, f, d.Blocks())
	ours := mount(t, b)
	dir := t.TempDir()
	their := built{meta: filepath.Join(dir, "meta"), data: filepath.Join(dir, "data"), blocks: 1}
	out, err := exec.Command(tool, "-d0", "--chunksize=65536", "--blobdev="+their.data, "--preserve-mtime", their.meta, ours).CombinedOutput()
	if err != nil {
		t.Fatalf("mkfs.erofs: %v\n%s", err, out)
	}
	want, got := describeMount(t, mount(t, their)), describeMount(t, ours)
	diffLines(t, "mkfs.erofs", want, "ours", got)
}

func FuzzOpen(f *testing.F) {
	dataF, d := dataFile(f)
	b := write(f, everything(f, d), dataF, d.Blocks())
	meta, err := os.ReadFile(b.meta)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(meta, uint32(0), byte(0))
	r := rand.New(rand.NewPCG(1, 2))
	for range 50 {
		f.Add(meta, r.Uint32(), byte(r.Uint32()))
	}
	f.Fuzz(func(t *testing.T, meta []byte, at uint32, v byte) {
		if len(meta) == 0 || len(meta) > 1<<20 {
			return
		}
		meta = bytes.Clone(meta)
		meta[int(at)%len(meta)] ^= v
		im, err := erofs.Open(bytes.NewReader(meta), int64(len(meta)), nil)
		if err != nil {
			return
		}
		_ = im.Check()
		_ = im.Walk(func(_ string, n *erofs.Node) error {
			_, _ = n.Xattrs()
			_, _ = n.Runs()
			return nil
		})
	})
}
