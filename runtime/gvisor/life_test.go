package gvisor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/accounts"
	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/runtimetest/layertest"
)

// TestTheKernelInsideIsNotTheMachines: and nothing of a sandbox runs as root on it.
func TestTheKernelInsideIsNotTheMachines(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	id := w.create(t)
	w.want(t, id, "uname -r; id -u", "4.19.0-gvisor\n0\n")
	p, err := w.r.Exec(t.Context(), id, process.Spec{Argv: []string{"sleep", "300"}})
	must(t, err)
	pids := w.pids(t, id)
	if len(pids) < 4 { // PID 1 of the shell, who started the sentry, the sentry, who stands for the command
		t.Errorf("processes %v", pids)
	}
	rec := w.r.boxes.Reserve(id).record()
	for _, pid := range pids {
		for _, uid := range uidsOf(t, pid) {
			if uid < rec.UID || uid >= rec.UID+accounts.IDs {
				t.Errorf("process %d has uid %d, the sandbox has %d to %d", pid, uid, rec.UID, rec.UID+accounts.IDs-1)
			}
		}
	}
	must(t, p.Kill(t.Context()))
}

// pids are the processes of a sandbox, on the machine.
func (w *world) pids(t *testing.T, id dsec.SandboxID) (all []int) {
	t.Helper()
	g, err := w.groups.Group(name(id))
	must(t, err)
	must(t, filepath.WalkDir(g.Paths().Unified, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.Name() != "cgroup.procs" {
			return nil // a command's group goes with it
		}
		b, _ := os.ReadFile(path)
		for _, f := range strings.Fields(string(b)) {
			n, err := strconv.Atoi(f)
			if err == nil {
				all = append(all, n)
			}
		}
		return nil
	}))
	return all
}

func uidsOf(t *testing.T, pid int) (out []uint32) {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return nil // one of the short ones
	}
	must(t, err)
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "Uid:"); ok {
			for _, f := range strings.Fields(rest) {
				n, err := strconv.ParseUint(f, 10, 32)
				must(t, err)
				out = append(out, uint32(n))
			}
		}
	}
	return out
}

