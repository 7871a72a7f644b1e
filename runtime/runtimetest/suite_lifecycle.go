package runtimetest

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/confine"
	"github.com/opendsec/dsec/process"
)

var lifecycleCases = []suiteCase{
	{"a probe says what it found", testProbe},
	{"create, stop, start, destroy", testLifecycle},
	{"create of an equal request is a success", testCreateTwice},
	{"create of another request is a conflict", testCreateConflict},
	{"stop, start and destroy are idempotent", testIdempotence},
	{"a profile is given as it is or refused", testProfiles},
	{"a cancelled create leaves nothing", testCreateCancelled},
	{"a cancelled create racing with its end is whole or nothing", testCreateCancelledAnywhere},
	{"methods on an unknown id", testUnknown},
	{"stop and start keep the disk", testDiskKept},
	{"stop ends every process", testStopEndsAll},
	{"many sandboxes at once", testMany},
	{"list and disk survive reopening", testReopen},
	{"G15_a dead id can be used again", testIDAgain},
}

func testProbe(t *testing.T, e *Env) {
	r := e.Runtime.Probe(t.Context())
	if !r.OK || r.Tier != e.Runtime.Tier() || len(r.Checks) == 0 {
		t.Fatalf("probe: %+v", r)
	}
	for _, c := range r.Checks {
		if c.Name == "" || c.Detail == "" {
			t.Errorf("check %+v explains nothing", c)
		}
	}
}

func testLifecycle(t *testing.T, e *Env) {
	id := e.create(t, nil)
	if s, ok := e.status(t, id); !ok || !s.Running || s.Paused {
		t.Fatalf("after create: %+v %v", s, ok)
	}
	if err := e.Runtime.Stop(t.Context(), id, 0); err != nil {
		t.Fatalf("stop: %v", err)
	}
	if s, ok := e.status(t, id); !ok || s.Running {
		t.Fatalf("after stop: %+v %v", s, ok)
	}
	if _, err := e.Runtime.Start(t.Context(), id); err != nil {
		t.Fatalf("start: %v", err)
	}
	if s, ok := e.status(t, id); !ok || !s.Running {
		t.Fatalf("after start: %+v %v", s, ok)
	}
	if r, out := e.sh(t, id, "echo again"); r.ExitCode != 0 || out != "again\n" {
		t.Fatalf("exec after start: %+v %q", r, out)
	}
	if err := e.Runtime.Destroy(t.Context(), id); err != nil {
		t.Fatalf("destroy: %v", err)
	}
	if s, ok := e.status(t, id); ok {
		t.Fatalf("after destroy: %+v", s)
	}
}

// A machine may lack what the tier gives elsewhere; nothing runs below the
// minimum of its profile.
func testProfiles(t *testing.T, e *Env) {
	tier := e.Runtime.Tier()
	for _, p := range confine.Profiles {
		r := e.request(t, func(s *dsec.Spec) { s.Profile = string(p) })
		e.destroyAtEnd(t, r.ID)
		_, err := e.Runtime.Create(t.Context(), r)
		switch {
		case confine.Require(p, tier) == nil && err == nil:
		case !errors.Is(err, dsec.Unsupported.Err()) || !strings.Contains(err.Error(), string(p)):
			t.Errorf("%s in tier %s: %v", p, tier, err)
		default:
			t.Logf("refused: %v", err)
		}
	}
	r := e.request(t, func(s *dsec.Spec) { s.Profile = "nosuch" })
	e.destroyAtEnd(t, r.ID)
	if _, err := e.Runtime.Create(t.Context(), r); !errors.Is(err, dsec.Invalid.Err()) {
		t.Errorf("unknown profile: %v", err)
	}
}

func testCreateTwice(t *testing.T, e *Env) {
	r := e.request(t, nil)
	e.destroyAtEnd(t, r.ID)
	var wg sync.WaitGroup
	errs := make([]error, 3)
	for i := range errs {
		wg.Go(func() { _, errs[i] = e.Runtime.Create(t.Context(), r) })
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			t.Fatalf("create: %v", err)
		}
	}
}

