package container

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/failpoint"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/runtimetest/layertest"
)

// secret is what must not be found where it is hidden.
const secret = "the-answer-is-forty-two-and-nobody-may-know"

// fillRepo is a task: a repository with tests, a solution, and another name of the
// solution's file.
func fillRepo(dir string) error {
	var errs []error
	w := func(name, content string, mode os.FileMode, uid int) {
		full := filepath.Join(dir, name)
		errs = append(errs, os.MkdirAll(filepath.Dir(full), 0o755), os.WriteFile(full, []byte(content), mode), os.Chmod(full, mode), os.Chown(full, uid, uid))
	}
	w("repo/code.py", "print(1)\n", 0o644, 1000)
	w("repo/tests/hidden.py", "assert "+secret+"\n", 0o640, 1000)
	w("repo/tests/deep/more.py", secret+" more\n", 0o600, 0)
	w("repo/.git/config", "[core]\n", 0o644, 1000)
	w("solution/answer", secret+"\n", 0o600, 0)
	w("var/backup/keep", "kept\n", 0o644, 0)
	errs = append(errs, os.Link(filepath.Join(dir, "solution/answer"), filepath.Join(dir, "var/backup/answer")),
		os.Symlink("hidden.py", filepath.Join(dir, "repo/tests/link")), os.Chown(filepath.Join(dir, "repo"), 1000, 1000))
	return errors.Join(errs...)
}

func phases(t testing.TB, p ...dsec.Phase) func(*runtime.Request) {
	repo := layertest.New(t, fillRepo)
	return func(r *runtime.Request) {
		r.Layers.Layers = append(r.Layers.Layers, repo)
		r.Spec.Phases = p
		must(t, r.Spec.Validate())
	}
}

func (w *world) setPhase(t testing.TB, id dsec.SandboxID, name string) runtime.Moved {
	t.Helper()
	m, err := w.r.SetPhase(context.Background(), id, name)
	must(t, err)
	return m
}

// finds says where the secret can be read inside, by anybody.
func (w *world) finds(t testing.TB, id dsec.SandboxID) string {
	t.Helper()
	o := w.sh(t, id, "find / -xdev -type f -print | while read f; do grep -l "+secret+" \"$f\" 2>/dev/null; done; find / -xdev -name '*hidden*' -o -xdev -name '*answer*'")
	return o.Stdout
}

// onDisk says in which files below a directory of the disk of a sandbox the secret is.
func (w *world) onDisk(t testing.TB, id dsec.SandboxID, below string) (found []string) {
	t.Helper()
	disk, err := w.disks.Open(context.Background(), string(id))
	must(t, err)
	defer disk.Close()
	root := filepath.Join(fmt.Sprintf("/proc/self/fd/%d", disk.Fd()), below)
	must(t, filepath.WalkDir(root+"/", func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.Type().IsRegular() {
			b, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			if bytes.Contains(b, []byte(secret)) {
				found = append(found, strings.TrimPrefix(p, root))
			}
		}
		return nil
	}))
	return found
}

func TestAMoveKillsEverythingAndNothingElse(t *testing.T) {
	w := newWorld(t)
	id := w.create(t, phases(t, dsec.Phase{Name: "a"}, dsec.Phase{Name: "b", Limits: dsec.PhaseLimits{Pids: 16}}))
	p, err := w.r.Exec(t.Context(), id, process.Spec{ID: "tree", Argv: []string{"/bin/sh", "-c", "setsid sleep 1000 & trap '' TERM INT HUP; (while true; do sleep 0.01; done) & sleep 1000"}})
	must(t, err)
	left := w.run(t, id, process.Spec{ID: "left", Argv: []string{"/bin/sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 </dev/null & echo on"}})
	if left.Stdout != "on\n" {
		t.Fatalf("%+v", left)
	}
	m := w.setPhase(t, id, "b")
	if m.Killed < 4 {
		t.Errorf("%d processes were killed, want those of two commands", m.Killed)
	}
	if r, err := p.Wait(t.Context()); err != nil || r.Status != process.Killed {
		t.Errorf("%+v %v", r, err)
	}
	w.want(t, id, "ps -o comm | grep -c sleep || true", "0\n")
	if s, err := w.r.Stats(t.Context(), id); err != nil || s.PidsLimit != 16 {
		t.Errorf("%+v %v", s, err)
	}
	if m := w.setPhase(t, id, "b"); m.Killed != 0 {
		t.Errorf("the phase it is in killed %d", m.Killed)
	}
}

