package node

import (
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/failpoint"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
)

func TestG1_AKilledAgentFindsItsSandboxesAgain(t *testing.T) {
	w := newWorld(t, nil)
	running := w.create(func(s *dsec.Spec) { s.Name = "r" })
	paused, stopped := w.create(nil), w.create(nil)
	if _, err := w.Pause(t.Context(), paused.ID, ""); err != nil {
		t.Fatal(err)
	}
	w.run(stopped.ID, "echo x > /root/f")
	if _, err := w.Stop(t.Context(), stopped.ID, "", ""); err != nil {
		t.Fatal(err)
	}
	p, err := w.Exec(t.Context(), running.ID, process.Spec{ID: "long", Argv: []string{"sh", "-c", "sleep .3; echo late; exit 9"}})
	if err != nil {
		t.Fatal(err)
	}
	_ = p
	stray := runtime.Request{ID: dsec.NewSandboxID("nodea"), Spec: spec(nil)}
	if _, err := w.fake.Create(t.Context(), stray); err != nil {
		t.Fatal(err)
	}
	if _, err := w.store.Acquire(t.Context(), string(stray.ID), nil); err != nil {
		t.Fatal(err)
	}
	if _, err := w.store.Acquire(t.Context(), "image-build", nil); err != nil {
		t.Fatal(err)
	}
	w.crash()
	for id, want := range map[dsec.SandboxID]dsec.State{running.ID: dsec.Running, paused.ID: dsec.Paused, stopped.ID: dsec.Stopped} {
		if got := w.stateOf(id); got != want {
			t.Errorf("%s instead of %s", got, want)
		}
	}
	if ids := w.machine.Residue(); len(ids) != 3 {
		t.Errorf("the stray is there: %v", ids)
	}
	if l, _ := w.store.Leases(t.Context()); len(l) != 4 {
		t.Errorf("leases %v", l)
	}
	_, err = w.Create(t.Context(), "proj", spec(func(s *dsec.Spec) { s.Name = "r" }))
	wantClass(t, err, dsec.AlreadyExists)
	q, err := w.Process(t.Context(), running.ID, "long")
	if err != nil {
		t.Fatal(err)
	}
	if r, err := q.Wait(t.Context()); err != nil || r.ExitCode != 9 {
		t.Fatalf("%+v %v", r, err)
	}
	w.until("its end is noted", func() bool { r, err := w.Record(t.Context(), running.ID); return err == nil && len(r.Outputs) == 1 })
	if r, _ := w.Record(t.Context(), running.ID); string(r.Outputs[0].Stdout) != "late\n" || r.Outputs[0].Code != 9 {
		t.Fatalf("%+v", r.Outputs)
	}
	if l := w.Load(); l.Live != 2 {
		t.Errorf("load %+v", l)
	}
	if sb, err := w.Start(t.Context(), stopped.ID, ""); err != nil || sb.Starts != 2 {
		t.Fatalf("%+v %v", sb, err)
	}
	if _, out := w.run(stopped.ID, "cat /root/f"); out != "x\n" {
		t.Fatalf("disk %q", out)
	}
}

// TestG11_DeleteWorksFromEveryStateAfterACrash brings a sandbox into each state,
// kills the agent there, and deletes with the next one.
func TestG11_DeleteWorksFromEveryStateAfterACrash(t *testing.T) {
	into := map[dsec.State]func(t *testing.T, w *world, id dsec.SandboxID){
		dsec.Running: func(*testing.T, *world, dsec.SandboxID) {},
		dsec.Paused: func(t *testing.T, w *world, id dsec.SandboxID) {
			if _, err := w.Pause(t.Context(), id, ""); err != nil {
				t.Fatal(err)
			}
		},
		dsec.Stopping: func(t *testing.T, w *world, id dsec.SandboxID) {
			disarm := failpoint.Arm("node.stop.runtime", failpoint.Once(nil))
			defer disarm()
			if _, err := w.Stop(t.Context(), id, "", ""); err == nil {
				t.Fatal("no error")
			}
		},
		dsec.Stopped: func(t *testing.T, w *world, id dsec.SandboxID) {
			if _, err := w.Stop(t.Context(), id, "", ""); err != nil {
				t.Fatal(err)
			}
		},
		dsec.Failed: func(t *testing.T, w *world, id dsec.SandboxID) {
			w.machine.Crash(id, dsec.CauseAgentDamage, dsec.InducedBySelf, "gone")
			w.until("failed", func() bool { return w.stateOf(id) == dsec.Failed })
		},
		dsec.Pending:  forged(dsec.Pending, intentCreate),
		dsec.Creating: forged(dsec.Creating, intentCreate),
		dsec.Starting: forged(dsec.Starting, intentStart),
	}
	for _, state := range dsec.States {
		make := into[state]
		if make == nil {
			continue // deleted
		}
		t.Run(string(state), func(t *testing.T) {
			for _, known := range []bool{true, false} { // with and without something on the machine
				w := newWorld(t, nil)
				sb := w.create(nil)
				make(t, w, sb.ID)
				if s := w.stateOf(sb.ID); s != state {
					t.Fatalf("in state %s", s)
				}
				if !known {
					if err := w.fake.Destroy(t.Context(), sb.ID); err != nil {
						t.Fatal(err)
					}
				}
				w.crash()
				if _, err := w.Delete(t.Context(), sb.ID, ""); err != nil {
					t.Fatalf("delete: %v", err)
				}
				w.until("it is gone", func() bool { return w.find(sb.ID) == nil })
				if got, err := w.Get(t.Context(), sb.ID); err != nil || got.State != dsec.Deleted || got.Result == nil {
					t.Fatalf("%+v %v", got, err)
				}
				w.empty()
			}
		})
	}
}

