package container

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/internal/failpoint"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/runtimetest/layertest"
)

// newFiles is a pair of empty files.
func newFiles(t testing.TB) (f image.Files, dir string) {
	t.Helper()
	dir = t.TempDir()
	for name, to := range map[string]**os.File{"meta": &f.Meta, "data": &f.Data} {
		file, err := os.Create(filepath.Join(dir, name))
		must(t, err)
		t.Cleanup(func() { file.Close() })
		*to = file
	}
	return f, dir
}

// pack packs a disk into a layer.
func (w *world) pack(t testing.TB, id dsec.SandboxID) (layer.Local, dsec.Packed) {
	t.Helper()
	f, dir := newFiles(t)
	p, err := w.r.Pack(context.Background(), id, f, dsec.Scrub{})
	must(t, err)
	l := layer.Local{Meta: dir + "/meta", Info: layer.Info{Digest: layer.Digest(fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(dir)))), MetaSize: p.MetaSize, DataSize: p.DataSize,
		Lineage: &dsec.Lineage{Sandbox: id}}}
	if p.DataSize > 0 {
		l.Data = dir + "/data"
	}
	return l, p
}

// on adds layers to a request.
func on(layers ...layer.Local) func(*runtime.Request) {
	return func(r *runtime.Request) { r.Layers.Layers = append(r.Layers.Layers, layers...) }
}

const nasty = `set -e
	echo new > /new; chown 1000:1000 /new; chmod 4755 /new; ln /new /hard; ln -s new /soft; rm /gone
	rm -r /replaced; mkdir /replaced; echo y > /replaced/y; mv /lib /renamed; rm /renamed/deep/g; echo more > /renamed/deep/h
	dd if=/dev/zero of=/sparse bs=1 count=1 seek=20M 2>/dev/null; mkdir /tmp/sticky; chmod 1777 /tmp/sticky; chmod 711 /home
	mknod /pipe p; touch -d @12345 /old; echo changed > /etc/group; chmod 711 /; chown 0:1000 /; touch -d @54321 /`

const show = `cd /; stat -c "%n %a %u %g %F %Y" / home renamed replaced tmp/sticky; stat -c "%n %a %u %g %F %h %s %Y" new hard soft sparse old pipe etc/group
	ls replaced renamed/deep; cat new renamed/deep/f renamed/deep/h replaced/y etc/group; ls gone lib 2>&1; cat /root/later 2>&1`

func lowerOf(t testing.TB) layer.Local {
	return layertest.New(t, func(dir string) error {
		return errors.Join(os.MkdirAll(dir+"/lib/deep", 0o755), os.WriteFile(dir+"/lib/deep/f", []byte("lower"), 0o644), os.WriteFile(dir+"/lib/deep/g", nil, 0o644),
			os.WriteFile(dir+"/gone", nil, 0o644), os.MkdirAll(dir+"/replaced/x", 0o755))
	})
}

func TestAPackedDiskIsRestored(t *testing.T) {
	for name, options := range map[string][]func(*world){"copied": nil, "attached plan": {attachedPlan}, "standing still": {loopDisks}} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, options...)
			lower := lowerOf(t)
			id := w.create(t, on(lower))
			w.want(t, id, nasty, "")
			want := w.sh(t, id, show).Stdout
			running, p := w.pack(t, id)
			if p.Pause <= 0 {
				t.Errorf("paused for %v", p.Pause)
			}
			w.want(t, id, "echo goes on > /root/later", "")
			must(t, w.r.Pause(t.Context(), id))
			paused, p := w.pack(t, id)
			if p.Pause != 0 {
				t.Errorf("a paused one paused for %v", p.Pause)
			}
			must(t, w.r.Resume(t.Context(), id))
			must(t, w.r.Stop(t.Context(), id, 0))
			stopped, _ := w.pack(t, id)
			must(t, w.r.Destroy(t.Context(), id))
			later := strings.Replace(want, "cat: can't open '/root/later': No such file or directory", "goes on", 1)
			for _, c := range []struct {
				name string
				l    layer.Local
				want string
			}{{"running", running, want}, {"paused", paused, later}, {"stopped", stopped, later}} {
				again := w.create(t, on(lower, c.l))
				if got := w.sh(t, again, show).Stdout; got != c.want {
					t.Errorf("%s:\n%s\nwant\n%s", c.name, got, c.want)
				}
				w.want(t, again, "cat /etc/hostname", string(again)+"\n") // its own
				must(t, w.r.Destroy(t.Context(), again))
			}
			w.wantNothing(t)
		})
	}
}