func testCreateConflict(t *testing.T, e *Env) {
	r := e.request(t, nil)
	e.destroyAtEnd(t, r.ID)
	if _, err := e.Runtime.Create(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	r.Spec.Limits.Pids++
	_, err := e.Runtime.Create(t.Context(), r)
	wantClass(t, err, string(r.ID), dsec.Conflict)
	if _, out := e.sh(t, r.ID, "echo alive"); out != "alive\n" {
		t.Fatal("the first sandbox was harmed")
	}
}

func testIdempotence(t *testing.T, e *Env) {
	id := e.create(t, nil)
	if _, err := e.Runtime.Start(t.Context(), id); err != nil {
		t.Fatalf("start of a running one: %v", err)
	}
	for range 2 {
		if err := e.Runtime.Stop(t.Context(), id, 0); err != nil {
			t.Fatalf("stop: %v", err)
		}
	}
	for range 2 {
		if err := e.Runtime.Destroy(t.Context(), id); err != nil {
			t.Fatalf("destroy: %v", err)
		}
	}
}

func testCreateCancelled(t *testing.T, e *Env) {
	r := e.request(t, nil)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := e.Runtime.Create(ctx, r)
	wantClass(t, err, "", dsec.Canceled)
	if s, ok := e.status(t, r.ID); ok {
		t.Fatalf("left: %+v", s)
	}
	if err := e.Runtime.Destroy(t.Context(), r.ID); err != nil {
		t.Fatalf("destroy: %v", err)
	}
}

// testCreateCancelledAnywhere cancels after ever longer waits, until a create
// comes through.
func testCreateCancelledAnywhere(t *testing.T, e *Env) {
	for wait := 20 * time.Microsecond; ; wait = wait * 3 / 2 {
		r := e.request(t, nil)
		ctx, cancel := context.WithTimeout(t.Context(), wait)
		_, err := e.Runtime.Create(ctx, r)
		cancel()
		s, ok := e.status(t, r.ID)
		if derr := e.Runtime.Destroy(t.Context(), r.ID); derr != nil {
			t.Fatalf("destroy: %v", derr)
		}
		switch {
		case err == nil && (!ok || !s.Running):
			t.Fatalf("created, but %+v %v", s, ok)
		case err != nil && ok:
			t.Fatalf("cancelled after %v with %v, but left %+v", wait, err, s)
		case err == nil:
			return
		case wait > patience:
			t.Fatalf("no create within %v: %v", wait, err)
		}
	}
}

func testUnknown(t *testing.T, e *Env) {
	id := dsec.NewSandboxID("suite")
	if err := e.Runtime.Destroy(t.Context(), id); err != nil {
		t.Fatalf("destroy: %v", err)
	}
	_, err := e.Runtime.Start(t.Context(), id)
	wantClass(t, err, string(id), dsec.NotFound, dsec.SandboxGone)
	_, err = e.Runtime.Stats(t.Context(), id)
	wantClass(t, err, string(id), dsec.NotFound, dsec.SandboxGone)
	_, err = e.execer(t).Exec(t.Context(), id, process.Spec{Argv: []string{"true"}})
	wantClass(t, err, string(id), dsec.SandboxGone)
}

func testDiskKept(t *testing.T, e *Env) {
	id := e.create(t, nil)
	if r, _ := e.sh(t, id, "echo kept > /root/f; mkdir /root/d"); r.ExitCode != 0 {
		t.Fatalf("write: %+v", r)
	}
	for range 2 {
		if err := e.Runtime.Stop(t.Context(), id, time.Second); err != nil {
			t.Fatal(err)
		}
		if _, err := e.Runtime.Start(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
	if r, out := e.sh(t, id, "test -d /root/d && cat /root/f"); out != "kept\n" || r.ExitCode != 0 {
		t.Fatalf("after two restarts: %+v %q", r, out)
	}
}

func testStopEndsAll(t *testing.T, e *Env) {
	id := e.create(t, nil)
	p := e.start(t, id, process.Spec{Argv: []string{"/bin/sh", "-c", "trap '' TERM; (setsid sleep 300 &); sleep 300"}})
	if err := e.Runtime.Stop(t.Context(), id, 0); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if r, err := p.Wait(ctx); err == nil && r.Status != process.Killed {
		t.Fatalf("its command: %+v", r)
	}
	if s, err := e.Runtime.Stats(t.Context(), id); err == nil && s.Pids != 0 {
		t.Fatalf("%d processes after stop", s.Pids)
	}
	_, err := e.execer(t).Exec(t.Context(), id, process.Spec{Argv: []string{"true"}})
	wantClass(t, err, "", dsec.IllegalState, dsec.SandboxGone)
}

func testMany(t *testing.T, e *Env) {
	var wg sync.WaitGroup
	errs := make([]error, 12)
	outs := make([]string, len(errs))
	for i := range errs {
		r := e.request(t, nil)
		e.destroyAtEnd(t, r.ID)
		wg.Go(func() {
			if _, errs[i] = e.Runtime.Create(t.Context(), r); errs[i] != nil {
				return
			}
			p, err := e.execer(t).Exec(t.Context(), r.ID, process.Spec{Argv: []string{"echo", string(r.ID)}})
			if errs[i] = err; err != nil {
				return
			}
			if _, errs[i] = p.Wait(t.Context()); errs[i] != nil {
				return
			}
			b, _, _, err := p.Kept(t.Context(), process.Stdout)
			if outs[i], errs[i] = strings.TrimSpace(string(b)), err; outs[i] != string(r.ID) {
				t.Errorf("output %q of %s", outs[i], r.ID)
			}
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			t.Error(err)
		}
	}
}

func testReopen(t *testing.T, e *Env) {
	if e.Reopen == nil {
		t.Skip("the environment cannot reopen")
	}
	id := e.create(t, nil)
	stopped := e.create(t, nil)
	if r, _ := e.sh(t, stopped, "echo here > /root/f"); r.ExitCode != 0 {
		t.Fatal(r)
	}
	if err := e.Runtime.Stop(t.Context(), stopped, 0); err != nil {
		t.Fatal(err)
	}
	p := e.start(t, id, process.Spec{ID: "across", Argv: []string{"/bin/sh", "-c", "echo before; sleep 1; echo after; exit 7"}})
	eventually(t, "first line", func() bool { return kept(t, p, process.Stdout) == "before\n" })
	e.Runtime = e.Reopen(t)
	if s, ok := e.status(t, id); !ok || !s.Running || len(s.Execs) != 1 || s.Execs[0] != "across" {
		t.Fatalf("the running one: %+v %v", s, ok)
	}
	if s, ok := e.status(t, stopped); !ok || s.Running {
		t.Fatalf("the stopped one: %+v %v", s, ok)
	}
	p, err := e.execer(t).Process(t.Context(), id, "across")
	if err != nil {
		t.Fatal(err)
	}
	if out := follow(t, p, process.Stdout, 7); string(out) != "after\n" {
		t.Fatalf("output from 7: %q", out)
	}
	if r := wait(t, p); r.Status != process.Exited || r.ExitCode != 7 {
		t.Fatalf("result: %+v", r)
	}
	if _, err := e.Runtime.Start(t.Context(), stopped); err != nil {
		t.Fatal(err)
	}
	if _, out := e.sh(t, stopped, "cat /root/f"); out != "here\n" {
		t.Fatalf("disk of the stopped one: %q", out)
	}
}

func testIDAgain(t *testing.T, e *Env) {
	r := e.request(t, nil)
	e.destroyAtEnd(t, r.ID)
	for i := range 3 {
		if _, err := e.Runtime.Create(t.Context(), r); err != nil {
			t.Fatalf("create %d: %v", i, err)
		}
		if res, out := e.sh(t, r.ID, "test -e /root/mark || echo clean; echo x > /root/mark"); out != "clean\n" {
			t.Fatalf("round %d: %+v %q: something of the last one is there", i, res, out)
		}
		if err := e.Runtime.Destroy(t.Context(), r.ID); err != nil {
			t.Fatalf("destroy %d: %v", i, err)
		}
	}
}
