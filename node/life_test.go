package node

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/files"
	"github.com/opendsec/dsec/internal/failpoint"
	"github.com/opendsec/dsec/process"
)

func TestStopStartPauseResume(t *testing.T) {
	w := newWorld(t, nil)
	sb := w.create(nil)
	if r, _ := w.run(sb.ID, "echo kept > /root/f"); r.ExitCode != 0 {
		t.Fatal(r)
	}
	w.clock.add(time.Minute)
	got, err := w.Stop(t.Context(), sb.ID, dsec.CauseAgentTimeout, "s1")
	if err != nil || got.State != dsec.Stopped || got.Result.Cause != dsec.CauseAgentTimeout || got.Result.Usage.Wall != time.Minute {
		t.Fatalf("%+v %+v %v", got, got.Result, err)
	}
	_, err = w.Exec(t.Context(), sb.ID, process.Spec{Argv: []string{"true"}})
	wantClass(t, err, dsec.SandboxGone)
	if got, err = w.Start(t.Context(), sb.ID, "s2"); err != nil || got.State != dsec.Running || got.Starts != 2 || got.Result != nil {
		t.Fatalf("%+v %v", got, err)
	}
	if _, out := w.run(sb.ID, "cat /root/f"); out != "kept\n" {
		t.Fatalf("disk: %q", out)
	}
	if got, err = w.Pause(t.Context(), sb.ID, ""); err != nil || got.State != dsec.Paused {
		t.Fatalf("%+v %v", got, err)
	}
	if _, out := w.run(sb.ID, "echo awake"); out != "awake\n" || w.stateOf(sb.ID) != dsec.Running {
		t.Fatal("exec does not resume")
	}
	for _, call := range []string{"p", "p"} { // the second is the same call: it changes nothing
		if _, err = w.Pause(t.Context(), sb.ID, call); err != nil {
			t.Fatal(err)
		}
		if got, err = w.Resume(t.Context(), sb.ID, ""); err != nil || got.State != dsec.Running {
			t.Fatalf("%+v %v", got, err)
		}
	}
	_, err = w.Stop(t.Context(), sb.ID, "", "p")
	wantClass(t, err, dsec.Conflict)
	_, err = w.Pause(t.Context(), dsec.NewSandboxID("nodea"), "")
	wantClass(t, err, dsec.NotFound)
}

func TestA10_ExecInADeadSandboxIsSandboxGone(t *testing.T) {
	w := newWorld(t, nil)
	deleted, failed := w.create(nil), w.create(nil)
	if _, err := w.Delete(t.Context(), deleted.ID, ""); err != nil {
		t.Fatal(err)
	}
	w.machine.Crash(failed.ID, dsec.CauseAgentDamage, dsec.InducedBySelf, "pid 1 was killed")
	w.until("it failed", func() bool { return w.stateOf(failed.ID) == dsec.Failed })
	for _, id := range []dsec.SandboxID{deleted.ID, failed.ID} {
		_, err := w.Exec(t.Context(), id, process.Spec{Argv: []string{"true"}})
		wantClass(t, err, dsec.SandboxGone)
		_, err = w.Dial(t.Context(), id, 80)
		wantClass(t, err, dsec.SandboxGone)
	}
	_, err := w.Exec(t.Context(), dsec.NewSandboxID("nodea"), process.Spec{Argv: []string{"true"}})
	wantClass(t, err, dsec.NotFound)
	var b bytes.Buffer // the disk outlives the processes
	fs, err := w.Files(t.Context(), failed.ID, "")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := fs.Read(t.Context(), "/etc/passwd", 0, -1, &b); err != nil || b.Len() == 0 {
		t.Fatal(err)
	}
	_, err = w.Start(t.Context(), failed.ID, "")
	wantClass(t, err, dsec.IllegalState)
}