// TestH5_CommandsThatStartWhileItIsPackedLive starts twenty while the disk is
// packed again and again.
func TestH5_CommandsThatStartWhileItIsPackedLive(t *testing.T) {
	for name, options := range map[string][]func(*world){"copied": nil, "standing still": {loopDisks}} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, options...)
			id := w.create(t)
			stop, packed := make(chan struct{}), make(chan int)
			go func() {
				n := 0
				defer func() { packed <- n }()
				for {
					select {
					case <-stop:
						return
					default:
						w.pack(t, id)
						n++
					}
				}
			}()
			var wg sync.WaitGroup
			for i := range 20 {
				wg.Go(func() {
					p, err := w.r.Exec(t.Context(), id, process.Spec{ID: fmt.Sprintf("e%d", i), Argv: []string{"sh", "-c", "echo alive; read x; echo $x"}, Stdin: true})
					if err != nil {
						t.Error(i, err)
						return
					}
					_, err = p.Write(t.Context(), []byte("answer\n"))
					if err != nil {
						t.Error(i, err)
					}
					if r, err := p.Wait(t.Context()); err != nil || r.ExitCode != 0 {
						t.Error(i, r, err)
					}
				})
			}
			wg.Wait()
			close(stop)
			if n := <-packed; n == 0 {
				t.Error("it was never packed")
			}
		})
	}
}

// program is a layer with a program of this machine and what it is linked with.
func program(t *testing.T, name string) layer.Local {
	t.Helper()
	file, err := exec.LookPath(name)
	if err != nil {
		t.Skipf("Debian's %s is needed: %v", name, err)
	}
	out, err := exec.Command("ldd", file).Output()
	must(t, err)
	return layertest.New(t, func(dir string) error {
		for _, f := range append(regexp.MustCompile(`/[^ )]+`).FindAllString(string(out), -1), file) {
			b, err := os.ReadFile(f)
			if err != nil {
				return err
			}
			if err := os.MkdirAll(dir+filepath.Dir(f), 0o755); err != nil {
				return err
			}
			if err := os.WriteFile(dir+f, b, 0o755); err != nil {
				return err
			}
		}
		return nil
	})
}

// TestH11_ARunningDatabaseIsConsistent packs a disk while SQLite writes to it, in
// both of its journal modes, and has it check what was restored.
func TestH11_ARunningDatabaseIsConsistent(t *testing.T) {
	sqlite := program(t, "sqlite3")
	for name, options := range map[string][]func(*world){"copied": nil, "standing still": {loopDisks}} {
		for _, mode := range []string{"wal", "delete"} {
			t.Run(name+" "+mode, func(t *testing.T) {
				w := newWorld(t, options...)
				id := w.create(t, on(sqlite))
				p, err := w.r.Exec(t.Context(), id, process.Spec{ID: "db", Argv: []string{"sh", "-c", `exec 2>&1; db="sqlite3 -cmd '.timeout 5000' /root/db" # who looks must not keep it from its first lock
					echo "pragma journal_mode=` + mode + `; pragma synchronous=off; create table t(i integer primary key, x blob);" | eval $db
					i=0; while :; do i=$((i+1)); echo "insert into t(x) values(randomblob(3000));"; [ $i = 50 ] && echo "update t set x=randomblob(2000) where i % 7 = 1;" && i=0; done | eval $db`}})
				must(t, err)
				eventually(t, "there are rows", func() bool {
					return w.sh(t, id, `[ "$(echo 'select count(*)>300 from t' | sqlite3 -cmd '.timeout 5000' /root/db)" = 1 ]`).ExitCode == 0
				})
				for range 3 {
					l, _ := w.pack(t, id)
					again := w.create(t, on(sqlite, l))
					o := w.sh(t, again, `echo "pragma integrity_check; select count(*) > 300 from t;" | sqlite3 /root/db`)
					if o.Stdout != "ok\n1\n" {
						t.Errorf("%q %q", o.Stdout, o.Stderr)
					}
					must(t, w.r.Destroy(t.Context(), again))
				}
				must(t, p.Kill(t.Context()))
			})
		}
	}
}