func TestWhatIsHiddenFromTheStartIsNowhere(t *testing.T) {
	for name, o := range map[string]func(*world){"detached": func(*world) {}, "attached": attachedPlan} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, o)
			id := w.create(t, phases(t, dsec.Phase{Name: "code", Hide: []string{"/solution"}}, dsec.Phase{Name: "test", Hide: []string{"/solution"}, Reveal: []string{"/repo/tests"}}, dsec.Phase{Name: "submit"}))
			if got := w.finds(t, id); got != "" {
				t.Fatalf("found\n%s", got)
			}
			w.want(t, id, "ls -a /repo; stat -c '%U %a' /repo; ls /var/backup; ls -d /solution 2>/dev/null || echo none", ".\n..\n.git\ncode.py\nuser 755\nkeep\nnone\n")
			if got := w.onDisk(t, id, ""); len(got) > 0 {
				t.Errorf("on the disk: %v", got)
			}
			// What comes to be at the path gives way, and so does what is on the way to it.
			w.want(t, id, "mkdir -p /repo/tests /elsewhere && echo fake > /repo/tests/hidden.py && mv /repo /moved && ln -s /elsewhere /repo; echo ok", "ok\n")
			w.setPhase(t, id, "test")
			w.want(t, id, "cat /repo/tests/hidden.py; ls -l /repo/tests | wc -l; stat -c '%U %a' /repo/tests/hidden.py; readlink /repo/tests/link; stat -c '%U %a' /repo/tests/deep/more.py; ls /elsewhere; ls /solution 2>/dev/null || echo none",
				"assert "+secret+"\n4\nuser 640\nhidden.py\nroot 600\nnone\n")
			w.setPhase(t, id, "submit")
			w.want(t, id, "cat /solution/answer; stat -c %h /solution/answer; cat /var/backup/answer", secret+"\n2\n"+secret+"\n")
		})
	}
}

func TestWhatIsHiddenLaterIsGoneUnderAllItsNames(t *testing.T) {
	w := newWorld(t)
	id := w.create(t, phases(t, dsec.Phase{Name: "setup"}, dsec.Phase{Name: "code", Hide: []string{"/repo/tests", "/solution"}}, dsec.Phase{Name: "test", Back: []string{"code"}}))
	w.want(t, id, "cd /repo/tests; ln hidden.py /tmp/other; ln deep/more.py /home/user/.more; echo mine-"+secret+" > new; ln new /var/backup/new; chmod 4711 new; setsid sh -c 'exec 9</solution/answer; sleep 1000' >/dev/null 2>&1 & echo ok", "ok\n")
	w.setPhase(t, id, "code")
	if got := w.finds(t, id); got != "" {
		t.Fatalf("found\n%s", got)
	}
	if got := w.onDisk(t, id, "upper"); len(got) > 0 {
		t.Errorf("in the upper: %v", got)
	}
	w.want(t, id, "ls /tmp /home/user /var/backup; mkdir /solution; ln -s /etc /repo/tests", "/home/user:\n\n/tmp:\n\n/var/backup:\nkeep\n")
	w.setPhase(t, id, "test")
	w.want(t, id, "cd /repo/tests; cat new /tmp/other; stat -c '%a %h' new; stat -c %h hidden.py /tmp/other; cat /home/user/.more /solution/answer",
		"mine-"+secret+"\nassert "+secret+"\n4711 2\n2\n2\n"+secret+" more\n"+secret+"\n")
	w.setPhase(t, id, "code")
	if got := w.finds(t, id); got != "" {
		t.Errorf("back in code: %s", got)
	}
	must(t, w.r.Stop(t.Context(), id, 0))
	_, err := w.r.Start(t.Context(), id)
	must(t, err)
	if got := w.finds(t, id); got != "" {
		t.Errorf("after a start: %s", got)
	}
	if _, err := w.r.Changes(t.Context(), id, 100); !errors.Is(err, dsec.IllegalState.Err()) || !strings.Contains(err.Error(), `"code"`) {
		t.Errorf("a disk on which something is hidden was compared: %v", err)
	}
	w.setPhase(t, id, "test")
	w.want(t, id, "cat /repo/tests/new", "mine-"+secret+"\n")
	_, err = w.r.Changes(t.Context(), id, 100)
	must(t, err)
}

