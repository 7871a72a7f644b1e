package runtimetest

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/process"
)

var execCases = []suiteCase{
	{"exit codes and streams", testExitCodes},
	{"A1_a backgrounded child holds nothing up", testBackground},
	{"A5_a timeout ends the tree", testTimeoutTree},
	{"A6_exit 143 by a signal is an exit", testSignalExit(15, 143)},
	{"A8_death by SIGSEGV answers at once", testSignalExit(11, 139)},
	{"A11_output up to the timeout is kept", testTimeoutOutput},
	{"A16_cancelled starts leave nothing half", testCancelledStarts},
	{"B3_stdin is at its end", testNoStdin},
	{"B5_stdin passes unchanged", testStdin},
	{"B6_a megabyte of arguments, one too long", testArguments},
	{"B8_environment", testEnvironment},
	{"B10_a missing directory is named", testMissingCwd},
	{"B16_users", testUsers},
	{"a missing program is named", testMissingProgram},
	{"an id is started once", testExecID},
	{"signals reach the main process", testSignal},
	{"kill ends the tree and is idempotent", testKill},
	{"release forgets", testRelease},
	{"wait ends with its context", testWaitContext},
	{"many commands at once", testManyExecs},
}

func testExitCodes(t *testing.T, e *Env) {
	id := e.create(t, nil)
	p := e.start(t, id, process.Spec{Argv: []string{"/bin/sh", "-c", "echo out; echo err >&2; exit 3"}})
	r := wait(t, p)
	if r.Status != process.Exited || r.ExitCode != 3 || r.Signal != 0 || r.OOM || r.Wall <= 0 || r.Started.IsZero() {
		t.Fatalf("result %+v", r)
	}
	if out, errs := kept(t, p, process.Stdout), kept(t, p, process.Stderr); out != "out\n" || errs != "err\n" {
		t.Fatalf("stdout %q stderr %q", out, errs)
	}
	if r.Stdout.Total != 4 || r.Stderr.Total != 4 || r.Stdout.Truncated || r.Stdout.Dropped != 0 {
		t.Fatalf("summaries %+v %+v", r.Stdout, r.Stderr)
	}
	for argv, code := range map[string]int{"true": 0, "false": 1} {
		if r := wait(t, e.start(t, id, process.Spec{Argv: []string{argv}})); r.ExitCode != code || r.Status != process.Exited {
			t.Errorf("%s: %+v", argv, r)
		}
	}
}

func testBackground(t *testing.T, e *Env) {
	id := e.create(t, nil)
	began := time.Now()
	r, out := e.sh(t, id, "(sleep 300 &) ; echo ok")
	if took := time.Since(began); out != "ok\n" || r.ExitCode != 0 || took > 5*time.Second || r.Wall > 2*time.Second {
		t.Fatalf("%+v %q after %v", r, out, took)
	}
}

func testTimeoutTree(t *testing.T, e *Env) {
	id := e.create(t, nil)
	idle, err := e.Runtime.Stats(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	p := e.start(t, id, process.Spec{Timeout: time.Second,
		Argv: []string{"/bin/sh", "-c", "trap '' TERM; (setsid sleep 300 &); sh -c \"trap '' TERM; sleep 300\" & while :; do :; done"}})
	if r := wait(t, p); r.Status != process.TimedOut || r.Wall < time.Second || r.Wall > 5*time.Second {
		t.Fatalf("result %+v", r)
	}
	eventually(t, "no process left", func() bool {
		s, err := e.Runtime.Stats(t.Context(), id)
		return err == nil && s.Pids <= idle.Pids
	})
}

func testSignalExit(sig, code int) func(t *testing.T, e *Env) {
	return func(t *testing.T, e *Env) {
		id := e.create(t, nil)
		p := e.start(t, id, process.Spec{Timeout: 30 * time.Second, Argv: []string{"/bin/sh", "-c", fmt.Sprintf("kill -%d $$; sleep 300", sig)}})
		if r := wait(t, p); r.Status != process.Exited || r.ExitCode != code || r.Signal != sig || r.Wall > 5*time.Second {
			t.Fatalf("result %+v", r)
		}
	}
}

func testTimeoutOutput(t *testing.T, e *Env) {
	id := e.create(t, nil)
	p := e.start(t, id, process.Spec{Timeout: 700 * time.Millisecond, Argv: []string{"/bin/sh", "-c", "echo A; sleep 9"}})
	r := wait(t, p)
	if out := kept(t, p, process.Stdout); r.Status != process.TimedOut || out != "A\n" {
		t.Fatalf("%+v %q", r, out)
	}
}

func testCancelledStarts(t *testing.T, e *Env) {
	id := e.create(t, nil)
	for i := range 30 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i*50)*time.Microsecond)
		p, err := e.execer(t).Exec(ctx, id, process.Spec{ID: fmt.Sprint("c", i), Argv: []string{"true"}})
		cancel()
		if err == nil {
			wait(t, p)
			release(t, p)
		}
	}
	eventually(t, "no command listed that was not started", func() bool {
		s, _ := e.status(t, id)
		for _, x := range s.Execs {
			p, err := e.execer(t).Process(t.Context(), id, x)
			if err != nil {
				return false
			}
			wait(t, p) // it runs in spite of the cancellation: then it is whole
			release(t, p)
		}
		return len(s.Execs) == 0
	})
	if _, out := e.sh(t, id, "echo well"); out != "well\n" {
		t.Fatalf("after that: %q", out)
	}
}

