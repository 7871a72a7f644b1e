package watch

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/audit"
	"github.com/opendsec/dsec/internal/diskpool"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/internal/procinfo"
	"github.com/opendsec/dsec/rootfs"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// world is an overlay on a pool, and a witness of it.
type world struct {
	k     *linux.Keeper
	pool  diskpool.Pool
	id    dsec.SandboxID
	disk  *os.File
	at    string // where the overlay is mounted
	w     *Witness
	cache procinfo.Cache

	mu   sync.Mutex
	told []dsec.AuditRecord
}

func newWorld(t testing.TB) *world {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("mounts need root and this test runs without it")
	}
	ctx := context.Background()
	x := &world{k: linux.NewKeeper(), id: dsec.NewSandboxID("abcdef"), at: filepath.Join(t.TempDir(), "root")}
	t.Cleanup(x.k.Close)
	var err error
	x.pool, err = diskpool.Open(ctx, diskpool.Options{Dir: t.TempDir(), Size: diskpool.MinPool, Mechanism: diskpool.Btrfs, Keeper: x.k})
	must(t, err)
	t.Cleanup(func() { must(t, x.pool.Close()) })
	x.disk, err = x.pool.Create(ctx, string(x.id), 100<<20, diskpool.Owner{})
	must(t, err)
	t.Cleanup(func() { x.disk.Close(); must(t, x.pool.Remove(ctx, string(x.id))) })
	must(t, rootfs.PrepareDir(x.disk, 0, 0))
	x.mount(t)
	return x
}

// mount stacks a layer of a few files and the disk.
func (x *world) mount(t testing.TB) {
	t.Helper()
	lower := t.TempDir()
	for _, f := range []string{"usr/bin/sh", "usr/bin/env", "usr/bin/id", "tests/conftest.py", "opt/app/data", "usr/local/bin/tool"} {
		must(t, os.MkdirAll(filepath.Join(lower, filepath.Dir(f)), 0o755))
		must(t, os.WriteFile(filepath.Join(lower, f), []byte("lower "+f), 0o755))
	}
	disk := fmt.Sprintf("/proc/self/fd/%d/", x.disk.Fd())
	m, err := linux.NewFS("overlay").String("xino", "on").String("index", "off").String("metacopy", "off").String("redirect_dir", "on").String("lowerdir", lower).
		String("upperdir", disk+"upper").String("workdir", disk+"work").Mount(0)
	must(t, err)
	defer m.Close()
	must(t, os.Mkdir(x.at, 0o755))
	must(t, linux.Move(m, nil, x.at))
	t.Cleanup(func() { must(t, unix.Unmount(x.at, unix.MNT_DETACH)) })
}

func (x *world) take(_ dsec.SandboxID, r ...dsec.AuditRecord) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.told = append(x.told, r...)
}

func (x *world) open(t testing.TB, adopted bool) {
	t.Helper()
	w, err := Open(t.Context(), Config{Keeper: x.k, Name: "test", Pool: x.pool.(diskpool.Shared).Root(), Take: x.take, Cache: &x.cache, Log: slog.New(slog.DiscardHandler)})
	if errors.Is(err, unix.EPERM) {
		t.Skip("tried and refused: ", err)
	}
	must(t, err)
	if w.names == nil {
		t.Fatal("the pool is not watched")
	}
	root, err := os.Open(x.at)
	must(t, err)
	defer root.Close()
	must(t, w.Add(t.Context(), audit.Subject{ID: x.id, Root: root, Watch: []string{"/tests/**"}}, adopted))
	w.Start()
	x.w = w
}

// since returns what is told of what do does, as "path what".
func (x *world) since(t *testing.T, do func()) []string {
	t.Helper()
	x.mu.Lock()
	n := len(x.told)
	x.mu.Unlock()
	do()
	x.w.writes.settle()
	x.w.names.settle()
	x.mu.Lock()
	defer x.mu.Unlock()
	var out []string
	for _, r := range x.told[n:] {
		what, _, _ := strings.Cut(r.Detail, ", by the file service") // of this test, which is no command
		out = append(out, r.Path+" "+what)
	}
	return out
}

func (x *world) write(t *testing.T, path, text string) {
	t.Helper()
	must(t, os.MkdirAll(filepath.Dir(x.at+path), 0o755))
	must(t, os.WriteFile(x.at+path, []byte(text), 0o644))
}

func TestTricksOnWatchedPaths(t *testing.T) {
	x := newWorld(t)
	x.open(t, false)
	defer func() { must(t, x.w.Close()) }()
	for _, c := range []struct {
		name string
		do   func()
		want []string
	}{
		{"a tool of the layer is overwritten", func() { x.write(t, "/usr/bin/sh", "evil") }, []string{"/usr/bin/sh opened", "/usr/bin/sh written"}},
		{"and again", func() { x.write(t, "/usr/bin/sh", "worse") }, []string{"/usr/bin/sh written"}},
		{"something is renamed over a tool", func() {
			x.write(t, "/opt/x", "evil")
			must(t, os.Rename(x.at+"/opt/x", x.at+"/usr/bin/env"))
		}, []string{"/usr/bin/env replaced"}},
		{"a hook of the tests appears", func() { x.write(t, "/repo/sub/conftest.py", "evil") }, []string{"/repo/sub/conftest.py created", "/repo/sub/conftest.py written"}},
		{"as a link", func() { must(t, os.Symlink("/opt/x", x.at+"/repo/conftest.py")) }, []string{"/repo/conftest.py created"}},
		{"a tool is removed", func() { must(t, os.Remove(x.at+"/usr/bin/id")) }, []string{"/usr/bin/id removed"}},
		{"what the task asked for", func() { x.write(t, "/tests/a/b", "evil") }, []string{"/tests/a/b created", "/tests/a/b written"}},
		{"by a mapping, which is held", func() { x.mapped(t, "/tests/conftest.py", nil) }, []string{"/tests/conftest.py opened"}},
		{"a directory of tools is replaced", func() {
			x.write(t, "/opt/bin/tool", "evil")
			must(t, os.Rename(x.at+"/usr/local/bin", x.at+"/opt/old"))
			must(t, os.Rename(x.at+"/opt/bin", x.at+"/usr/local/bin"))
		}, []string{"/usr/local/bin replaced"}},
		{"nothing that is watched", func() { x.write(t, "/opt/app/data", "x"); x.write(t, "/usr/share/x", "x") }, nil},
	} {
		got := x.since(t, c.do)
		for _, want := range c.want {
			if !contains(got, want) {
				t.Errorf("%s: %q, want %q", c.name, got, want)
			}
		}
		if len(c.want) == 0 && len(got) > 0 {
			t.Errorf("%s: %q", c.name, got)
		}
	}
}

