package diskpool

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/linux"
)

// onEach runs a test with every mechanism of this machine; a mechanism that
// cannot work here skips with the kernel's reason.
func onEach(t *testing.T, test func(t *testing.T, o Options)) {
	if os.Getuid() != 0 {
		t.Skip("pools are made by root only; uid is", os.Getuid())
	}
	for _, m := range mechanisms() {
		t.Run(m.name, func(t *testing.T) {
			test(t, Options{Dir: t.TempDir(), Size: 512 << 20, Mechanism: m.name, Reserve: 1 << 20})
		})
	}
}

func testPool(t testing.TB, o Options) Pool {
	t.Helper()
	p, err := Open(t.Context(), o)
	if errors.Is(err, dsec.Unsupported.Err()) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
		eventually(t, "the loop device lets go", func() bool { return loopsOn(t, o.Dir) == 0 })
	})
	return p
}

func loopsOn(t testing.TB, dir string) int {
	n := 0
	all, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, a := range all {
		if b, err := os.ReadFile(a); err == nil && strings.HasPrefix(string(b), dir) {
			n++
		}
	}
	return n
}

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("never happened:", what)
		}
	}
}

// fill writes zeros into a new file until an error, and returns how much the
// file holds.
func fill(t testing.TB, dir *os.File, name string, most int64) (n int64, err error) {
	t.Helper()
	err = unprivileged(func() (err error) { n, err = fillNow(dir, name, most); return err })
	return n, err
}

func fillNow(dir *os.File, name string, most int64) (int64, error) {
	fd, err := unix.Openat(int(dir.Fd()), name, unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return 0, err
	}
	f := os.NewFile(uintptr(fd), name)
	defer func() { _ = f.Close() }()
	var n int64
	buf := make([]byte, 128<<10)
	for n < most {
		w, err := f.Write(buf[:min(int64(len(buf)), most-n)])
		n += int64(w)
		if err != nil {
			return n, err
		}
	}
	return n, f.Sync()
}

func TestD13_WritesStopAtTheLimit(t *testing.T) {
	onEach(t, func(t *testing.T, o Options) {
		p := testPool(t, o)
		t.Log(p.Mechanism(), "—", p.Why())
		dir, err := p.Create(t.Context(), "a", 32<<20, Owner{1234, 1235})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = dir.Close() }()
		st, err := dir.Stat()
		if sys := st.Sys(); err != nil || fmt.Sprintf("%o", st.Mode().Perm()) != "700" {
			t.Errorf("the directory is %v %v %v", st.Mode(), sys, err)
		}
		n, err := fill(t, dir, "big", 45<<20)
		if !isFull(err) || n < 28<<20 || n > 32<<20 {
			t.Errorf("wrote %d of 45 MiB with %v, want about 32 MiB and a full disk", n, err)
		}
		u, err := p.Usage(t.Context(), "a")
		if err != nil || u.Limit != 32<<20 || u.Used > 32<<20 || u.Used < n-1<<20 {
			t.Errorf("usage %+v %v, want about %d of 32 MiB", u, err, n)
		}
		other, err := p.Create(t.Context(), "b", 8<<20, Owner{})
		if err != nil {
			t.Fatal("a later entry:", err)
		}
		defer func() { _ = other.Close() }()
		if n, err := fill(t, other, "f", 1<<20); err != nil {
			t.Errorf("a neighbour of a full entry wrote %d: %v", n, err)
		}
		if err := unix.Unlinkat(int(dir.Fd()), "big", 0); err != nil {
			t.Error("delete in a full entry:", err)
		}
	})
}

// What is written over, block by block, counts once.
func TestRewritingTakesNothing(t *testing.T) {
	onEach(t, func(t *testing.T, o Options) {
		p := testPool(t, o)
		dir, err := p.Create(t.Context(), "d", 15<<20, Owner{})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = dir.Close() }()
		const blocks = 2048
		f, err := os.OpenFile(filepath.Join(fmt.Sprintf("/proc/self/fd/%d", dir.Fd()), "f"), os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = f.Close() }()
		block := make([]byte, 4096)
		write := func(i int) {
			rand.Read(block)
			if _, err := f.WriteAt(block, int64(i)*4096); err != nil {
				t.Fatalf("block %d: %v", i, err)
			}
		}
		for i := range blocks {
			write(i)
		}
		for first := range 8 { // the ninth of each nine keeps what was there in use
			if err := f.Sync(); err != nil {
				t.Fatal(err)
			}
			for i := first; i < blocks; i += 9 {
				write(i)
			}
		}
		if err := f.Sync(); err != nil {
			t.Fatal(err)
		}
		if u, err := p.Usage(t.Context(), "d"); err != nil || u.Used > 10<<20 {
			t.Errorf("8 MiB take %+v, %v", u, err)
		}
	})
}

func TestResizeLetsItGrow(t *testing.T) {
	onEach(t, func(t *testing.T, o Options) {
		p := testPool(t, o)
		dir, err := p.Create(t.Context(), "a", 16<<20, Owner{})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = dir.Close() }()
		if _, err := fill(t, dir, "one", 20<<20); !isFull(err) {
			t.Errorf("20 of 16 MiB: %v", err)
		}
		err = p.Resize(t.Context(), "a", 64<<20)
		if errors.Is(err, dsec.Unsupported.Err()) {
			t.Skip(err)
		}
		if err != nil {
			t.Fatal(err)
		}
		if n, err := fill(t, dir, "two", 20<<20); err != nil {
			t.Errorf("after Resize %d of 20 MiB: %v", n, err)
		}
	})
}