func TestA15_DeleteEndsCallsInFlight(t *testing.T) {
	w := newWorld(t, nil)
	sb := w.create(nil)
	p, err := w.Exec(t.Context(), sb.ID, process.Spec{Argv: []string{"sleep", "300"}})
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { _, err := p.Wait(context.Background()); ended <- err }()
	var wg sync.WaitGroup
	existed := make([]bool, 4)
	for i := range existed {
		wg.Go(func() {
			var err error
			if existed[i], err = w.Delete(t.Context(), sb.ID, ""); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	n := 0
	for _, e := range existed {
		if e {
			n++
		}
	}
	if n != 1 {
		t.Errorf("%d deletes say that it existed", n)
	}
	wantClass(t, <-ended, dsec.SandboxGone)
	w.empty()
}

func TestG20_DeleteConfirmsOrErrs(t *testing.T) {
	w := newWorld(t, nil)
	sb := w.create(nil)
	disarm := failpoint.Arm("node.delete.runtime", failpoint.Times(2, dsec.E(dsec.Unavailable, "destroy", "", errors.New("hold is away"))))
	defer disarm()
	existed, err := w.Delete(t.Context(), sb.ID, "d")
	if wantClass(t, err, dsec.Unavailable); existed {
		t.Fatal("confirmed")
	}
	if s := w.stateOf(sb.ID); s != dsec.Stopping {
		t.Fatalf("state %s", s)
	}
	_, err = w.Delete(t.Context(), sb.ID, "d")
	wantClass(t, err, dsec.Unavailable)
	for range 3 {
		if existed, err := w.Delete(t.Context(), sb.ID, "d"); !existed || err != nil {
			t.Fatalf("the same call: %v %v", existed, err)
		}
	}
	if existed, err := w.Delete(t.Context(), sb.ID, "other"); existed || err != nil {
		t.Fatalf("another call: %v %v", existed, err)
	}
	w.empty()
	sb = w.create(nil)
	disarm2 := failpoint.Arm("node.delete.runtime", failpoint.Once(nil))
	defer disarm2()
	if _, err := w.Delete(t.Context(), sb.ID, ""); err == nil {
		t.Fatal("no error")
	}
	w.clock.add(time.Minute)
	w.until("what was not removed is removed later", func() bool { return len(w.machine.Residue()) == 0 })
	w.until("and forgotten", func() bool { return w.find(sb.ID) == nil })
	w.empty()
}

func TestDeleteCancelsACreation(t *testing.T) {
	w := newWorld(t, nil)
	entered := make(chan string, 1)
	disarm := failpoint.Arm("fake.create.start.before", failpoint.Block(entered, nil))
	defer disarm()
	done := make(chan error, 1)
	go func() {
		_, err := w.Create(context.Background(), "proj", spec(func(s *dsec.Spec) { s.CallID = "k" }))
		done <- err
	}()
	<-entered
	list, err := w.List(t.Context(), Filter{States: []dsec.State{dsec.Creating}})
	if err != nil || len(list) != 1 {
		t.Fatalf("%+v %v", list, err)
	}
	if existed, err := w.Delete(t.Context(), list[0].ID, ""); !existed || err != nil {
		t.Fatal(existed, err)
	}
	wantClass(t, <-done, dsec.Canceled)
	if sb, err := w.Get(t.Context(), list[0].ID); err != nil || sb.Result.Cause != dsec.CauseCancelled {
		t.Fatalf("%+v %v", sb, err)
	}
	w.empty()
}

func TestG18_ExpiryWarnsFirstAndSparesWhatIsInUse(t *testing.T) {
	w := newWorld(t, nil)
	sb := w.create(nil)
	var mu sync.Mutex
	var seen []dsec.EventType
	ctx, cancel := context.WithCancel(t.Context())
	streamed := make(chan struct{})
	go func() {
		defer close(streamed)
		_ = w.Events(ctx, Filter{Project: "proj"}, time.Time{}, func(e dsec.Event) error {
			mu.Lock()
			defer mu.Unlock()
			seen = append(seen, e.Type)
			return nil
		}, nil)
	}()
	warnings := func() (n int) {
		mu.Lock()
		defer mu.Unlock()
		for _, e := range seen {
			if e == dsec.EventExpiryWarning {
				n++
			}
		}
		return n
	}
	release := w.Attach(sb.ID)
	w.clock.add(5 * time.Hour)
	w.sweep()
	release()
	p, err := w.Exec(t.Context(), sb.ID, process.Spec{Argv: []string{"sleep", "300"}})
	if err != nil {
		t.Fatal(err)
	}
	w.clock.add(5 * time.Hour)
	w.sweep()
	if err := p.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.until("the exec is over", func() bool { b := w.find(sb.ID); b.mu.Lock(); defer b.mu.Unlock(); return b.running == 0 })
	w.clock.add(56 * time.Minute)
	w.until("a warning came", func() bool { return warnings() == 1 })
	if w.stateOf(sb.ID) != dsec.Running {
		t.Fatal("expired too soon")
	}
	if _, err := w.Renew(t.Context(), sb.ID, 0, ""); err != nil {
		t.Fatal(err)
	}
	w.clock.add(50 * time.Minute)
	w.sweep()
	if w.stateOf(sb.ID) != dsec.Running {
		t.Fatal("renewal did not help")
	}
	w.clock.add(11 * time.Minute)
	w.until("it expired, after another warning", func() bool { return w.stateOf(sb.ID) == dsec.Stopped && warnings() == 2 })
	if got, _ := w.Get(t.Context(), sb.ID); got.Result.Cause != dsec.CauseExpiredIdle {
		t.Fatalf("%+v", got.Result)
	}
	w.clock.add(59 * time.Minute)
	w.sweep()
	if w.stateOf(sb.ID) != dsec.Stopped {
		t.Fatal("the disk was not kept")
	}
	w.clock.add(2 * time.Minute)
	w.until("retention is over", func() bool { return w.find(sb.ID) == nil })
	w.empty()
	cancel()
	<-streamed
}

func TestLifetimeIsACap(t *testing.T) {
	w := newWorld(t, nil)
	sb := w.create(func(s *dsec.Spec) { s.Lifetimes.Lifetime = 10 * time.Minute })
	defer w.Attach(sb.ID)()
	w.clock.add(9 * time.Minute)
	w.sweep()
	got, err := w.Renew(t.Context(), sb.ID, 20*time.Minute, "r")
	if err != nil || !got.Expires.Equal(w.clock.Now().Add(20*time.Minute)) {
		t.Fatalf("%v %v", got.Expires, err)
	}
	w.clock.add(19 * time.Minute)
	w.sweep()
	if w.stateOf(sb.ID) != dsec.Running {
		t.Fatal("expired too soon")
	}
	w.clock.add(2 * time.Minute)
	w.until("it expired", func() bool { return w.stateOf(sb.ID) == dsec.Stopped })
	if got, _ := w.Get(t.Context(), sb.ID); got.Result.Cause != dsec.CauseExpiredLifetime || got.Result.Outcome != dsec.OutcomeExpired {
		t.Fatalf("%+v", got.Result)
	}
}

func TestI1_AnOOMOfTheMainProcessFailsTheSandbox(t *testing.T) {
	w := newWorld(t, nil)
	sb := w.create(func(s *dsec.Spec) { s.Command = []string{"tail", "/dev/zero"} })
	w.until("it failed", func() bool { return w.stateOf(sb.ID) == dsec.Failed })
	got, err := w.Get(t.Context(), sb.ID)
	if err != nil || got.Result.Cause != dsec.CauseOOM || got.Result.InducedBy != dsec.InducedBySelf || len(got.Result.Evidence) == 0 ||
		got.Result.Usage.OOMKills != 1 || got.Result.Mask() || got.Starts != 1 {
		t.Fatalf("%+v %v", got.Result, err)
	}
	w.clock.add(2 * time.Hour)
	w.until("it is removed", func() bool { return w.find(sb.ID) == nil })
	w.empty()
	done := w.create(func(s *dsec.Spec) { s.Command = []string{"sh", "-c", "echo out; exit 4"} })
	w.until("its end is its own", func() bool { return w.stateOf(done.ID) == dsec.Stopped })
	if got, _ := w.Get(t.Context(), done.ID); got.Result.Cause != dsec.CauseCompleted {
		t.Fatalf("%+v", got.Result)
	}
}

func TestFilesAreEvents(t *testing.T) {
	w := newWorld(t, nil)
	sb := w.create(nil)
	fs, err := w.Files(t.Context(), sb.ID, "root")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := fs.Write(t.Context(), "/tmp/x", strings.NewReader("y"), files.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	r, err := w.Record(t.Context(), sb.ID)
	if err != nil || !slices.ContainsFunc(r.Events, func(e dsec.Event) bool { return e.Type == dsec.EventFiles && strings.Contains(e.Detail, "/tmp/x") }) {
		t.Fatalf("%+v %v", r.Events, err)
	}
}

func TestEventsComeInOrderAndOnlyOnce(t *testing.T) {
	w := newWorld(t, nil)
	first := w.create(nil)
	if _, err := w.Delete(t.Context(), first.ID, ""); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var got []dsec.Event
	past := -1 // events that came before the mark
	errEnough := errors.New("enough")
	started := make(chan struct{})
	done := make(chan error, 1)
	go func() {
		done <- w.Events(ctx, Filter{All: true}, time.Time{}, func(e dsec.Event) error {
			got = append(got, e)
			if e.To == dsec.Deleted && e.Sandbox != first.ID {
				return errEnough
			}
			return nil
		}, func() error {
			past = len(got)
			close(started)
			return nil
		})
	}()
	<-started
	second := w.create(nil)
	w.run(second.ID, "true")
	if _, err := w.Delete(t.Context(), second.ID, ""); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != errEnough {
		t.Fatal(err)
	}
	next := map[dsec.SandboxID]uint64{}
	for _, e := range got {
		if next[e.Sandbox]++; e.Seq != next[e.Sandbox] {
			t.Fatalf("%+v, want number %d", e, next[e.Sandbox])
		}
	}
	if len(next) != 2 {
		t.Fatalf("events of %d sandboxes", len(next))
	}
	if past <= 0 || got[past-1].Sandbox != first.ID || got[past].Sandbox != second.ID {
		t.Fatalf("the mark came after %d events of %d", past, len(got))
	}
}

func TestASlowSubscriberIsCutOff(t *testing.T) {
	w := newWorld(t, nil)
	sb := w.create(nil)
	entered, release := make(chan struct{}), make(chan struct{})
	done := make(chan error, 1)
	go func() {
		done <- w.Events(t.Context(), Filter{}, time.Time{}, func(e dsec.Event) error {
			if e.Seq == 1 {
				close(entered)
				<-release
			}
			return nil
		}, nil)
	}()
	<-entered
	b := w.find(sb.ID)
	for range subscriberQueue + 2 {
		b.emit(dsec.Event{Type: dsec.EventNote})
	}
	close(release)
	wantClass(t, <-done, dsec.Unavailable)
}

func TestKeptOutputIsBoundedPerSandbox(t *testing.T) {
	w := newWorld(t, nil)
	sb := w.create(func(s *dsec.Spec) { s.Limits.Output = 1000 })
	for range 5 {
		w.run(sb.ID, "head -c 400 /dev/zero")
	}
	w.until("old ones are released", func() bool { l, _ := w.fake.List(t.Context()); return len(l[0].Execs) <= 2 })
}