func contains(list []string, s string) bool {
	for _, x := range list {
		if x == s || strings.HasPrefix(x, s+", ") {
			return true
		}
	}
	return false
}

// mapped changes a file by a mapping, and closes it before or after then.
func (x *world) mapped(t *testing.T, path string, then func()) {
	f, err := os.OpenFile(x.at+path, os.O_RDWR, 0)
	must(t, err)
	m, err := unix.Mmap(int(f.Fd()), 0, 4, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	must(t, err)
	must(t, f.Close())
	copy(m, "evil")
	t.Cleanup(func() { must(t, unix.Munmap(m)) })
	if then != nil {
		then()
	}
}

// TestTheDiskTellsWhatNoEventDid: a link with another name has no path that is watched.
func TestTheDiskTellsWhatNoEventDid(t *testing.T) {
	x := newWorld(t)
	x.open(t, false)
	got := x.since(t, func() {
		must(t, os.Link(x.at+"/usr/bin/sh", x.at+"/opt/innocent"))
		x.write(t, "/opt/innocent", "evil")
	})
	if contains(got, "/usr/bin/sh written") {
		t.Errorf("the link is told by its watched name: %q", got)
	}
	if !x.w.by[x.id].look.wanted {
		t.Error("a written file of two names gives no reason to look")
	}
	must(t, os.Remove(x.at+"/usr/bin/id"))
	got = x.since(t, func() { x.w.Remove(t.Context(), x.id, x.disk) })
	if !contains(got, "/usr/bin/sh differs") || !contains(got, "/usr/bin/id differs, removed") || contains(got, "/opt/innocent differs") {
		t.Errorf("%q", got)
	}
	x.write(t, "/usr/bin/env", "evil")
	if got := x.since(t, func() {}); len(got) > 0 {
		t.Errorf("one that was removed is told of: %q", got)
	}
	must(t, x.w.Close())
}

// TestEventsAreKeptWhileNobodyReads: the agent was away. More than the kernel keeps is a record too.
func TestEventsAreKeptWhileNobodyReads(t *testing.T) {
	x := newWorld(t)
	x.open(t, false)
	must(t, x.w.Close())
	x.write(t, "/usr/bin/sh", "evil")
	got := x.since(t, func() { x.open(t, true) })
	if !contains(got, "/usr/bin/sh opened") || !contains(got, "/usr/bin/sh written") {
		t.Errorf("%q", got)
	}
	must(t, x.w.Close())
	for i := range 20_000 {
		must(t, os.WriteFile(fmt.Sprintf("%s/opt/f%d", x.at, i), nil, 0o600))
	}
	x.since(t, func() { x.open(t, true) })
	var lost int
	for _, r := range x.told {
		if r.Kind == dsec.AuditLost {
			lost++
		}
	}
	if lost == 0 {
		t.Error("20,000 events fit in the queue of nobody, or are lost without a word")
	}
	must(t, x.w.Close())
}

// TestForgottenIsNotKept: a node that is to look no more leaves nothing in the kernel.
func TestForgottenIsNotKept(t *testing.T) {
	x := newWorld(t)
	x.open(t, false)
	must(t, x.w.Close())
	for range 2 { // nothing is fine too
		must(t, Forget(t.Context(), x.w.cfg))
	}
	for _, of := range []string{ofWrites, ofNames} {
		if f, err := x.k.Get(t.Context(), layout+x.w.cfg.Name+of); !errors.Is(err, dsec.NotFound.Err()) {
			t.Errorf("%s is kept: %v %v", of, f, err)
		}
	}
}

// TestAnotherMountHidesNoWrite: the path by which it is written says nothing.
func TestAnotherMountHidesNoWrite(t *testing.T) {
	x := newWorld(t)
	x.open(t, false)
	defer func() { must(t, x.w.Close()) }()
	other := t.TempDir()
	if out, err := exec.Command("mount", "--bind", x.at+"/repo", other).CombinedOutput(); err == nil {
		t.Fatalf("there is a repo: %s", out)
	}
	must(t, unix.Mount(x.at+"/tests", other, "", unix.MS_BIND, ""))
	defer func() { must(t, unix.Unmount(other, unix.MNT_DETACH)) }()
	got := x.since(t, func() { must(t, os.WriteFile(other+"/conftest.py", []byte("evil"), 0o600)) })
	var by bool
	for _, g := range got {
		by = by || strings.HasSuffix(g, "written, by another mount")
	}
	if !by || !contains(got, "/tests/conftest.py opened") {
		t.Errorf("%q", got)
	}
}