func TestEntriesSurviveTheProcess(t *testing.T) {
	onEach(t, func(t *testing.T, o Options) {
		keeper := linux.NewKeeper()
		defer keeper.Close()
		first := o
		first.Keeper = keeper
		p, err := Open(t.Context(), first)
		if errors.Is(err, dsec.Unsupported.Err()) {
			t.Skip(err)
		}
		if err != nil {
			t.Fatal(err)
		}
		dir, err := p.Create(t.Context(), "a", 16<<20, Owner{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := fill(t, dir, "f", 1<<20); err != nil {
			t.Fatal(err)
		}
		_ = dir.Close()
		_ = p.Close()
		for _, again := range []struct {
			how string
			o   Options
		}{{"with the keeper", first}, {"after a reboot", o}} {
			if again.how != "with the keeper" {
				keeper.Close()
				eventually(t, "the mount ends", func() bool { return loopsOn(t, o.Dir) == 0 })
			}
			p, err := Open(t.Context(), again.o)
			if err != nil {
				t.Fatal(again.how, err)
			}
			names, err := p.List(t.Context())
			if err != nil || !slices.Equal(names, []string{"a"}) {
				t.Errorf("%s: List is %v %v", again.how, names, err)
			}
			dir, err := p.Open(t.Context(), "a")
			if err != nil {
				t.Fatal(again.how, err)
			}
			var st unix.Stat_t
			if err := unix.Fstatat(int(dir.Fd()), "f", &st, 0); err != nil || st.Size != 1<<20 {
				t.Errorf("%s: file has %d bytes, %v", again.how, st.Size, err)
			}
			_ = dir.Close()
			_ = p.Close()
		}
	})
}

func TestRemoveGivesTheSpaceBack(t *testing.T) {
	onEach(t, func(t *testing.T, o Options) {
		p := testPool(t, o)
		for i := range 4 { // together more than the pool can hold
			dir, err := p.Create(t.Context(), "a", 200<<20, Owner{})
			if err != nil {
				t.Fatal(err)
			}
			n, err := fill(t, dir, "big", 150<<20)
			if isFull(err) { // blocks come back soon after Remove
				eventually(t, "space for the rest", func() bool {
					s, err := p.Space(t.Context())
					return err == nil && s.Free > 300<<20
				})
				_, err = fill(t, dir, "rest", 150<<20-n)
			}
			_ = dir.Close()
			if err != nil {
				t.Fatalf("round %d: wrote %d: %v", i, n, err)
			}
			if err := p.Remove(t.Context(), "a"); err != nil {
				t.Fatal(err)
			}
			if names, err := p.List(t.Context()); len(names) != 0 || err != nil {
				t.Errorf("after Remove List is %v %v", names, err)
			}
		}
		if err := p.Remove(t.Context(), "a"); err != nil {
			t.Errorf("second Remove: %v", err)
		}
	})
}

func TestBadRequestsAreTyped(t *testing.T) {
	onEach(t, func(t *testing.T, o Options) {
		p := testPool(t, o)
		ctx := t.Context()
		for _, name := range []string{"", ".", "..", "a/b", "-x"} {
			if _, err := p.Create(ctx, name, 1<<20, Owner{}); !errors.Is(err, dsec.Invalid.Err()) {
				t.Errorf("Create(%q): %v, want invalid", name, err)
			}
		}
		if _, err := p.Create(ctx, "a", 10, Owner{}); !errors.Is(err, dsec.Invalid.Err()) {
			t.Errorf("limit 10: %v, want invalid", err)
		}
		if _, err := p.Open(ctx, "nosuch"); !errors.Is(err, dsec.NotFound.Err()) {
			t.Errorf("Open of an unknown name: %v, want not_found", err)
		}
		if _, err := p.Usage(ctx, "nosuch"); !errors.Is(err, dsec.NotFound.Err()) {
			t.Errorf("Usage of an unknown name: %v, want not_found", err)
		}
		dir, err := p.Create(ctx, "a", 16<<20, Owner{})
		if err != nil {
			t.Fatal(err)
		}
		_ = dir.Close()
		if _, err := p.Create(ctx, "a", 16<<20, Owner{}); !errors.Is(err, dsec.AlreadyExists.Err()) {
			t.Errorf("second Create: %v, want already_exists", err)
		}
	})
}

func TestCreateIsRefusedBelowTheReserve(t *testing.T) {
	onEach(t, func(t *testing.T, o Options) {
		o.Reserve = 1 << 60
		p := testPool(t, o)
		if _, err := p.Create(t.Context(), "a", 1<<20, Owner{}); !errors.Is(err, dsec.NoSpace.Err()) {
			t.Errorf("Create: %v, want no_space", err)
		}
	})
}

func TestPoolsShowUpInNoMountTable(t *testing.T) {
	onEach(t, func(t *testing.T, o Options) {
		p := testPool(t, o)
		dir, err := p.Create(t.Context(), "a", 16<<20, Owner{})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = dir.Close() }()
		f, err := os.Open("/proc/self/mountinfo")
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = f.Close() }()
		table, err := io.ReadAll(f)
		if err != nil || strings.Contains(string(table), o.Dir) {
			t.Errorf("the mount table names the pool (%v)", err)
		}
	})
}

func BenchmarkCreateRemove(b *testing.B) {
	p := testPool(b, Options{Dir: b.TempDir(), Size: 2 << 30, Mechanism: Btrfs, Reserve: 1 << 20})
	ctx := context.Background()
	var created time.Duration
	i := 0
	for b.Loop() {
		i++
		start := time.Now()
		d, err := p.Create(ctx, fmt.Sprint("s", i), 64<<20, Owner{100000, 100000})
		created += time.Since(start)
		if err != nil {
			b.Fatal(err)
		}
		_ = d.Close()
		if err := p.Remove(ctx, fmt.Sprint("s", i)); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(created.Microseconds())/float64(b.N), "create-µs/op")
}
