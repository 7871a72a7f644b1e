package node

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/failpoint"
	"github.com/opendsec/dsec/process"
)

func stages(s *dsec.Spec) {
	s.Phases = []dsec.Phase{
		{Name: "setup", Network: &dsec.NetworkPolicy{Mode: dsec.NetworkOpen}},
		{Name: "code", Hide: []string{"/root/notes"}},
		{Name: "test", Reveal: []string{"/root/tests"}, Back: []string{"code"}},
	}
}

func (w *world) phaseEvents(id dsec.SandboxID) (out []dsec.Event) {
	r, err := w.Record(w.t.Context(), id)
	if err != nil {
		w.t.Fatal(err)
	}
	for _, e := range r.Events {
		if e.Type == dsec.EventPhase {
			out = append(out, e)
		}
	}
	return out
}

func TestPhasesMoveOnAndBackOnlyWhereTheySaySo(t *testing.T) {
	w := newWorld(t, nil)
	sb := w.create(stages)
	if p := sb.Phase; p == nil || p.Name != "setup" || p.Generation != 1 {
		t.Fatalf("it begins in %+v", p)
	}
	p, err := w.Exec(t.Context(), sb.ID, process.Spec{ID: "long", Argv: []string{"sleep", "1000"}})
	if err != nil {
		t.Fatal(err)
	}
	_, err = w.SetPhase(t.Context(), sb.ID, "nowhere", "")
	wantClass(t, err, dsec.Invalid)
	now, err := w.SetPhase(t.Context(), sb.ID, "code", "k")
	if err != nil || now.Phase.Name != "code" || now.Phase.Generation != 2 || now.State != dsec.Running || now.Network.Mode != dsec.NetworkNone || now.Network.Generation != 2 {
		t.Fatalf("%+v %+v %v", now.Phase, now.Network, err)
	}
	if r, err := p.Wait(t.Context()); err != nil || r.Status != process.Killed {
		t.Fatalf("the command of the phase before: %+v %v", r, err)
	}
	for _, key := range []string{"k", "", "other"} { // the same call again, and the phase it is in
		if now, err = w.SetPhase(t.Context(), sb.ID, "code", key); err != nil || now.Phase.Generation != 2 {
			t.Fatalf("again: %+v %v", now.Phase, err)
		}
	}
	_, err = w.SetPhase(t.Context(), sb.ID, "setup", "")
	wantClass(t, err, dsec.IllegalState)
	if now, err = w.SetPhase(t.Context(), sb.ID, "test", ""); err != nil || now.Phase.Generation != 3 {
		t.Fatal(now.Phase, err)
	}
	if now, err = w.SetPhase(t.Context(), sb.ID, "code", ""); err != nil || now.Phase.Generation != 4 {
		t.Fatal(now.Phase, err)
	}
	var moves []string
	for _, e := range w.phaseEvents(sb.ID) {
		moves = append(moves, e.Fields["from"]+">"+e.Detail+" "+e.Fields["generation"]+" "+e.Fields["killed"])
	}
	if want := []string{"setup>code 2 1", "code>test 3 0", "test>code 4 0"}; !slices.Equal(moves, want) {
		t.Errorf("told %q, want %q", moves, want)
	}
	plain := w.create(nil)
	_, err = w.SetPhase(t.Context(), plain.ID, "code", "")
	wantClass(t, err, dsec.IllegalState)
}

func TestACommandIsToldWithItsPhase(t *testing.T) {
	w := newWorld(t, nil)
	sb := w.create(stages)
	w.run(sb.ID, "echo one")
	if _, err := w.SetPhase(t.Context(), sb.ID, "test", ""); err != nil {
		t.Fatal(err)
	}
	w.run(sb.ID, "echo two")
	w.until("both ends are noted", func() bool { r, err := w.Record(t.Context(), sb.ID); return err == nil && len(r.Outputs) == 2 })
	r, err := w.Record(t.Context(), sb.ID)
	if err != nil || r.Outputs[0].Phase != "setup" || r.Outputs[1].Phase != "test" {
		t.Fatalf("%+v %v", r.Outputs, err)
	}
}

// TestAMoveIsFinishedByTheNextAgent breaks a move off at each place and kills the
// agent there.
func TestAMoveIsFinishedByTheNextAgent(t *testing.T) {
	for _, at := range []string{"node.phase.runtime", "fake.phase", "node.phase.done"} {
		t.Run(at, func(t *testing.T) {
			w := newWorld(t, nil)
			sb := w.create(stages)
			disarm := failpoint.Arm(at, failpoint.Times(100, nil))
			defer disarm()
			if _, err := w.SetPhase(t.Context(), sb.ID, "code", ""); err == nil {
				t.Fatal("it did not fail")
			}
			now, err := w.Get(t.Context(), sb.ID)
			if err != nil || now.Phase.Moving != "code" || now.Phase.Name != "setup" {
				t.Fatalf("%+v %v", now.Phase, err)
			}
			_, err = w.Exec(t.Context(), sb.ID, process.Spec{Argv: []string{"true"}})
			wantClass(t, err, dsec.IllegalState)
			_, err = w.Resume(t.Context(), sb.ID, "")
			wantClass(t, err, dsec.IllegalState)
			_, err = w.SetPhase(t.Context(), sb.ID, "test", "")
			wantClass(t, err, dsec.IllegalState)
			disarm()
			w.crash()
			w.sweep()
			w.until("it has moved", func() bool { now, err = w.Get(t.Context(), sb.ID); return err == nil && now.Phase.Moving == "" })
			if now.Phase.Name != "code" || now.Phase.Generation != 2 || now.State != dsec.Running || len(w.phaseEvents(sb.ID)) != 1 {
				t.Fatalf("%+v %s %v", now.Phase, now.State, w.phaseEvents(sb.ID))
			}
			w.run(sb.ID, "echo on")
		})
	}
}

// TestAMoveThatTakesLongIsTriedSeldom: a sandbox whose files keep a move from its end
// does not keep the machine copying.
func TestAMoveThatTakesLongIsTriedSeldom(t *testing.T) {
	w := newWorld(t, nil)
	sb := w.create(func(s *dsec.Spec) { stages(s); s.Lifetimes.Idle = 24 * time.Hour })
	defer failpoint.Arm("node.phase.runtime", func(context.Context, string) error {
		w.clock.add(2 * time.Minute)
		return dsec.E(dsec.NoSpace, "hide", "/tests", nil)
	})()
	_, err := w.SetPhase(t.Context(), sb.ID, "code", "")
	wantClass(t, err, dsec.NoSpace)
	b := w.find(sb.ID)
	for after, want := range map[time.Duration]bool{17 * time.Minute: false, 19 * time.Minute: true} {
		if got := b.due(w.clock.Now().Add(after)) != nil; got != want {
			t.Errorf("after %v it is tried again: %v, want %v", after, got, want)
		}
	}
}

func TestAStopAndAStartFinishAMove(t *testing.T) {
	w := newWorld(t, nil)
	sb := w.create(stages)
	defer failpoint.Arm("fake.phase", failpoint.Once(nil))()
	if _, err := w.SetPhase(t.Context(), sb.ID, "test", ""); err == nil {
		t.Fatal("it did not fail")
	}
	if _, err := w.Stop(t.Context(), sb.ID, "", ""); err != nil {
		t.Fatal(err)
	}
	now, err := w.Start(t.Context(), sb.ID, "")
	if err != nil || now.Phase.Name != "test" || now.Phase.Moving != "" || now.Phase.Generation != 2 {
		t.Fatalf("%+v %v", now.Phase, err)
	}
	w.run(sb.ID, "echo on")
}
