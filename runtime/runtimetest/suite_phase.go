package runtimetest

import (
	"context"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
)

var phaseCases = []suiteCase{
	{"a move kills, hides and reveals", testPhases},
	{"a phase outlives a stop", testPhaseKept},
	{"services outlive moves", testServices},
	{"a tier without phases names itself", testNoPhases},
}

func stages(s *dsec.Spec) {
	s.Phases = []dsec.Phase{{Name: "a"}, {Name: "b", Hide: []string{"/tmp/notes"}}, {Name: "c", Back: []string{"b"}}}
}

func setPhase(t *testing.T, p runtime.Phaser, id dsec.SandboxID, name string) runtime.Moved {
	t.Helper()
	m, err := p.SetPhase(t.Context(), id, name)
	if err != nil {
		t.Fatalf("set phase %s: %v", name, err)
	}
	return m
}

func testPhases(t *testing.T, e *Env) {
	phaser := ability[runtime.Phaser](t, e)
	id := e.create(t, stages)
	e.sh(t, id, "mkdir /tmp/notes; echo mine > /tmp/notes/one")
	p := e.start(t, id, process.Spec{Argv: []string{"sleep", "1000"}})
	if m := setPhase(t, phaser, id, "b"); m.Killed < 1 || m.Network != 0 {
		t.Errorf("moved: %+v", m)
	}
	if r := wait(t, p); r.Status != process.Killed {
		t.Errorf("the command of the phase before: %+v", r)
	}
	if s, ok := e.status(t, id); !ok || !s.Running || s.Paused {
		t.Errorf("after the move: %+v", s)
	}
	if m := setPhase(t, phaser, id, "b"); m.Killed != 0 {
		t.Errorf("the same again: %+v", m)
	}
	if r, out := e.sh(t, id, "cat /tmp/notes/one || echo gone"); out != "gone\n" {
		t.Errorf("hidden: %+v %q", r, out)
	}
	setPhase(t, phaser, id, "c")
	if r, out := e.sh(t, id, "cat /tmp/notes/one"); out != "mine\n" {
		t.Errorf("shown again: %+v %q", r, out)
	}
	if _, err := phaser.SetPhase(t.Context(), id, "nowhere"); err == nil {
		t.Error("a phase that is none was set")
	}
}

func testNoPhases(t *testing.T, e *Env) {
	if _, ok := e.Runtime.(runtime.Phaser); ok {
		t.Skipf("the %s tier has phases", e.Runtime.Tier())
	}
	r := e.request(t, stages)
	e.destroyAtEnd(t, r.ID)
	_, err := e.Runtime.Create(t.Context(), r)
	name := string(r.Spec.Isolation)
	if r.Spec.Isolation == dsec.IsolationDefault {
		name = string(e.Runtime.Tier())
	}
	wantClass(t, err, name, dsec.Unsupported)
	if s, ok := e.status(t, r.ID); ok {
		t.Fatalf("left: %+v", s)
	}
}

func testServices(t *testing.T, e *Env) {
	phaser := ability[runtime.Phaser](t, e)
	id := e.create(t, func(s *dsec.Spec) {
		stages(s)
		s.Phases[2].EndServices = true
	})
	p := e.start(t, id, process.Spec{ID: "service", Argv: []string{"sleep", "1000"}, Service: true})
	setPhase(t, phaser, id, "b")
	if again, err := e.execer(t).Process(t.Context(), id, "service"); err != nil || again.Spec().ID != "service" {
		t.Fatalf("the service after a move: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if r, err := p.Wait(ctx); err == nil {
		t.Errorf("the service has ended: %+v", r)
	}
	if _, err := e.execer(t).Exec(t.Context(), id, process.Spec{Argv: []string{"sleep", "1"}, Service: true}); dsec.ClassOf(err) != dsec.IllegalState {
		t.Errorf("a service of a later phase: %v", err)
	}
	if m := setPhase(t, phaser, id, "c"); m.Killed != 1 {
		t.Errorf("a phase that ends services: %+v", m)
	}
	if r := wait(t, p); r.Status != process.Killed {
		t.Errorf("%+v", r)
	}
}

func testPhaseKept(t *testing.T, e *Env) {
	phaser := ability[runtime.Phaser](t, e)
	id := e.create(t, stages)
	e.sh(t, id, "mkdir /tmp/notes; echo mine > /tmp/notes/one")
	setPhase(t, phaser, id, "b")
	if err := e.Runtime.Stop(t.Context(), id, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := e.Runtime.Start(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if _, out := e.sh(t, id, "cat /tmp/notes/one || echo gone"); out != "gone\n" {
		t.Errorf("after a start: %q", out)
	}
	setPhase(t, phaser, id, "c")
	if _, out := e.sh(t, id, "cat /tmp/notes/one"); out != "mine\n" {
		t.Errorf("shown again: %q", out)
	}
}
