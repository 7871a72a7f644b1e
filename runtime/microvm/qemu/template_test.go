package qemu

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
)

// Clones go on where the template stopped, with their own layers and disks, and
// nothing that they write in all their memory reaches the template or each other.
func TestClones(t *testing.T) {
	g := theGuest(t)
	tp := g.template(t)
	dir := filepath.Join(g.driver.cfg.Dir, tp.Key)
	before, err := os.ReadFile(filepath.Join(dir, "ram"))
	if err != nil {
		t.Fatal(err)
	}
	const n = 3
	var clones [n]vmm.VM
	var devs [n]vmm.Devices
	for i := range clones {
		devs[i] = g.devices(t, fmt.Sprint("layer", i))
		began := time.Now()
		m, err := g.driver.Clone(ctxOf(t), tp, devs[i])
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(m.Kill)
		want(t, m, "ping", "pong")
		t.Logf("cloned and answered in %v", time.Since(began).Round(time.Millisecond))
		clones[i] = m
	}
	pss, err := clones[0].Memory()
	t.Logf("an idle clone of %d: PSS %d MiB", n, pss>>20)
	if err != nil || pss > 60<<20 {
		t.Errorf("an idle clone has %d bytes, %v", pss, err)
	}
	var wg sync.WaitGroup
	for i, m := range clones {
		wg.Go(func() {
			want(t, m, fmt.Sprint("set word", i), "ok")
			want(t, m, fmt.Sprintf("fill 40 clone%d", i), "ok")
			want(t, m, "read /dev/pmem0 0", hexOf(fmt.Sprint("layer", i)))
			want(t, m, "read /dev/pmem1 0", hexOf(""))
			want(t, m, "read /dev/vda 0", hexOf("disk lay"))
			want(t, m, fmt.Sprintf("write /dev/vda 512 mine%d", i), "ok")
		})
	}
	wg.Wait()
	for i, m := range clones {
		want(t, m, "get", fmt.Sprint("word", i))
		walls(t, m.(*machine))
		// A restored guest is never asked to power off; what it flushed is on its disk.
		if err := m.Stop(t.Context()); err != nil || m.Err() != nil {
			t.Errorf("stop: %v, %v", err, m.Err())
		}
		disk, err := os.ReadFile(devs[i].Disk)
		if err != nil || !bytes.HasPrefix(disk[512:], []byte(fmt.Sprint("mine", i))) {
			t.Errorf("disk %d: %v, %q", i, err, disk[512:530])
		}
	}
	after, err := os.ReadFile(filepath.Join(dir, "ram"))
	if err != nil || !bytes.Equal(before, after) {
		t.Errorf("the template's memory has changed on disk (%v)", err)
	}
	// What the clones shared is still what the manifest says.
	g.driver.mu.Lock()
	o := g.driver.templates[tp.Key]
	g.driver.mu.Unlock()
	sink, err := zeros(o.manifest.Identity.Memory, false)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sink.Close() }()
	if sum, err := copyRAM(t.Context(), sink, o.ram, o.manifest.Identity.Memory); err != nil || sum != o.manifest.RAM.SHA256 {
		t.Errorf("the shared memory has changed: %v", err)
	}
	for _, mode := range []int{unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE, unix.FALLOC_FL_ZERO_RANGE} {
		if err := unix.Fallocate(int(o.ram.Fd()), uint32(mode), 0, 4096); err == nil {
			t.Error("the shared memory can be changed")
		}
	}
	if _, err := o.ram.WriteAt([]byte("x"), 0); err == nil {
		t.Error("the shared memory can be written")
	}
	if left := qemus(t); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	for _, name := range []string{"ram", "state", "manifest.json"} {
		if st, err := os.Stat(filepath.Join(dir, name)); err != nil || st.Mode().Perm() != 0o444 {
			t.Errorf("%s: %v, %v", name, st, err)
		}
	}
}