func TestALinkOnTheWayLeadsToWhatIsHiddenAndNeverOutside(t *testing.T) {
	w := newWorld(t)
	id := w.create(t, phases(t, dsec.Phase{Name: "a"}, dsec.Phase{Name: "b", Hide: []string{"/repo/tests"}}))
	outside := t.TempDir()
	must(t, os.MkdirAll(filepath.Join(outside, "tests"), 0o755))
	w.want(t, id, "mv /repo /r2 && ln -s /r2 /repo && ls /repo/tests | wc -l", "3\n")
	w.setPhase(t, id, "b")
	w.want(t, id, "ls /r2/tests /repo/tests 2>/dev/null | wc -l; ls /r2", "0\ncode.py\n")
	id = w.create(t, phases(t, dsec.Phase{Name: "a"}, dsec.Phase{Name: "b", Hide: []string{"/repo/tests"}}))
	w.want(t, id, "rm -r /repo && ln -s "+outside+" /repo && echo ok", "ok\n")
	w.setPhase(t, id, "b")
	if _, err := os.Stat(filepath.Join(outside, "tests")); err != nil {
		t.Errorf("a directory of the machine was reached: %v", err)
	}
}

func TestReadOnlyPathsCannotBeChangedNorMoved(t *testing.T) {
	w := newWorld(t)
	id := w.create(t, phases(t, dsec.Phase{Name: "setup"}, dsec.Phase{Name: "code", ReadOnly: []string{"/repo/.git", "/etc/passwd"}}, dsec.Phase{Name: "free"}))
	w.want(t, id, "ln /repo/.git/config /tmp/config && echo ok", "ok\n")
	w.setPhase(t, id, "code")
	for _, evil := range []string{"echo x >> /repo/.git/config", "echo x > /repo/.git/new", "mv /repo/.git /repo/git2", "rm -rf /repo/.git/config", "mv /repo /repo2",
		"ln /repo/.git/config /repo/c2", "chmod 777 /repo/.git", "touch /repo/.git/config", "mv /repo/.git/config /tmp/x", "umount /repo/.git", "umount -l /repo",
		"mount -o remount,rw,bind /repo/.git", "mount --bind / /tmp", "rmdir /repo", "echo x >> /etc/passwd", "mv /etc/passwd /etc/p", "mv /etc /etc2", "rm -f /etc/passwd",
		"mkdir -p /repo/.git/hooks"} {
		if o := w.sh(t, id, evil); o.ExitCode == 0 {
			t.Errorf("%s succeeded", evil)
		}
	}
	w.want(t, id, "echo evil > /tmp/config; cat /repo/.git/config; echo more >> /repo/code.py; tail -1 /repo/code.py", "[core]\nmore\n")
	if o := w.run(t, id, process.Spec{User: "user", Argv: []string{"/bin/id", "-u"}}); o.Stdout != "1000\n" {
		t.Errorf("with a read-only /etc/passwd its users are %q", o.Stdout)
	}
	f := w.files(t, id, "0")
	if err := f.Mkdir(t.Context(), "/repo/.git/hooks", 0o755, false); err == nil {
		t.Error("the file service wrote below a read-only path")
	}
	must(t, w.r.Stop(t.Context(), id, 0))
	_, err := w.r.Start(t.Context(), id)
	must(t, err)
	if o := w.sh(t, id, "echo x >> /repo/.git/config"); o.ExitCode == 0 {
		t.Error("after a start it is writable")
	}
	w.setPhase(t, id, "free")
	w.want(t, id, "echo x >> /repo/.git/config && mv /repo /repo2 && tail -1 /repo2/.git/config; grep -c repo /proc/self/mountinfo || true", "x\n0\n")
}

func TestAReadOnlyPathThatIsNotThereStopsTheMove(t *testing.T) {
	w := newWorld(t)
	id := w.create(t, phases(t, dsec.Phase{Name: "a"}, dsec.Phase{Name: "b", ReadOnly: []string{"/repo/.git"}}))
	w.want(t, id, "rm -r /repo/.git && echo ok", "ok\n")
	for range 2 {
		if _, err := w.r.SetPhase(t.Context(), id, "b"); !errors.Is(err, dsec.NotADirectory.Err()) || !strings.Contains(err.Error(), "/repo/.git") {
			t.Fatalf("%v", err)
		}
	}
	if _, err := w.try(id, process.Spec{Argv: []string{"true"}}); !errors.Is(err, dsec.IllegalState.Err()) {
		t.Errorf("a command between two phases: %v", err)
	}
	if err := w.r.Resume(t.Context(), id); !errors.Is(err, dsec.IllegalState.Err()) {
		t.Errorf("it was resumed: %v", err)
	}
	if _, err := w.r.Files(t.Context(), id, "0"); !errors.Is(err, dsec.IllegalState.Err()) {
		t.Errorf("its files were opened: %v", err)
	}
	must(t, w.r.Stop(t.Context(), id, 0))
}

