package boot

import (
	"bytes"
	"errors"
	"flag"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
)

var update = flag.Bool("update", false, "write the golden files anew")

func tiny(t *testing.T) []byte {
	t.Helper()
	var b bytes.Buffer
	err := writeInitramfs(&b, []File{{Name: "init", Mode: 0o755, Content: []byte("#!/bin/sh\n")}, {Name: "etc/passwd", Mode: 0o644, Content: []byte("root\n")}},
		[]File{{Name: "virtio", Content: []byte("one")}, {Name: "virtio_ring", Content: []byte("seven b")}})
	if err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestTheArchiveIsTheGoldenOne(t *testing.T) {
	const golden = "testdata/initramfs-v1.cpio"
	got := tiny(t)
	if *update {
		if err := os.WriteFile(golden, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("not the bytes of %s: the number of the format has to change with them (%v)", golden, err)
	}
}

// The real tool reads it, and the second of two is read over the first.
func TestTheRealToolReadsTheArchive(t *testing.T) {
	cmd := exec.Command("cpio", "-tvn", "--quiet")
	cmd.Stdin = bytes.NewReader(tiny(t))
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("cpio: %v: %s", err, out)
	}
	var got []string
	for line := range strings.Lines(string(out)) {
		w := strings.Fields(line)
		got = append(got, w[0]+" "+w[2]+":"+w[3]+" "+w[len(w)-1])
	}
	want := "drwxr-xr-x 0:0 dev\ndrwxr-xr-x 0:0 mnt\ndrwxr-xr-x 0:0 proc\ndrwxr-xr-x 0:0 root\ndrwxr-xr-x 0:0 run\ndrwxr-xr-x 0:0 sys\ndrwxr-xr-x 0:0 tmp\n" +
		"crw------- 0:0 dev/console\ndrwxr-xr-x 0:0 modules\n-rw-r--r-- 0:0 modules/virtio.ko\n-rw-r--r-- 0:0 modules/virtio_ring.ko\n" +
		"-rw-r--r-- 0:0 modules.order\ndrwxr-xr-x 0:0 etc\n-rw-r--r-- 0:0 etc/passwd\n-rwxr-xr-x 0:0 init"
	if strings.Join(got, "\n") != want {
		t.Errorf("got\n%s", strings.Join(got, "\n"))
	}
	dir := t.TempDir()
	cmd = exec.Command("cpio", "-id", "--quiet", "--no-preserve-owner")
	cmd.Dir, cmd.Stdin = dir, bytes.NewReader(tiny(t))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("cpio: %v: %s", err, out)
	}
	for name, want := range map[string]string{"modules.order": "modules/virtio.ko\nmodules/virtio_ring.ko\n", "modules/virtio_ring.ko": "seven b", "etc/passwd": "root\n"} {
		if got, err := os.ReadFile(dir + "/" + name); err != nil || string(got) != want {
			t.Errorf("%s: %q %v", name, got, err)
		}
	}
}

func TestNamesThatNoArchiveHas(t *testing.T) {
	for _, name := range []string{"", ".", "..", "/x", "../x", "a/../../x", "a//b", "a/", "./a", "a\x00b", "TRAILER!!!", strings.Repeat("x", 5000), "there", "there/below"} {
		a := NewArchive(&bytes.Buffer{})
		a.Text("there", "x", 0o644)
		a.Text(name, "x", 0o644)
		if err := a.Close(); dsec.ClassOf(err) != dsec.Invalid {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func TestTheFirstErrorStays(t *testing.T) {
	a := NewArchive(&bytes.Buffer{})
	a.File("short", 0o644, 10, strings.NewReader("less"))
	a.Text("more", "x", 0o644)
	if err := a.Close(); err == nil || !strings.Contains(err.Error(), "short") {
		t.Error(err)
	}
	a = NewArchive(full{})
	a.Text("x", "x", 0o644)
	if err := a.Close(); !errors.Is(err, errFull) {
		t.Error(err)
	}
}

var errFull = errors.New("it is full")

type full struct{}

func (full) Write([]byte) (int, error) { return 0, errFull }