// A layer that no template knew is mounted in a clone, and read where it lies: it is in
// no guest's page cache.
func TestLayersAreReadPastTheGuestsCache(t *testing.T) {
	g := theGuest(t)
	for i := range 2 {
		dev := g.devices(t, "x")
		tree := t.TempDir()
		file := make([]byte, 3<<20)
		if _, err := rand.Read(file); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(tree, "f"), file, 0o644); err != nil {
			t.Fatal(err)
		}
		out, err := exec.Command("mkfs.erofs", "-T0", "-E", "noinline_data", dev.Pmem[0], tree).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		if err := os.Truncate(dev.Pmem[0], g.shape.Pmem[0]); err != nil {
			t.Fatal(err)
		}
		m, err := g.driver.Clone(ctxOf(t), g.template(t), dev)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(m.Kill)
		want(t, m, "mount /dev/pmem0", "ok")
		want(t, m, "sum /mnt/f", fmt.Sprintf("%x true", sha256.Sum256(file)))
		if err := m.Stop(ctxOf(t)); err != nil {
			t.Errorf("%d: %v", i, err)
		}
	}
}

// A tap's other end is what reads frames; the interface itself is in a network
// namespace of this test's.
func TestCloneWithTap(t *testing.T) {
	g := theGuest(t)
	tap := openTap(t)
	dev := g.devices(t, "x")
	dev.Tap = tap
	m, err := g.driver.Clone(ctxOf(t), g.template(t), dev)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Kill)
	want(t, m, "up", "ok")
	for end := time.Now().Add(10 * time.Second); ask(t, m, "cat /sys/class/net/eth0/carrier") != "1"; {
		if time.Now().After(end) {
			t.Fatal("no carrier")
		}
	}
	want(t, m, "cat /sys/class/net/eth0/address", mac)
	if err := tap.Close(); err != nil {
		t.Errorf("the caller's tap: %v", err)
	}
}