func TestCommandsHaveTheRightsOfTheirPhase(t *testing.T) {
	w := newWorld(t)
	id := w.create(t, phases(t, dsec.Phase{Name: "setup"},
		dsec.Phase{Name: "code", Users: []string{"user"}, User: "user", NoNewPrivs: true, DropCapabilities: []string{"all"}},
		dsec.Phase{Name: "root", DropCapabilities: []string{"kill", "setuid"}, Writable: []string{"/repo", "/tmp"}},
		dsec.Phase{Name: "tools", Executables: []string{"/bin"}}))
	grep := "grep -E 'CapBnd|NoNewPrivs' /proc/self/status"
	before := w.sh(t, id, "id -u; "+grep).Stdout
	w.want(t, id, "sed -i 's/^user:x:1000/user:x:0/' /etc/passwd; cp /bin/busybox /repo/busybox; chmod 4755 /repo/busybox; id -u", "0\n")
	w.setPhase(t, id, "code")
	if _, err := w.try(id, process.Spec{Argv: []string{"id"}}); !errors.Is(err, dsec.PermissionDenied.Err()) {
		t.Errorf("a user made root in /etc/passwd ran: %v", err)
	}
	if _, err := w.try(id, process.Spec{User: "0", Argv: []string{"id"}}); !errors.Is(err, dsec.PermissionDenied.Err()) {
		t.Errorf("root ran: %v", err)
	}
	o := w.run(t, id, process.Spec{User: "1000", Argv: []string{"/bin/sh", "-c", "id -u; " + grep + "; /repo/busybox id -u"}})
	if o.Stdout != "1000\nCapBnd:\t0000000000000000\nNoNewPrivs:\t1\n1000\n" || before == o.Stdout {
		t.Errorf("%q, before %q", o.Stdout, before)
	}
	w.setPhase(t, id, "root")
	w.want(t, id, "echo a > /repo/x; echo b > /tmp/y; echo c > /dev/null; mv /tmp/y /repo/y; cat /repo/x /repo/y; ln -s /etc /repo/etc; mkdir /tmp/d; rmdir /tmp/d", "a\nb\n")
	for _, evil := range []string{"echo x > /etc/new", "echo x >> /etc/hosts", "rm /var/backup/keep", "mv /var/backup/keep /repo/", "echo > /repo/etc/new", "ln /etc/hosts /repo/h; echo > /repo/h; test -s /etc/hosts && false",
		": > /etc/hostname", "mkdir /new", "mknod /null c 1 3"} {
		if o := w.sh(t, id, evil); o.ExitCode == 0 {
			t.Errorf("%s succeeded: %s", evil, o.Stdout)
		}
	}
	w.setPhase(t, id, "tools")
	w.want(t, id, "cp /bin/busybox /tmp/mine; /tmp/mine id 2>/dev/null || echo refused; mv /tmp/mine /repo/; ls /repo/mine", "refused\n/repo/mine\n")
	if _, err := w.try(id, process.Spec{Argv: []string{"/repo/mine", "id"}}); err == nil {
		t.Error("a program that is not listed was started")
	}
}

