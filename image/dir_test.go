package image

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestE23_DirectoryKeepsAttributes takes what setcap and setfacl make.
func TestE23_DirectoryKeepsAttributes(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("setcap needs root: uid is", os.Geteuid())
	}
	src := t.TempDir()
	for _, name := range []string{"ping", "plain"} {
		if err := os.WriteFile(filepath.Join(src, name), []byte("elf"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(src, "shared"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, cmd := range [][]string{{"setcap", "cap_net_raw+ep", filepath.Join(src, "ping")}, {"setfacl", "-d", "-m", "u:1000:rwx", filepath.Join(src, "shared")},
		{"setfattr", "-n", "user.note", "-v", "hello", filepath.Join(src, "plain")}} {
		if out, err := exec.Command(cmd[0], cmd[1:]...).CombinedOutput(); err != nil {
			t.Skipf("%v: %v: %s", cmd, err, out)
		}
	}
	EachWay(t, func(t testing.TB) {
		root := mount(t, mustConvert(t, src, Options{}))
		for _, c := range []struct{ cmd, file, want string }{{"getcap", "ping", "cap_net_raw=ep"}, {"getfacl -n", "shared", "default:user:1000:rwx"}} {
			out, err := exec.Command("sh", "-c", c.cmd+" "+filepath.Join(root, c.file)).CombinedOutput()
			if err != nil || !strings.Contains(string(out), c.want) {
				t.Errorf("%s: %s %v", c.cmd, out, err)
			}
		}
		b := make([]byte, 16)
		if n, err := unix.Getxattr(filepath.Join(root, "plain"), "user.note", b); err != nil || string(b[:n]) != "hello" {
			t.Errorf("user.note: %q, %v", b, err)
		}
	})
}

// TestDirectoryKeepsNodesAndHoles: sockets, devices, sparse files, odd names,
// and a link that leads out is a link and nothing else.
func TestDirectoryKeepsNodesAndHoles(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mknod needs root: uid is", os.Geteuid())
	}
	src := t.TempDir()
	at := func(name string) string { return filepath.Join(src, name) }
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	sparse, err := os.Create(at("sparse"))
	if err != nil {
		t.Fatal(err)
	}
	defer sparse.Close()
	if _, err := sparse.WriteAt([]byte("end"), 9<<30); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(secret, at("out")); err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{unix.Mknod(at("null"), unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))), unix.Mkfifo(at("fifo"), 0o600),
		unix.Mknod(at("sock"), unix.S_IFSOCK|0o600, 0), os.WriteFile(at("odd \xff\n"), []byte("odd"), 0o600)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	c := mustConvert(t, src, Options{})
	if bytes.Contains(readFile(t, c.data), []byte("secret")) {
		t.Error("followed a link out of the tree")
	}
	root := mount(t, c)
	var st unix.Stat_t
	if err := unix.Lstat(filepath.Join(root, "null"), &st); err != nil || st.Mode != unix.S_IFCHR|0o600 || st.Rdev != unix.Mkdev(1, 3) {
		t.Errorf("null: %+v, %v", st, err)
	}
	if err := unix.Lstat(filepath.Join(root, "sock"), &st); err != nil || st.Mode != unix.S_IFSOCK|0o600 {
		t.Errorf("sock: %+v, %v", st, err)
	}
	if err := unix.Lstat(filepath.Join(root, "sparse"), &st); err != nil || st.Size != 9<<30+3 || c.DataSize > 2<<20 {
		t.Errorf("sparse: %d bytes, layer of %d, %v", st.Size, c.DataSize, err)
	}
	if b, err := os.ReadFile(filepath.Join(root, "odd \xff\n")); err != nil || string(b) != "odd" {
		t.Errorf("odd name: %q, %v", b, err)
	}
}