// forged writes a state that lasts too short to be met.
func forged(s dsec.State, intent string) func(t *testing.T, w *world, id dsec.SandboxID) {
	return func(t *testing.T, w *world, id dsec.SandboxID) {
		b := w.find(id)
		b.turn <- struct{}{}
		defer b.unlock()
		b.mu.Lock()
		b.rec.State, b.rec.Intent = s, intent
		put := putLive(&b.rec)
		b.mu.Unlock()
		if err := w.ledger.commit(put); err != nil {
			t.Fatal(err)
		}
	}
}

func TestWhatTheMachineLostIsInfraNodeLost(t *testing.T) {
	w := newWorld(t, nil)
	lost, dead := w.create(nil), w.create(nil)
	w.shut()
	f := w.machine.Open()
	if err := f.Destroy(t.Context(), lost.ID); err != nil {
		t.Fatal(err)
	}
	if err := f.Stop(t.Context(), dead.ID, 0); err != nil { // no Exit will come
		t.Fatal(err)
	}
	_ = f.Close()
	w.open()
	for _, id := range []dsec.SandboxID{lost.ID, dead.ID} {
		w.clock.add(6 * time.Second)
		w.until("it has failed", func() bool { s := w.stateOf(id); return s == dsec.Failed || s == dsec.Deleted })
		if sb, _ := w.Get(t.Context(), id); sb.Result.Cause != dsec.CauseInfraNodeLost || !sb.Result.Mask() {
			t.Fatalf("%+v", sb.Result)
		}
	}
}

func TestAnEndWithoutAnAgentIsToldToTheNext(t *testing.T) {
	w := newWorld(t, nil)
	sb := w.create(func(s *dsec.Spec) { s.Command = []string{"sh", "-c", "sleep .2; exit 1"} })
	w.shut()
	f := w.machine.Open()
	for list, _ := f.List(t.Context()); list[0].Running; list, _ = f.List(t.Context()) {
		time.Sleep(5 * time.Millisecond)
	}
	_ = f.Close()
	w.open()
	w.until("it is stopped", func() bool { return w.stateOf(sb.ID) == dsec.Stopped })
	if got, _ := w.Get(t.Context(), sb.ID); got.Result.Cause != dsec.CauseCompleted {
		t.Fatalf("%+v", got.Result)
	}
}

func TestEventNumbersNeverRepeat(t *testing.T) {
	w := newWorld(t, nil)
	sb := w.create(nil)
	last := func() uint64 {
		r, err := w.Record(t.Context(), sb.ID)
		if err != nil {
			t.Fatal(err)
		}
		return r.Events[len(r.Events)-1].Seq
	}
	before := last()
	w.shut()
	w.open()
	if got := last(); got != before+1 { // adopted
		t.Errorf("%d after %d and an orderly end", got, before)
	}
	for range 100 {
		w.find(sb.ID).emit(dsec.Event{Type: dsec.EventNote})
	}
	before = last()
	w.crash()
	if got := last(); got <= before {
		t.Errorf("%d after %d and a crash", got, before)
	}
}

func TestOnlyOneAgentHasTheLedger(t *testing.T) {
	w := newWorld(t, nil)
	cfg := w.cfg
	_, err := New(cfg)
	wantClass(t, err, dsec.Unavailable)
}