func TestServicesCannotBeReachedByThoseWhoComeLater(t *testing.T) {
	w := newWorld(t)
	id := w.create(t, phases(t, dsec.Phase{Name: "setup"}, dsec.Phase{Name: "code"}, dsec.Phase{Name: "end", EndServices: true}))
	w.want(t, id, "cp /bin/busybox /tmp/busybox && chown 64000:64000 /tmp/busybox && chmod 4755 /tmp/busybox && echo ok", "ok\n")
	_, err := w.r.Exec(t.Context(), id, process.Spec{ID: "service", Service: true, Argv: []string{"/bin/sh", "-c", "sleep 1000 & while true; do echo tick; sleep 0.05; done"}})
	must(t, err)
	if m := w.setPhase(t, id, "code"); m.Killed != 0 {
		t.Errorf("%d were killed", m.Killed)
	}
	uid := fmt.Sprint(serviceUID("service"))
	w.want(t, id, "grep -h -E '^(Uid|Gid|CapBnd|NoNewPrivs)' /proc/$(ps -o pid,args | grep ' sleep 1000$' | sed 's/^ *//; s/ .*//')/status",
		strings.ReplaceAll("Uid:\t#\t#\t#\t#\nGid:\t#\t#\t#\t#\nCapBnd:\t0000000000000000\nNoNewPrivs:\t1\n", "#", uid))
	if o := w.sh(t, id, "ps -o pid,args | grep ' sleep 1000$' | wc -l"); o.Stdout != "1\n" {
		t.Fatalf("processes of the service: %q", o.Stdout) // what follows would mean nothing
	}
	of := "S=$(ps -o pid,args | grep ' sleep 1000$' | sed 's/^ *//; s/ .*//'); "
	for _, evil := range []string{"kill $S", "kill -9 -1; kill -0 $S", "head -c 1 /proc/$S/mem", "readlink /proc/$S/fd/1", "echo evil > /proc/$S/fd/1", "ls /proc/$S/map_files/ | grep -q . ", "readlink /proc/$S/exe", "su " + uid + " -s /bin/sh -c 'kill $S'", "chroot / true && setuidgid " + uid + " kill $S",
		"/tmp/busybox kill $S"} {
		if o := w.sh(t, id, of+evil); o.ExitCode == 0 {
			t.Errorf("%s succeeded: %s", evil, o.Stdout)
		}
	}
	if _, err := w.try(id, process.Spec{User: uid, Argv: []string{"id"}}); !errors.Is(err, dsec.PermissionDenied.Err()) {
		t.Errorf("a command ran as the service: %v", err)
	}
	w.close(t) // the next agent knows it, too
	w.open(t)
	if m := w.setPhase(t, id, "end"); m.Killed < 2 {
		t.Errorf("%d were killed", m.Killed)
	}
	p, err := w.r.Process(t.Context(), id, "service")
	must(t, err)
	if r, err := p.Wait(t.Context()); err != nil || r.Status != process.Killed {
		t.Errorf("%+v %v", r, err)
	}
	w.want(t, id, "grep CapBnd /proc/self/status", "CapBnd:\t00000000a80425fb\n")
}

func TestAnUnknownUserOfAPhaseIsRefusedAtCreation(t *testing.T) {
	w := newWorld(t)
	_, err := w.r.Create(t.Context(), request(t, phases(t, dsec.Phase{Name: "a", Users: []string{"nobody-here"}, User: "nobody-here"})))
	if !errors.Is(err, dsec.NotFound.Err()) {
		t.Fatal(err)
	}
}

// TestAMoveThatBreaksOffStandsStillAndIsFinished breaks moves off at each place, as
// errors do and as a kill of the agent does.
func TestAMoveThatBreaksOffStandsStillAndIsFinished(t *testing.T) {
	w := newWorld(t)
	r := phases(t, dsec.Phase{Name: "a", Hide: []string{"/solution"}}, dsec.Phase{Name: "b", Hide: []string{"/repo/tests"}, ReadOnly: []string{"/repo/.git"}})
	for _, at := range []string{"container.phase.killed", "container.phase.shelved", "container.phase.restoring", "container.phase.revealed", "container.phase.recorded"} {
		for _, crash := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s crash %v", at, crash), func(t *testing.T) {
				id := w.create(t, r)
				w.want(t, id, "echo mine > /repo/tests/mine; setsid sleep 1000 >/dev/null 2>&1 & echo ok", "ok\n")
				hit := 0
				disarm := failpoint.Arm(at, func(context.Context, string) error { hit++; return errors.New("broken off") })
				_, err := w.r.SetPhase(t.Context(), id, "b")
				disarm()
				if err == nil || hit != 1 {
					t.Fatalf("%v after %d", err, hit)
				}
				if crash {
					w.close(t)
					w.open(t)
				}
				if _, err := w.try(id, process.Spec{Argv: []string{"true"}}); !errors.Is(err, dsec.IllegalState.Err()) {
					t.Fatalf("a command ran in the middle: %v", err)
				}
				w.setPhase(t, id, "b")
				w.want(t, id, "cat /solution/answer /var/backup/answer; ls /repo; touch /repo/.git/x 2>/dev/null || echo ro; ps -o comm | grep -c sleep || true", secret+"\n"+secret+"\ncode.py\nro\n0\n")
				must(t, w.r.Destroy(t.Context(), id))
			})
		}
	}
}
