package proc

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestGroupsThatGoAreNotMistaken asks for groups while they are removed: the answer is the
// command, or that nobody has said what it was.
func TestGroupsThatGoAreNotMistaken(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("control groups are root's to make; uid", os.Geteuid())
	}
	g := openGroups()
	if g.tree == nil {
		t.Fatal("there is no tree of control groups v2")
	}
	defer g.close()
	top := filepath.Join(g.tree.Name(), fmt.Sprintf("dsec-test-groups-%d", os.Getpid()))
	if err := os.Mkdir(top, 0o755); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(top)
	named, gone := 0, 0
	for i := range 3000 {
		want := fmt.Sprintf("c%d", i)
		dir := filepath.Join(top, "exec-"+want)
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		var st unix.Stat_t
		if err := unix.Stat(dir, &st); err != nil {
			t.Fatal(err)
		}
		removed := make(chan error, 1)
		go func() {
			time.Sleep(time.Duration(i%40) * time.Microsecond) // sooner and later than it is asked for
			removed <- unix.Rmdir(dir)
		}()
		have, ok := g.exec(st.Ino)
		switch {
		case !ok:
			gone++
		case have == want:
			named++
		default:
			t.Errorf("%s is taken for %q", want, have)
		}
		if err := <-removed; err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d named, %d gone before", named, gone)
}
