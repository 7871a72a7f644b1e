package qemu

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
)

// A machine that has changed its memory is written while it runs, goes on, and is
// another one when it is restored; so is one that was restored.
func TestSnapshotOfARunningMachine(t *testing.T) {
	g := theGuest(t)
	tp := g.template(t)
	dev := g.devices(t, "layer")
	first, err := g.driver.Clone(ctxOf(t), tp, dev)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(first.Kill)
	want(t, first, "set before", "ok")
	want(t, first, "fill 30 page", "ok")
	dir := filepath.Join(t.TempDir(), "snapshot")
	began := time.Now()
	if err := first.Snapshot(ctxOf(t), dir); err != nil {
		t.Fatal(err)
	}
	st, err := os.Stat(filepath.Join(dir, "state"))
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("written in %v: %d MiB", time.Since(began).Round(time.Millisecond), st.Size()>>20)
	want(t, first, "get", "before")
	want(t, first, "set after", "ok")
	wantClass(t, first.Snapshot(ctxOf(t), dir), dsec.AlreadyExists, dir)
	if err := first.Stop(t.Context()); err != nil {
		t.Error(err)
	}
	began = time.Now()
	second, err := g.driver.Restore(ctxOf(t), dir, dev)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(second.Kill)
	t.Logf("restored in %v", time.Since(began).Round(time.Millisecond))
	paused(t, second)
	if err := second.Resume(ctxOf(t)); err != nil {
		t.Fatal(err)
	}
	want(t, second, "", "error: nothing") // what paused said
	want(t, second, "get", "before")
	want(t, second, "read /dev/pmem0 0", hexOf("layer"))
	want(t, second, "set third", "ok")
	// Paused, it stays that; there is one snapshot of one moment.
	if err := second.Pause(ctxOf(t)); err != nil {
		t.Fatal(err)
	}
	dir += "2"
	if err := second.Snapshot(ctxOf(t), dir); err != nil {
		t.Fatal(err)
	}
	wantClass(t, second.Snapshot(ctxOf(t), dir+"x"), dsec.IllegalState, "has not run since")
	if err := second.Pause(ctxOf(t)); err != nil {
		t.Error(err)
	}
	if err := second.Resume(ctxOf(t)); err != nil {
		t.Error(err)
	}
	want(t, second, "write /dev/vda 512 still", "ok")
	second.Kill()
	third, err := g.driver.Restore(ctxOf(t), dir, dev)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(third.Kill)
	if err := third.Resume(ctxOf(t)); err != nil {
		t.Fatal(err)
	}
	want(t, third, "get", "third")
	if err := third.Stop(t.Context()); err != nil {
		t.Error(err)
	}
	if left := qemus(t); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// paused sends an empty line, which is not answered.
func paused(t *testing.T, m vmm.VM) {
	t.Helper()
	if status, err := m.(*machine).status(t.Context()); err != nil || status != "paused" {
		t.Errorf("the machine is %q, %v", status, err)
	}
}

func TestPauseAndResume(t *testing.T) {
	g := theGuest(t)
	m := g.clone(t, "x")
	for range 2 {
		if err := m.Pause(ctxOf(t)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := fmt.Fprintln(m.Channel(), "ping"); err != nil {
		t.Fatal(err)
	}
	_ = m.Channel().SetReadDeadline(time.Now().Add(100 * time.Millisecond))
	if word, err := readWord(m.Channel()); err == nil {
		t.Errorf("a paused guest said %q", word)
	}
	_ = m.Channel().SetReadDeadline(time.Time{})
	for range 2 {
		if err := m.Resume(ctxOf(t)); err != nil {
			t.Fatal(err)
		}
	}
	if word, err := readWord(m.Channel()); err != nil || word != "pong" {
		t.Errorf("%q, %v", word, err)
	}
}

func TestDamagedSnapshots(t *testing.T) {
	g := theGuest(t)
	dev := g.devices(t, "x")
	m, err := g.driver.Clone(ctxOf(t), g.template(t), dev)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Kill)
	// No room for it: the machine goes on, and nothing is left.
	small := t.TempDir()
	if err := unix.Mount("tmpfs", small, "tmpfs", 0, "size=1m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(small, unix.MNT_DETACH) })
	wantClass(t, m.Snapshot(ctxOf(t), filepath.Join(small, "s")), dsec.NoSpace, "no space")
	if names := list(t, small); len(names) != 0 {
		t.Errorf("left: %v", names)
	}
	want(t, m, "ping", "pong")
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := m.Snapshot(ctx, filepath.Join(small, "s")); err == nil {
		t.Error("a snapshot in no time")
	}
	want(t, m, "ping", "pong")
	good := filepath.Join(t.TempDir(), "good")
	if err := m.Snapshot(ctxOf(t), good); err != nil {
		t.Fatal(err)
	}
	m.Kill()
	restore := func(class dsec.Class, text string, change func(dir string, man *manifest)) {
		t.Helper()
		dir := filepath.Join(t.TempDir(), "s")
		if err := os.CopyFS(dir, os.DirFS(good)); err != nil {
			t.Fatal(err)
		}
		man, err := readManifest(dir, kindSnapshot)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range list(t, dir) {
			_ = os.Chmod(filepath.Join(dir, name), 0o644)
		}
		change(dir, &man)
		if err := os.WriteFile(filepath.Join(dir, "manifest.json"), man.encode(), 0o644); err != nil {
			t.Fatal(err)
		}
		m, err := g.driver.Restore(ctxOf(t), dir, dev)
		if err == nil {
			m.Kill()
		}
		wantClass(t, err, class, text)
	}
	state := func(dir string, change func([]byte) []byte) content {
		name := filepath.Join(dir, "state")
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		b = change(b)
		if err := os.WriteFile(name, b, 0o644); err != nil {
			t.Fatal(err)
		}
		return content{int64(len(b)), fileOf(name).SHA256}
	}
	cut := func(b []byte) []byte { return b[:len(b)/2] }
	restore(dsec.Corrupt, "state", func(dir string, _ *manifest) { state(dir, cut) })
	restore(dsec.Corrupt, "digest", func(dir string, _ *manifest) { state(dir, func(b []byte) []byte { b[1000] ^= 1; return b }) })
	restore(dsec.Corrupt, "it said", func(dir string, man *manifest) { man.State = state(dir, cut) })
	restore(dsec.Corrupt, "it said", func(dir string, man *manifest) {
		man.State = state(dir, func(b []byte) []byte { return slices.Repeat([]byte{1}, len(b)) })
	})
	restore(dsec.Unsupported, "accelerator", func(_ string, man *manifest) {
		man.Identity = g.driver.identity(line{accel: kvm, shape: g.shape})
	})
	_, err = g.driver.Restore(ctxOf(t), good+"?", dev)
	wantClass(t, err, dsec.NotFound, "no such")
	_, err = g.driver.Restore(ctxOf(t), filepath.Join(g.driver.cfg.Dir, g.template(t).Key), dev)
	wantClass(t, err, dsec.Invalid, "it is a template")
	if left := qemus(t); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// Guests that end themselves: whoever waits is told at once.
func TestHowMachinesEnd(t *testing.T) {
	g := theGuest(t)
	cold, err := g.driver.Start(ctxOf(t), g.shape, g.devices(t, "x"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cold.Kill)
	if err := cold.(*machine).settle(ctxOf(t), ready, time.Minute); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		m          vmm.VM
		line, text string
	}{{g.clone(t, "x"), "panic", "guest-reset"}, {cold, "off", "guest-shutdown"}} {
		want(t, c.m, "shout 2000", "ok")
		if _, err := fmt.Fprintln(c.m.Channel(), c.line); err != nil {
			t.Fatal(err)
		}
		select {
		case <-c.m.Done():
		case <-time.After(20 * time.Second):
			t.Fatalf("%s: it lives", c.line)
		}
		wantClass(t, c.m.Err(), dsec.SandboxGone, c.text)
		if n := len(c.m.Err().Error()); n > 2000 {
			t.Errorf("an error of %d bytes", n)
		}
		wantClass(t, c.m.Resume(t.Context()), dsec.SandboxGone, c.text)
		if err := c.m.Stop(t.Context()); err != nil {
			t.Error(err)
		}
	}
	// A clone that powers off may never come to the end of it.
	m := g.clone(t, "x")
	if _, err := fmt.Fprintln(m.Channel(), "off"); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if err := m.Stop(t.Context()); err != nil || time.Since(began) > stopTime {
		t.Errorf("%v after %v", err, time.Since(began))
	}
}

// Two machines of one disk would destroy it.
func TestADiskHasOneMachine(t *testing.T) {
	g := theGuest(t)
	dev := g.devices(t, "x")
	m, err := g.driver.Clone(ctxOf(t), g.template(t), dev)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Kill)
	other, err := g.driver.Clone(ctxOf(t), g.template(t), dev)
	if err == nil {
		other.Kill()
	}
	wantClass(t, err, dsec.Conflict, "another machine")
	want(t, m, "write /dev/vda 0 mine", "ok")
	m.Kill()
	if other, err = g.driver.Clone(ctxOf(t), g.template(t), dev); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(other.Kill)
	want(t, other, "read /dev/vda 0", hexOf("mine x"))
}

// There are no more machines than users for them.
func TestEachQEMUHasAUser(t *testing.T) {
	g := theGuest(t)
	d, err := New(t.Context(), Config{Dir: g.driver.cfg.Dir, UID: testUID, UIDs: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Close)
	for range 2 {
		m, err := d.Clone(ctxOf(t), g.template(t), g.devices(t, "x"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(m.Kill)
		_, err = d.Clone(ctxOf(t), g.template(t), g.devices(t, "x"))
		wantClass(t, err, dsec.ResourceExhausted, "no more users")
		want(t, m, "ping", "pong")
		m.Kill()
	}
	if _, err := New(t.Context(), Config{Dir: t.TempDir()}); os.Geteuid() == 0 {
		wantClass(t, err, dsec.Invalid, "as root")
	}
}

// A clone that waits is a process, and begins once.
func TestWaitingClones(t *testing.T) {
	g := theGuest(t)
	prepare := func() *waiting {
		t.Helper()
		w, err := g.driver.Prepare(ctxOf(t), g.template(t), g.devices(t, "x"))
		if err != nil {
			t.Fatal(err)
		}
		return w.(*waiting)
	}
	w := prepare()
	pss, err := w.m.Memory()
	t.Logf("one that waits: PSS %d MiB, %v", pss>>20, err)
	m, err := w.Begin(ctxOf(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Kill)
	want(t, m, "read /dev/pmem0 0", hexOf("x"))
	w.Drop()
	want(t, m, "ping", "pong")
	_, err = w.Begin(ctxOf(t))
	wantClass(t, err, dsec.IllegalState, "has begun")
	m.Kill()
	prepare().Drop()
	// It dies while it waits.
	w = prepare()
	w.m.proc.Kill()
	<-w.m.done
	_, err = w.Begin(ctxOf(t))
	wantClass(t, err, dsec.Unavailable, "signal: killed")
	// Nobody waits for it to begin.
	w = prepare()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = w.Begin(ctx)
	wantClass(t, err, dsec.Canceled, "")
	if left := qemus(t); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

func TestQEMUIsKilledAtAnyMoment(t *testing.T) {
	g := theGuest(t)
	tp := g.template(t)
	before := openFiles(t)
	direct := Direct(nil)
	for i, wait := range []time.Duration{0, 2, 5, 10, 20, 30, 40, 60, 80} {
		killed := make(chan struct{})
		d, err := New(t.Context(), Config{Dir: g.driver.cfg.Dir, UID: testUID, Spawn: func(c Command) (Process, error) {
			p, err := direct(c)
			if err == nil {
				time.AfterFunc(wait*time.Millisecond, func() { p.Kill(); close(killed) })
			}
			return p, err
		}})
		if err != nil {
			t.Fatal(err)
		}
		m, err := d.Clone(ctxOf(t), tp, g.devices(t, "x"))
		<-killed
		began := time.Now()
		if err == nil { // it was killed later
			dir := filepath.Join(t.TempDir(), "s")
			err = m.Snapshot(ctxOf(t), dir)
			<-m.Done()
			wantClass(t, m.Err(), dsec.Unavailable, "signal: killed")
			wantClass(t, err, dsec.SandboxGone, "killed")
			if names := list(t, filepath.Dir(dir)); len(names) != 0 {
				t.Errorf("left: %v", names)
			}
			m.Kill()
		} else {
			wantClass(t, err, dsec.Unavailable, "signal: killed")
		}
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("%d: known after %v", i, took)
		}
		d.Close()
	}
	if left := qemus(t); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	if after := openFiles(t); len(after) > len(before) {
		t.Errorf("%d files are open, %d were: %v", len(after), len(before), after)
	}
}

// openFiles lists what this process has open, without what its runtime has.
func openFiles(t *testing.T) (names []string) {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		to, err := os.Readlink("/proc/self/fd/" + e.Name())
		if err == nil && !strings.Contains(to, "anon_inode") {
			names = append(names, to)
		}
	}
	return names
}
