package linux

import (
	"errors"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestOpenBeneathTakesPathsOfAnyLength, and lets no link lead away in any part of them.
func TestOpenBeneathTakesPathsOfAnyLength(t *testing.T) {
	top, err := os.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer top.Close()
	name := strings.Repeat("d", 200)
	dir, parts := top, []string{}
	for range 50 {
		if err := unix.Mkdirat(int(dir.Fd()), name, 0o700); err != nil {
			t.Fatal(err)
		}
		next, err := OpenBeneath(dir, name, unix.O_RDONLY|unix.O_DIRECTORY)
		if err != nil {
			t.Fatal(err)
		}
		defer next.Close()
		dir, parts = next, append(parts, name)
	}
	for _, link := range []struct{ name, to string }{{"self", "."}, {"root", "/"}} {
		if err := unix.Symlinkat(link.to, int(dir.Fd()), link.name); err != nil {
			t.Fatal(err)
		}
	}
	long := strings.Join(parts, "/")
	for path, want := range map[string]error{long: nil, long + "/self": unix.ELOOP, long + "/root/etc": unix.ELOOP, long + "/none": unix.ENOENT, long + strings.Repeat("/..", 51): unix.EXDEV} {
		f, err := OpenBeneath(top, path, unix.O_PATH)
		if err == nil {
			f.Close()
		}
		if !errors.Is(err, want) || want == nil && err != nil {
			t.Errorf("…%s: %v, want %v", path[max(0, len(path)-20):], err, want)
		}
	}
}