// packedEnv makes this test binary an agent that dies while it packs.
const packedEnv = "DSEC_CONTAINER_TEST_PACKED"

// TestAPackThatIsCutOffLeavesTheSandboxRunning: an error, a cancellation and a
// kill of the agent, before, in and after the moment in which it stands still.
func TestAPackThatIsCutOffLeavesTheSandboxRunning(t *testing.T) {
	if os.Getenv(packedEnv) != "" {
		packingAgent(t)
		return
	}
	for name, options := range map[string][]func(*world){"copied": nil, "standing still": {loopDisks}} {
		t.Run(name, func(t *testing.T) { cutOff(t, newWorld(t, options...)) })
	}
}

func cutOff(t *testing.T, w *world) {
	id := w.create(t)
	ticks := func(when string) {
		t.Helper()
		must(t, nil)
		if frozen, err := w.r.boxes.Reserve(id).group.Frozen(); err != nil || frozen {
			t.Errorf("%s: frozen %v %v", when, frozen, err)
		}
		w.want(t, id, "echo runs", "runs\n")
		if names, err := w.disks.List(t.Context()); err != nil || len(names) != 1 {
			t.Errorf("%s: disks %v %v", when, names, err)
		}
		if rec := w.r.boxes.Reserve(id).record(); rec.Still {
			t.Errorf("%s: the state says it stands still", when)
		}
		p, err := w.r.Exec(t.Context(), id, process.Spec{Argv: []string{"sleep", "60"}, Timeout: 50 * time.Millisecond})
		must(t, err)
		if r, err := p.Wait(t.Context()); err != nil || r.Status != process.TimedOut {
			t.Errorf("%s: the clock of commands stands: %+v %v", when, r, err)
		}
	}
	for _, at := range []string{"container.pack.frozen", "container.pack.disk"} {
		f, _ := newFiles(t)
		disarm := failpoint.Arm(at, failpoint.Once(dsec.E(dsec.NoSpace, "armed", at, nil)))
		_, err := w.r.Pack(t.Context(), id, f, dsec.Scrub{})
		disarm()
		if dsec.ClassOf(err) != dsec.NoSpace {
			t.Errorf("%s: %v", at, err)
		}
		ticks("an error at " + at)
		ctx, cancel := context.WithCancel(t.Context())
		disarm = failpoint.Arm(at, failpoint.Call(cancel))
		_, err = w.r.Pack(ctx, id, f, dsec.Scrub{})
		disarm()
		if dsec.ClassOf(err) != dsec.Canceled {
			t.Errorf("%s: cancelled: %v", at, err)
		}
		ticks("a cancellation at " + at)
	}
	for _, at := range []string{"container.pack.frozen", "container.pack.disk"} {
		w.close(t)
		cmd := exec.Command(os.Args[0], "-test.run=TestAPackThatIsCutOffLeavesTheSandboxRunning$")
		cmd.Env = append(os.Environ(), packedEnv+"="+strings.Join([]string{at, w.dir, w.name, string(id), fmt.Sprint(w.uidBase), w.disk}, "\x1f"))
		out, err := cmd.CombinedOutput()
		if ee, ok := errors.AsType[*exec.ExitError](err); !ok || ee.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
			t.Fatalf("%s: the agent ended with %v: %s", at, err, out)
		}
		w.open(t)
		list, err := w.r.List(t.Context())
		if err != nil || len(list) != 1 || !list[0].Running || list[0].Paused {
			t.Errorf("%s: %+v %v", at, list, err)
		}
		ticks("an agent killed at " + at)
		w.pack(t, id)
	}
}