// damage makes a driver on a copy of the template in which a file was changed.
func damaged(t *testing.T, g guest, change func(dir string, man *manifest)) (*Driver, vmm.Template) {
	t.Helper()
	tp := g.template(t)
	root := t.TempDir()
	dir := filepath.Join(root, tp.Key)
	if err := os.CopyFS(dir, os.DirFS(filepath.Join(g.driver.cfg.Dir, tp.Key))); err != nil {
		t.Fatal(err)
	}
	man, err := readManifest(dir, kindTemplate)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range list(t, dir) {
		if err := os.Chmod(filepath.Join(dir, name), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	change(dir, &man)
	if err := os.WriteFile(filepath.Join(dir, "manifest.json"), man.encode(), 0o644); err != nil {
		t.Fatal(err)
	}
	d, err := New(t.Context(), Config{Dir: root, UID: testUID})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Close)
	return d, tp
}

func TestDamagedTemplates(t *testing.T) {
	g := theGuest(t)
	clone := func(class dsec.Class, text string, change func(dir string, man *manifest)) {
		t.Helper()
		d, tp := damaged(t, g, change)
		began := time.Now()
		m, err := d.Clone(ctxOf(t), tp, g.devices(t, "x"))
		if err == nil {
			m.Kill()
		}
		wantClass(t, err, class, text)
		if took := time.Since(began); took > 20*time.Second {
			t.Errorf("%s: it took %v", text, took)
		}
	}
	flip := func(name string, at int64) func(string, *manifest) {
		return func(dir string, _ *manifest) {
			f, err := os.OpenFile(filepath.Join(dir, name), os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			b := make([]byte, 1)
			_, err = f.ReadAt(b, at)
			b[0] ^= 1
			if _, e := f.WriteAt(b, at); err != nil || e != nil {
				t.Fatal(err, e)
			}
			_ = f.Close()
		}
	}
	clone(dsec.Corrupt, "state", flip("state", 100))
	clone(dsec.Corrupt, "ram", flip("ram", 64<<20))
	clone(dsec.Corrupt, "ram", func(dir string, _ *manifest) { _ = os.Truncate(filepath.Join(dir, "ram"), 1<<20) })
	clone(dsec.Corrupt, "state", func(dir string, _ *manifest) { _ = os.Remove(filepath.Join(dir, "state")) })
	clone(dsec.Corrupt, "manifest", func(_ string, man *manifest) { man.Identity.Memory += 1 << 20; man.RAM.Size += 1 << 20 })
	// A state that is what its manifest says, and no state.
	reseal := func(cut bool) func(string, *manifest) {
		return func(dir string, man *manifest) {
			name := filepath.Join(dir, "state")
			state, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			if cut {
				state = state[:len(state)/2]
			} else {
				state = bytes.Repeat([]byte("x"), len(state))
			}
			if err := os.WriteFile(name, state, 0o444); err != nil {
				t.Fatal(err)
			}
			man.State = content{int64(len(state)), fileOf(name).SHA256}
		}
	}
	clone(dsec.Corrupt, "it said", reseal(false))
	clone(dsec.Corrupt, "it said", reseal(true))
	d, err := New(t.Context(), Config{Dir: t.TempDir(), UID: testUID})
	if err != nil {
		t.Fatal(err)
	}
	_, err = d.Clone(t.Context(), vmm.Template{Key: strings.Repeat("0", 64)}, vmm.Devices{})
	wantClass(t, err, dsec.NotFound, "")
	_, err = d.Clone(t.Context(), vmm.Template{Key: "../x"}, vmm.Devices{})
	wantClass(t, err, dsec.Invalid, "")
	// Whoever builds makes what is damaged again.
	d, tp := damaged(t, g, flip("ram", 64<<20))
	again, err := d.BuildTemplate(ctxOf(t), g.shape, ready)
	if err != nil || again != tp {
		t.Fatalf("%v, %v", again, err)
	}
	m, err := d.Clone(ctxOf(t), again, g.devices(t, "x"))
	if err != nil {
		t.Fatal(err)
	}
	want(t, m, "ping", "pong")
	m.Kill()
	if left := qemus(t); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// A disk that is full while the template is written: of it, nothing is left.
func TestFullDiskWhileATemplateIsWritten(t *testing.T) {
	g := theGuest(t)
	for _, size := range []string{"64k", "8m"} { // its state finds no room, its memory finds none
		dir := t.TempDir()
		if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size="+size); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
		d, err := New(t.Context(), Config{Dir: dir, UID: testUID})
		if err != nil {
			t.Fatal(err)
		}
		_, err = d.BuildTemplate(ctxOf(t), g.shape, ready)
		wantClass(t, err, dsec.NoSpace, "no space")
		if names := list(t, dir); !slices.Equal(names, []string{"lock"}) {
			t.Errorf("left: %v", names)
		}
	}
	if left := qemus(t); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

func TestTemplatesThatAreNeverReady(t *testing.T) {
	g := theGuest(t)
	d, err := New(t.Context(), Config{Dir: t.TempDir(), UID: testUID})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	_, err = d.BuildTemplate(ctx, g.shape, ready)
	wantClass(t, err, dsec.Timeout, "not ready")
	// One that panics ends at once.
	_, err = d.BuildTemplate(ctxOf(t), g.shape, func(ctx context.Context, ch net.Conn) error {
		if err := ready(ctx, ch); err != nil {
			return err
		}
		_, _ = fmt.Fprintln(ch, "panic")
		_, err := readWord(ch)
		return err
	})
	wantClass(t, err, dsec.Unavailable, "ended itself")
	// One whose QEMU is killed, as it boots, when it is ready, and while it is saved.
	direct := Direct(nil)
	var p Process
	d.cfg.Spawn = func(c Command) (_ Process, err error) {
		p, err = direct(c)
		return p, err
	}
	for _, wait := range []time.Duration{-1, 0, 2} {
		_, err = d.BuildTemplate(ctxOf(t), g.shape, func(ctx context.Context, ch net.Conn) error {
			if wait < 0 {
				p.Kill()
			}
			err := ready(ctx, ch)
			if wait == 0 {
				p.Kill()
			}
			time.AfterFunc(wait*time.Millisecond, p.Kill)
			return err
		})
		if err == nil {
			t.Logf("killed %d ms after it was ready, it was saved already", wait)
			if err := os.RemoveAll(filepath.Join(d.cfg.Dir, g.template(t).Key)); err != nil {
				t.Fatal(err)
			}
			d.Close()
			continue
		}
		wantClass(t, err, dsec.Unavailable, "signal: killed")
	}
	if names := list(t, d.cfg.Dir); !slices.Equal(names, []string{"lock"}) {
		t.Errorf("left: %v", names)
	}
	if left := qemus(t); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// Who builds what another builds gets that.
func TestATemplateIsBootedOnce(t *testing.T) {
	g := theGuest(t)
	dir := t.TempDir()
	var boots atomic.Int32
	var wg sync.WaitGroup
	for range 3 {
		d, err := New(t.Context(), Config{Dir: dir, UID: testUID})
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		for range 2 {
			wg.Go(func() {
				_, err := d.BuildTemplate(ctxOf(t), g.shape, func(ctx context.Context, ch net.Conn) error {
					boots.Add(1)
					return ready(ctx, ch)
				})
				if err != nil {
					t.Error(err)
				}
			})
		}
	}
	wg.Wait()
	if n := boots.Load(); n != 1 {
		t.Errorf("booted %d times", n)
	}
}

// Of templates those used last stay, fewer in memory than on disk; a clone of one that does not goes on.
func TestOldTemplatesAreDropped(t *testing.T) {
	g := theGuest(t)
	d, err := New(t.Context(), Config{Dir: t.TempDir(), UID: testUID, InMemory: 1, OnDisk: 2})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	boots := 0
	template := func(mib int64) vmm.Template {
		t.Helper()
		s := g.shape
		s.Memory = mib << 20
		tp, err := d.BuildTemplate(ctxOf(t), s, func(ctx context.Context, ch net.Conn) error {
			boots++
			return ready(ctx, ch)
		})
		if err != nil {
			t.Fatal(err)
		}
		return tp
	}
	clone := func(tp vmm.Template) vmm.VM {
		t.Helper()
		m, err := d.Clone(ctxOf(t), tp, g.devices(t, "x"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(m.Kill)
		return m
	}
	there := func(want ...vmm.Template) {
		t.Helper()
		var keys, have, open []string
		for _, tp := range want {
			keys = append(keys, tp.Key)
		}
		names, err := filepath.Glob(filepath.Join(d.cfg.Dir, "*", "ram"))
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range names {
			have = append(have, filepath.Base(filepath.Dir(n)))
		}
		for key, o := range d.templates {
			if o.ram != nil {
				open = append(open, key)
			}
		}
		slices.Sort(have)
		if last := keys[len(keys)-1]; !slices.Equal(open, []string{last}) {
			t.Errorf("in memory %v, want %v", open, last)
		}
		if slices.Sort(keys); !slices.Equal(have, keys) {
			t.Errorf("on disk %v, want %v", have, keys)
		}
	}
	a := template(96)
	if err := os.Mkdir(filepath.Join(d.cfg.Dir, temporary+a.Key), 0o700); err != nil { // somebody was killed who removed one
		t.Fatal(err)
	}
	old := clone(a)
	b := template(100)
	there(a, b)
	template(96) // is used again
	there(b, a)
	c := template(104)
	there(a, c)
	want(t, old, "ping", "pong")
	want(t, clone(a), "ping", "pong")
	there(c, a)
	if _, err := d.Clone(ctxOf(t), b, g.devices(t, "x")); dsec.ClassOf(err) != dsec.NotFound {
		t.Errorf("a clone of what was dropped: %v", err)
	}
	want(t, clone(template(100)), "ping", "pong")
	if boots != 4 {
		t.Errorf("booted %d times", boots)
	}
	d.Close()
	if _, err := d.Clone(ctxOf(t), c, g.devices(t, "x")); !errors.Is(err, os.ErrClosed) {
		t.Errorf("a clone of a driver that was closed: %v", err)
	}
}