// TestAKilledSentryIsAnEnd: with the cause that it was not the sandbox's doing, and with
// nothing left; the disk goes back to what it was at the last stop.
func TestAKilledSentryIsAnEnd(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	id := w.create(t)
	w.want(t, id, "echo kept > /root/a", "")
	must(t, w.r.Stop(t.Context(), id, 0))
	_, err := w.r.Start(t.Context(), id)
	must(t, err)
	w.want(t, id, "cat /root/a; echo lost > /root/b", "kept\n")
	p, err := w.r.Exec(t.Context(), id, process.Spec{Argv: []string{"sleep", "300"}})
	must(t, err)
	must(t, unix.Kill(w.sentry(t, id), unix.SIGKILL))
	select {
	case x := <-w.r.Exits():
		if x.ID != id || x.Cause != dsec.CauseUnknown || x.By != dsec.InducedByUnknown {
			t.Errorf("%+v", x)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("no exit")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if _, err := p.Wait(ctx); err != nil && !errors.Is(err, dsec.SandboxGone.Err()) {
		t.Errorf("its command: %v", err)
	}
	_, err = w.r.Start(t.Context(), id)
	must(t, err)
	w.want(t, id, "cat /root/a; test -e /root/b || echo gone", "kept\ngone\n")
}

// sentry is the pid of the process that is the kernel of a sandbox.
func (w *world) sentry(t *testing.T, id dsec.SandboxID) int {
	t.Helper()
	for _, pid := range w.pids(t, id) {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if strings.HasPrefix(string(b), "runsc-sandbox\x00") {
			return pid
		}
	}
	t.Fatal("no sentry")
	return 0
}

// TestLayersAreOneImage: what they show together, made once for all sandboxes, and
// removed when no one has it.
func TestLayersAreOneImage(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	over := layertest.New(t, func(dir string) error {
		return errors.Join(os.MkdirAll(filepath.Join(dir, "opt/tool"), 0o755), os.WriteFile(filepath.Join(dir, "opt/tool/a"), []byte("over\n"), 0o644))
	})
	gone := layertest.New(t, func(dir string) error {
		return errors.Join(os.Mkdir(filepath.Join(dir, "etc"), 0o755), unix.Mknod(filepath.Join(dir, "etc/group"), unix.S_IFCHR, 0))
	})
	stacked := func(r *runtime.Request) { r.Layers.Layers = []layer.Local{layertest.Base(t), over, gone} }
	a, b := w.create(t, stacked), w.create(t, stacked)
	for _, id := range []dsec.SandboxID{a, b} {
		w.want(t, id, "cat /opt/tool/a; test -e /etc/group || echo hidden; cat /etc/passwd | wc -l", "over\nhidden\n2\n")
	}
	count := func() int {
		found, _ := filepath.Glob(filepath.Join(w.dir, "images", "*", imageFile))
		return len(found)
	}
	if n := count(); n != 2 { // and the empty one
		t.Errorf("%d images", n)
	}
	if _, err := w.r.images.Collect(0); err != nil || count() != 1 {
		t.Errorf("what is used was removed, or what is not is there: %d, %v", count(), err)
	}
	w.want(t, a, "cat /opt/tool/a", "over\n")
	must(t, errors.Join(w.r.Destroy(t.Context(), a), w.r.Destroy(t.Context(), b)))
	if taken, err := w.r.images.Collect(0); err != nil || taken != 0 || count() != 0 {
		t.Errorf("%d bytes, %d images are left: %v", taken, count(), err)
	}
}

// TestWhatIsNotHereIsNotReadAsZeros: a layer whose data come on demand.
func TestWhatIsNotHereIsNotReadAsZeros(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	l := layertest.New(t, func(dir string) error { return os.WriteFile(filepath.Join(dir, "f"), []byte("x"), 0o644) })
	l.DataSize = 1
	must(t, os.WriteFile(filepath.Join(filepath.Dir(l.Data), layer.PresentFile), nil, 0o600))
	r := request(t, func(r *runtime.Request) { r.Layers.Layers = append(r.Layers.Layers, l) })
	if _, err := w.r.Create(t.Context(), r); !errors.Is(err, dsec.Unavailable.Err()) {
		t.Errorf("%v", err)
	}
	w.r.images.complete = func(_ context.Context, l layer.Local) error {
		return os.Remove(filepath.Join(filepath.Dir(l.Data), layer.PresentFile))
	}
	_, err := w.r.Create(t.Context(), r)
	must(t, err)
	w.want(t, r.ID, "cat /f", "x")
}

// TestWithoutRunscItSaysSo: never a container instead.
func TestWithoutRunscItSaysSo(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for path, want := range map[string]string{"": "node.runsc", "/nonexistent/runsc": "/nonexistent/runsc", "/bin/true": "does not say that it is runsc"} {
		must(t, w.r.Close())
		c := w.config()
		c.Runsc = path
		var err error
		w.r, err = Open(t.Context(), c)
		must(t, err)
		_, err = w.r.Create(t.Context(), request(t))
		if !errors.Is(err, dsec.Unsupported.Err()) || !strings.Contains(err.Error(), want) {
			t.Errorf("runsc %q: %v", path, err)
		}
		if r := w.r.Probe(t.Context()); r.OK || len(r.Checks) == 0 || !strings.Contains(r.Checks[0].Detail, want) {
			t.Errorf("runsc %q: %+v", path, r)
		}
	}
	// One that says so, and starts nothing.
	liar := filepath.Join(w.dir, "liar")
	must(t, os.WriteFile(liar, []byte("#!/bin/sh\n[ \"$1\" = --version ] && echo runsc version liar && exit\necho no sentry here >&2\nexit 1\n"), 0o755))
	must(t, w.r.Close())
	c := w.config()
	c.Runsc = liar
	var err error
	w.r, err = Open(t.Context(), c)
	must(t, err)
	if _, err := w.r.Create(t.Context(), request(t)); !errors.Is(err, dsec.Unsupported.Err()) {
		t.Errorf("one that starts nothing: %v", err)
	}
}

// TestAStopKeepsWhatOverlaysAreMadeOf: removed names, directories that hide those below,
// links, times, modes, owners and attributes.
func TestAStopKeepsWhatOverlaysAreMadeOf(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	id := w.create(t)
	w.want(t, id, `rm /etc/group; rm -r /home/user; mkdir /home/user; echo new > /home/user/f; chown 1000:1234 /home/user/f; chmod 4750 /home/user/f
		ln /home/user/f /home/user/hard; ln -s f /home/user/soft; mv /bin/busybox /bin/renamed; ln -s renamed /bin/busybox
		dd if=/dev/urandom of=/root/random bs=1000 count=3000 2>/dev/null; sync`, "")
	script := `ls -la /home/user | cut -c1-30,40-; cat /home/user/soft; test -e /etc/group || echo gone; od -A n -t x4 /root/random | sed -n '1~997p'
		stat -c %h /home/user/f /home/user/hard; wc -c < /root/random`
	before := w.sh(t, id, script)
	must(t, w.r.Stop(t.Context(), id, 0))
	_, err := w.r.Start(t.Context(), id)
	must(t, err)
	after := w.sh(t, id, script)
	if before.Stdout != after.Stdout || !strings.HasSuffix(before.Stdout, "2\n2\n3000000\n") || !strings.Contains(before.Stdout, "new\ngone\n") {
		t.Errorf("before %q %s\nafter %q %s", before.Stdout, before.Stderr, after.Stdout, after.Stderr)
	}
}

// TestAKilledAgentLeavesNoHalf: what has no record is removed.
func TestAKilledAgentLeavesNoHalf(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	id := w.create(t)
	// As if it had been killed between the hold and the record: only the shell and the group are there.
	must(t, os.Remove(filepath.Join(w.r.dir(id), stateFile)))
	stray := dsec.NewSandboxID("t")
	_, err := w.groups.Create(name(stray), cgroup.Limits{Pids: 10})
	must(t, err)
	w.close(t)
	w.open(t)
	if list, err := w.r.List(t.Context()); err != nil || len(list) != 0 {
		t.Errorf("%v %v", list, err)
	}
	w.wantNothing(t)
}

func TestImagesOfTheSameLayersHaveOneName(t *testing.T) {
	a, b := layer.Local{Info: layer.Info{Digest: "sha256:a"}}, layer.Local{Info: layer.Info{Digest: "sha256:b"}}
	if imageOf([]layer.Local{a, b}) == imageOf([]layer.Local{b, a}) || imageOf([]layer.Local{a}) == imageOf([]layer.Local{a, b}) {
		t.Error("stacks that differ have one image")
	}
	if imageOf([]layer.Local{a, b}) != imageOf([]layer.Local{a, b}) {
		t.Error("one stack has two images")
	}
}