func packingAgent(t *testing.T) {
	f := strings.Split(os.Getenv(packedEnv), "\x1f")
	w := &world{dir: f[1], name: f[2], disk: f[5]}
	_, err := fmt.Sscan(f[4], &w.uidBase)
	must(t, err)
	w.open(t)
	failpoint.Arm(f[0], failpoint.Kill())
	into, _ := newFiles(t)
	_, err = w.r.Pack(t.Context(), dsec.SandboxID(f[3]), into, dsec.Scrub{})
	t.Errorf("survived: %v", err)
}

// TestAPackedDiskMayBeDestroyedMeanwhile: the copy is all that the packing needs.
func TestAPackedDiskMayBeDestroyedMeanwhile(t *testing.T) {
	w := newWorld(t)
	if !strings.Contains(w.disks.Mechanism(), "btrfs") {
		t.Skipf("the pool copies no disk in a moment: %s", w.disks.Why())
	}
	id := w.create(t)
	w.want(t, id, "echo content > /f", "")
	entered, release := make(chan string), make(chan struct{})
	disarm := failpoint.Arm("container.pack.disk", failpoint.Block(entered, release))
	defer disarm()
	f, _ := newFiles(t)
	done := make(chan error, 1)
	go func() {
		_, err := w.r.Pack(context.Background(), id, f, dsec.Scrub{})
		done <- err
	}()
	<-entered
	must(t, w.r.Destroy(t.Context(), id))
	close(release)
	must(t, <-done)
	if st, err := f.Data.Stat(); err != nil || st.Size() == 0 {
		t.Errorf("nothing packed: %v", err)
	}
	w.wantNothing(t)
}

// TestAPackedDiskIsThatOfItsMoment changes a disk after it was copied and before
// the copy is read: what has not changed is read from the disk itself, and the
// layer holds what there was.
func TestAPackedDiskIsThatOfItsMoment(t *testing.T) {
	w := newWorld(t)
	if !strings.Contains(w.disks.Mechanism(), "btrfs") {
		t.Skipf("the pool copies no disk in a moment: %s", w.disks.Why())
	}
	id := w.create(t)
	w.want(t, id, `cd /root; for f in same written removed renamed moved; do echo "old $f" > $f; done; mkdir d; mv moved d`, "")
	old := time.Now()
	eventually(t, "the files are older than their clock is exact", func() bool { return time.Since(old) > 1500*time.Millisecond })
	f, dir := newFiles(t)
	entered, release := make(chan string), make(chan struct{})
	disarm := failpoint.Arm("container.pack.disk", failpoint.Block(entered, release))
	defer disarm()
	done := make(chan dsec.Packed, 1)
	go func() {
		p, err := w.r.Pack(context.Background(), id, f, dsec.Scrub{})
		if err != nil {
			t.Error(err)
		}
		done <- p
	}()
	<-entered
	w.want(t, id, `cd /root; printf "new" | dd of=written conv=notrunc 2>/dev/null; rm removed; mv renamed other; echo new > renamed; mv d e; mkdir d; echo new > d/moved`, "")
	close(release)
	p := <-done
	l := layer.Local{Meta: dir + "/meta", Data: dir + "/data", Info: layer.Info{Digest: "sha256:moment", MetaSize: p.MetaSize, DataSize: p.DataSize}}
	again := w.create(t, on(l))
	w.want(t, again, "cd /root; cat same written removed renamed d/moved; ls", "old same\nold written\nold removed\nold renamed\nold moved\nd\nremoved\nrenamed\nsame\nwritten\n")
}