func testNoStdin(t *testing.T, e *Env) {
	id := e.create(t, nil)
	if r, out := e.sh(t, id, "cat; echo done"); out != "done\n" || r.ExitCode != 0 {
		t.Fatalf("%+v %q", r, out)
	}
}

func testStdin(t *testing.T, e *Env) {
	id := e.create(t, nil)
	p := e.start(t, id, process.Spec{Stdin: true, Argv: []string{"cat"}})
	want := "$HOME `id` \"'\\ \xc3\x28\x00\xff\x01\x02\r\n"
	for _, part := range []string{want[:5], want[5:]} {
		if n, err := p.Write(t.Context(), []byte(part)); err != nil || n != len(part) {
			t.Fatalf("write: %d %v", n, err)
		}
	}
	for range 2 {
		if err := p.CloseStdin(t.Context()); err != nil {
			t.Fatalf("close: %v", err)
		}
	}
	if r := wait(t, p); r.ExitCode != 0 {
		t.Fatalf("%+v", r)
	}
	if out := kept(t, p, process.Stdout); out != want {
		t.Fatalf("got %q, want %q", out, want)
	}
	_, err := p.Write(t.Context(), []byte("late"))
	wantClass(t, err, "", dsec.IllegalState, dsec.SandboxGone)
}

func testArguments(t *testing.T, e *Env) {
	id := e.create(t, nil)
	argv := []string{"printf", "%s"}
	for range 16 {
		argv = append(argv, strings.Repeat("x", 64<<10))
	}
	p := e.start(t, id, process.Spec{Argv: argv})
	if r := wait(t, p); r.Stdout.Total != 1<<20 || r.ExitCode != 0 {
		t.Fatalf("%+v", r)
	}
	_, err := e.execer(t).Exec(t.Context(), id, process.Spec{Argv: []string{"echo", strings.Repeat("x", 200<<10)}})
	wantClass(t, err, "argument list too long", dsec.Invalid)
}

func testEnvironment(t *testing.T, e *Env) {
	id := e.create(t, func(s *dsec.Spec) { s.Env = map[string]string{"FROM": "spec", "BOTH": "spec"} })
	for user, want := range map[string]string{"": "/root root spec exec", "root": "/root root spec exec", "1000": "/home/user user spec exec"} {
		p := e.start(t, id, process.Spec{User: user, Env: map[string]string{"BOTH": "exec"}, Cwd: "/tmp",
			Argv: []string{"/bin/sh", "-c", "echo $HOME $USER $FROM $BOTH; pwd; test -n \"$PATH\""}})
		if r := wait(t, p); kept(t, p, process.Stdout) != want+"\n/tmp\n" || r.ExitCode != 0 {
			t.Errorf("as %q: %q", user, kept(t, p, process.Stdout))
		}
	}
}

func testMissingCwd(t *testing.T, e *Env) {
	id := e.create(t, nil)
	_, err := e.execer(t).Exec(t.Context(), id, process.Spec{Argv: []string{"pwd"}, Cwd: "/nope"})
	wantClass(t, err, "/nope", dsec.FileNotFound)
	nothingListed(t, e, id)
}

func testUsers(t *testing.T, e *Env) {
	id := e.create(t, nil)
	_, err := e.execer(t).Exec(t.Context(), id, process.Spec{Argv: []string{"id"}, User: "nonexistent"})
	wantClass(t, err, "nonexistent", dsec.Invalid, dsec.NotFound)
	nothingListed(t, e, id)
	for user, want := range map[string]string{"user": "1000\n", "4242": "4242\n", "4242:17": "4242\n", "0": "0\n"} {
		p := e.start(t, id, process.Spec{Argv: []string{"id", "-u"}, User: user})
		if r := wait(t, p); kept(t, p, process.Stdout) != want {
			t.Errorf("as %s: %+v %q", user, r, kept(t, p, process.Stdout))
		}
	}
}

func testMissingProgram(t *testing.T, e *Env) {
	id := e.create(t, nil)
	for _, argv0 := range []string{"no-such-program", "/bin/no-such-program"} {
		_, err := e.execer(t).Exec(t.Context(), id, process.Spec{Argv: []string{argv0}})
		wantClass(t, err, argv0, dsec.FileNotFound)
	}
	_, err := e.execer(t).Exec(t.Context(), id, process.Spec{Argv: []string{"/etc/passwd"}})
	wantClass(t, err, "/etc/passwd", dsec.PermissionDenied)
	_, err = e.execer(t).Exec(t.Context(), id, process.Spec{})
	wantClass(t, err, "", dsec.Invalid)
	nothingListed(t, e, id)
}

