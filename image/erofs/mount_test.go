package erofs_test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/image/erofs"
	"github.com/opendsec/dsec/layer/ondemand/ondemandtest"
)

// built is a pair of files made by a test.
type built struct {
	meta, data string
	blocks     uint64
	stats      erofs.Stats
}

// build writes root, whose contents are in the data file already.
func write(t testing.TB, root *erofs.Inode, data *os.File, blocks uint64) built {
	t.Helper()
	meta, err := os.Create(filepath.Join(t.TempDir(), "meta"))
	if err != nil {
		t.Fatal(err)
	}
	defer meta.Close()
	st, err := erofs.Write(meta, root, blocks)
	if err != nil {
		t.Fatal(err)
	}
	return built{meta: meta.Name(), data: data.Name(), blocks: blocks, stats: st}
}

func dataFile(t testing.TB) (*os.File, *erofs.Data) {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "data"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f, erofs.NewData(f)
}

// mount lets the kernel judge an image and returns where it is.
func mount(t testing.TB, b built) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root: uid is", os.Geteuid())
	}
	opts := ""
	if b.blocks > 0 {
		opts = "device=" + ondemandtest.Device(t, b.meta, b.data)
	}
	dir := t.TempDir()
	if err := unix.Mount(b.meta, dir, "erofs", unix.MS_RDONLY|unix.MS_NODEV, opts); err != nil {
		t.Fatalf("mount: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error("unmount:", err)
		}
	})
	return dir
}

// fsck lets fsck.erofs judge an image.
func fsck(t testing.TB, b built) {
	t.Helper()
	tool, err := exec.LookPath("fsck.erofs")
	if err != nil {
		t.Skip("fsck.erofs is not installed:", err)
	}
	args := []string{"-d3", "--extract"}
	if b.blocks > 0 {
		args = append(args, "--device="+b.data)
	}
	out, err := exec.Command(tool, append(args, b.meta)...).CombinedOutput()
	if err != nil || !strings.Contains(string(out), "No errors found") {
		t.Errorf("fsck.erofs: %v\n%s", err, out)
	}
}

func file(t testing.TB, d *erofs.Data, content []byte) *erofs.Inode {
	t.Helper()
	runs, err := d.Append(bytes.NewReader(content), int64(len(content)))
	if err != nil {
		t.Fatal(err)
	}
	return &erofs.Inode{Mode: erofs.TypeRegular | 0o644, Size: int64(len(content)), Runs: runs}
}

func link(t testing.TB, dir *erofs.Inode, name string, n *erofs.Inode) {
	t.Helper()
	if err := dir.Link(name, n); err != nil {
		t.Fatal(err)
	}
}

// TestXattrSizes sweeps the sizes of attributes, since the chunk indexes that
// follow them must be aligned whatever they take.
func TestXattrSizes(t *testing.T) {
	f, d := dataFile(t)
	root := erofs.NewDir(0o755)
	for size := range 65 {
		n := file(t, d, bytes.Repeat([]byte{byte(size + 1)}, 5000+size))
		if err := n.SetXattr("user.x", bytes.Repeat([]byte("v"), size)); err != nil {
			t.Fatal(err)
		}
		link(t, root, fmt.Sprintf("f%d", size), n)
	}
	b := write(t, root, f, d.Blocks())
	fsck(t, b)
	dir := mount(t, b)
	for size := range 65 {
		p := filepath.Join(dir, fmt.Sprintf("f%d", size))
		got, err := os.ReadFile(p)
		if err != nil || !bytes.Equal(got, bytes.Repeat([]byte{byte(size + 1)}, 5000+size)) {
			t.Errorf("attribute of %d bytes: content: %v", size, err)
		}
		buf := make([]byte, 128)
		n, err := unix.Getxattr(p, "user.x", buf)
		if err != nil || n != size {
			t.Errorf("attribute of %d bytes: got %d, %v", size, n, err)
		}
	}
}

func TestLargeDirectories(t *testing.T) {
	for _, count := range []int{0, 1, 30, 100, 3000, 20000} {
		t.Run(fmt.Sprint(count), func(t *testing.T) {
			f, d := dataFile(t)
			root := erofs.NewDir(0o755)
			sub := erofs.NewDir(0o711)
			link(t, root, "d", sub)
			for i := range count {
				link(t, sub, fmt.Sprintf("%d-%s", i, strings.Repeat("n", i%200)), &erofs.Inode{Mode: erofs.TypeFifo | 0o600})
			}
			b := write(t, root, f, d.Blocks())
			fsck(t, b)
			dir := mount(t, b)
			names, err := os.ReadDir(filepath.Join(dir, "d"))
			if err != nil || len(names) != count {
				t.Fatalf("%d names, want %d: %v", len(names), count, err)
			}
			for i := range count {
				name := fmt.Sprintf("%d-%s", i, strings.Repeat("n", i%200))
				if _, err := os.Lstat(filepath.Join(dir, "d", name)); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := os.Lstat(filepath.Join(dir, "d", "zz")); !os.IsNotExist(err) {
				t.Errorf("a name that is not there: %v", err)
			}
		})
	}
}
