package diskpool

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
)

func TestASnapshotHoldsThatMoment(t *testing.T) {
	onEach(t, func(t *testing.T, o Options) {
		p := testPool(t, o)
		s, ok := p.(Snapshotter)
		if !ok {
			t.Skipf("%s copies nothing in a moment", p.Mechanism())
		}
		ctx := t.Context()
		dir, err := p.Create(ctx, "a", 64<<20, Owner{})
		if err != nil {
			t.Fatal(err)
		}
		defer dir.Close()
		in := func(d *os.File, name string) string {
			return filepath.Join("/proc/self/fd", strconv.Itoa(int(d.Fd())), name)
		}
		write := func(text string) {
			t.Helper()
			if err := os.WriteFile(in(dir, "f"), []byte(text), 0o644); err != nil { // not synced
				t.Fatal(err)
			}
		}
		write("then")
		snap, err := s.Snapshot(ctx, "a", "a.copy")
		if err != nil {
			t.Fatal(err)
		}
		defer snap.Close()
		write("now, and longer")
		if b, err := os.ReadFile(in(snap, "f")); err != nil || string(b) != "then" {
			t.Errorf("%q %v", b, err)
		}
		if err := os.WriteFile(in(snap, "g"), nil, 0o644); err == nil {
			t.Error("a snapshot is written to")
		}
		if _, err := s.Snapshot(ctx, "a", "a.copy"); err == nil {
			t.Error("two of one name")
		}
		if _, err := s.Snapshot(ctx, "none", "b.copy"); err == nil {
			t.Error("of nothing")
		}
		if names, err := p.List(ctx); err != nil || len(names) != 2 {
			t.Errorf("entries %v %v", names, err)
		}
		if err := p.Remove(ctx, "a.copy"); err != nil {
			t.Fatal(err)
		}
		// The limit of what was copied holds as before.
		f, err := os.Create(in(dir, "large"))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if err := unix.Fallocate(int(f.Fd()), 0, 0, 80<<20); !isFull(err) {
			t.Errorf("beyond the limit: %v", err)
		}
	})
}