func nothingListed(t *testing.T, e *Env, id dsec.SandboxID) {
	t.Helper()
	if s, _ := e.status(t, id); len(s.Execs) != 0 {
		t.Fatalf("listed: %v", s.Execs)
	}
}

func testExecID(t *testing.T, e *Env) {
	id := e.create(t, nil)
	s := process.Spec{ID: "once", Argv: []string{"/bin/sh", "-c", "echo x >> /root/count; sleep 300"}}
	p := e.start(t, id, s)
	again := e.start(t, id, s)
	if p.Spec().ID != "once" || again.Spec().ID != "once" {
		t.Fatalf("ids %q %q", p.Spec().ID, again.Spec().ID)
	}
	other := s
	other.Argv = []string{"true"}
	_, err := e.execer(t).Exec(t.Context(), id, other)
	wantClass(t, err, "once", dsec.Conflict)
	eventually(t, "it has counted", func() bool { _, out := e.sh(t, id, "cat /root/count"); return out != "" })
	if _, out := e.sh(t, id, "cat /root/count"); out != "x\n" {
		t.Fatalf("started more than once: %q", out)
	}
	if err := p.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if found, err := e.execer(t).Process(t.Context(), id, "once"); err != nil || wait(t, found).Status != process.Killed {
		t.Fatalf("find: %v", err)
	}
	_, err = e.execer(t).Process(t.Context(), id, "never")
	wantClass(t, err, "never", dsec.NotFound)
}

func testSignal(t *testing.T, e *Env) {
	id := e.create(t, nil)
	p := e.start(t, id, process.Spec{Argv: []string{"/bin/sh", "-c", "trap '' TERM; echo ready; sleep 300"}})
	eventually(t, "ready", func() bool { return kept(t, p, process.Stdout) == "ready\n" })
	if err := p.Signal(t.Context(), 15); err != nil {
		t.Fatal(err)
	}
	if err := p.Signal(t.Context(), 10); err != nil { // SIGUSR1 ends a shell that does not expect it
		t.Fatal(err)
	}
	if r := wait(t, p); r.Signal != 10 || r.ExitCode != 138 || r.Status != process.Exited {
		t.Fatalf("%+v", r)
	}
	wantClass(t, p.Signal(t.Context(), 15), "", dsec.IllegalState)
	q := e.start(t, id, process.Spec{Argv: []string{"sleep", "300"}})
	wantClass(t, q.Signal(t.Context(), 4711), "", dsec.Invalid)
}

func testKill(t *testing.T, e *Env) {
	id := e.create(t, nil)
	p := e.start(t, id, process.Spec{Argv: []string{"/bin/sh", "-c", "trap '' TERM; (setsid sleep 300 &); sleep 300"}})
	for range 2 {
		if err := p.Kill(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if r := wait(t, p); r.Status != process.Killed {
		t.Fatalf("%+v", r)
	}
	if err := p.Kill(t.Context()); err != nil {
		t.Fatalf("after the end: %v", err)
	}
	if _, out := e.sh(t, id, "echo lives"); out != "lives\n" {
		t.Fatal("the sandbox was harmed")
	}
}

func testRelease(t *testing.T, e *Env) {
	id := e.create(t, nil)
	p := e.start(t, id, process.Spec{ID: "r", Argv: []string{"echo", "x"}})
	wait(t, p)
	release(t, p)
	release(t, p)
	nothingListed(t, e, id)
	_, err := e.execer(t).Process(t.Context(), id, "r")
	wantClass(t, err, "r", dsec.NotFound)
}

func testWaitContext(t *testing.T, e *Env) {
	id := e.create(t, nil)
	p := e.start(t, id, process.Spec{Argv: []string{"sleep", "300"}})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err := p.Wait(ctx)
	wantClass(t, err, "", dsec.Timeout)
	r, err := p.Follow(t.Context(), process.Stdout, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = r.Next(ctx)
	wantClass(t, err, "", dsec.Timeout)
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
}

func testManyExecs(t *testing.T, e *Env) {
	id := e.create(t, nil)
	var wg sync.WaitGroup
	for i := range 40 {
		wg.Go(func() {
			p, err := e.execer(t).Exec(t.Context(), id, process.Spec{Argv: []string{"/bin/sh", "-c", fmt.Sprintf("echo %d; exit %d", i, i)}})
			if err != nil {
				t.Errorf("exec %d: %v", i, err)
				return
			}
			r, err := p.Wait(t.Context())
			if err != nil || r.ExitCode != i || r.Stdout.Total == 0 {
				t.Errorf("exec %d: %+v %v", i, r, err)
			}
			if err := p.Release(t.Context()); err != nil {
				t.Errorf("release %d: %v", i, err)
			}
		})
	}
	wg.Wait()
}
