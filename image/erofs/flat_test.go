package erofs_test

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/opendsec/dsec/image/erofs"
)

// TestFlatShowsTheSame has the kernel and fsck.erofs judge one file that is all.
func TestFlatShowsTheSame(t *testing.T) {
	f, d := dataFile(t)
	root := erofs.NewDir(0o755)
	sub := erofs.NewDir(0o700)
	link(t, root, "sub", sub)
	contents := map[string][]byte{"empty": nil, "small": []byte("small\n"), "block": bytes.Repeat([]byte{7}, erofs.BlockSize),
		"holes": append(make([]byte, 1<<20), "end"...), "large": bytes.Repeat([]byte("0123456789abcdef"), 1<<16)}
	for name, b := range contents {
		runs, err := d.Append(bytes.NewReader(b), int64(len(b)))
		if err != nil {
			t.Fatal(err)
		}
		in := &erofs.Inode{Mode: erofs.TypeRegular | 0o644, UID: 1000, Size: int64(len(b)), Runs: runs}
		link(t, sub, name, in)
		if name == "small" {
			link(t, root, "hard", in)
		}
	}
	link(t, root, "link", &erofs.Inode{Mode: erofs.TypeSymlink | 0o777, Target: "sub/small"})
	flat, err := os.Create(filepath.Join(t.TempDir(), "flat"))
	if err != nil {
		t.Fatal(err)
	}
	defer flat.Close()
	if _, err := erofs.WriteFlat(flat, root, f); err != nil {
		t.Fatal(err)
	}
	b := built{meta: flat.Name()}
	fsck(t, b)
	dir := mount(t, b)
	for name, want := range contents {
		got, err := os.ReadFile(filepath.Join(dir, "sub", name))
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: %d bytes, want %d: %v", name, len(got), len(want), err)
		}
	}
	for _, name := range []string{"hard", "link"} {
		if got, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(got) != "small\n" {
			t.Errorf("%s: %q %v", name, got, err)
		}
	}
	one, err1 := os.Stat(filepath.Join(dir, "hard"))
	two, err2 := os.Stat(filepath.Join(dir, "sub/small"))
	if err1 != nil || err2 != nil || !os.SameFile(one, two) {
		t.Errorf("names of one file are two: %v %v", err1, err2)
	}
}
