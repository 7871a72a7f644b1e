package node

import (
	"bytes"
	"context"
	"errors"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.etcd.io/bbolt"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/failpoint"
	"github.com/opendsec/dsec/layer"
)

func goldenBlame() *dsec.Blame {
	return &dsec.Blame{Cause: dsec.CauseInfraImage, Since: time.Date(2030, 1, 2, 3, 4, 5, 678, time.UTC), Evidence: []string{"layer sha256:00: connection refused"}}
}

func TestBlameFormatIsAsItWas(t *testing.T) {
	const path = "testdata/blame-v1"
	want := append(encodeBlame(goldenBlame()), '\n')
	if *update {
		if err := os.WriteFile(path, want, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	got, err := decodeBlame(bytes.TrimSuffix(b, []byte("\n")))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(append(encodeBlame(got), '\n'), b) || !bytes.Equal(want, b) {
		t.Fatalf("read %+v, of %s\nwant %s", got, b, want)
	}
}

func FuzzDecodeBlame(f *testing.F) {
	f.Add(encodeBlame(goldenBlame()))
	f.Add([]byte{blameVersion})
	f.Add([]byte("\x01{\"cause\":\"oom\"}"))
	f.Fuzz(func(t *testing.T, b []byte) {
		bl, err := decodeBlame(b)
		if err != nil {
			if dsec.ClassOf(err) != dsec.Corrupt {
				t.Fatal(err)
			}
			return
		}
		if _, err := decodeBlame(encodeBlame(bl)); err != nil {
			t.Fatalf("what was read cannot be written: %v", err)
		}
	})
}

// inLedger is what an agent would find that starts now.
func (w *world) inLedger(id dsec.SandboxID) *dsec.Blame {
	w.t.Helper()
	all, err := w.ledger.live()
	if err != nil {
		w.t.Fatal(err)
	}
	for _, r := range all {
		if r.ID == id {
			return r.Blame
		}
	}
	w.t.Fatalf("%s is not in the ledger", id)
	return nil
}

// TestBlameDoesNotWaitForTheTurn: nor is it undone by a record that was encoded
// before it and written after it.
func TestBlameDoesNotWaitForTheTurn(t *testing.T) {
	w := blameWorld(t)
	sb := w.withToolkit()
	b := w.find(sb.ID)
	if err := b.lock(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.mu.Lock()
	stale := putLive(&b.rec)
	b.mu.Unlock()
	w.layerFails()
	if bl := w.inLedger(sb.ID); bl == nil {
		t.Error("not written while the turn is taken")
	}
	if err := w.ledger.commit(stale); err != nil {
		t.Fatal(err)
	}
	if bl := w.inLedger(sb.ID); bl == nil || bl.Cause != dsec.CauseInfraImage {
		t.Errorf("after a write that was prepared before: %+v", bl)
	}
	b.unlock()
	w.crash()
	if _, err := w.Delete(t.Context(), sb.ID, ""); err != nil {
		t.Fatal(err)
	}
	sb, err := w.Get(t.Context(), sb.ID)
	if err != nil {
		t.Fatal(err)
	}
	wantBlamed(t, "deleted", sb.Result, dsec.CauseCompleted)
	_ = w.ledger.db.View(func(tx *bbolt.Tx) error {
		if n := tx.Bucket(bucketBlame).Stats().KeyN; n != 0 {
			t.Errorf("%d blames of no sandbox", n)
		}
		return nil
	})
}

// TestAReadIsNotToldOfBeforeTheBlameIsWritten: a write that fails is answered with
// its error, and so is the next one, which has nothing new to say.
func TestAReadIsNotToldOfBeforeTheBlameIsWritten(t *testing.T) {
	w := blameWorld(t)
	sb := w.withToolkit()
	full := dsec.E(dsec.NoSpace, "write", "ledger.db", errors.New("no space left on device"))
	disarm := failpoint.Arm("node.ledger.commit", failpoint.Times(100, full))
	for range 2 {
		wantClass(t, w.layerFailed(time.Now()), dsec.NoSpace)
	}
	disarm()
	if bl := w.inLedger(sb.ID); bl != nil {
		t.Fatalf("written: %+v", bl)
	}
	w.layerFails()
	if bl := w.inLedger(sb.ID); bl == nil {
		t.Error("not written when it could be")
	}
	n := w.Node
	w.shut()
	wantClass(t, n.LayerFailed(layer.DigestOf([]byte(toolkit)), time.Now(), errBroken), dsec.Unavailable)
	w.open()
}

// TestATimeThatCannotBe is now: who had ended is not blamed.
func TestATimeThatCannotBe(t *testing.T) {
	w := blameWorld(t)
	stopped, deleted, lives := w.withToolkit(), w.withToolkit(), w.withToolkit()
	if _, err := w.Stop(t.Context(), stopped.ID, "", ""); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Delete(t.Context(), deleted.ID, ""); err != nil {
		t.Fatal(err)
	}
	for _, at := range []time.Time{{}, time.Now().Add(time.Hour)} {
		if err := w.layerFailed(at); err != nil {
			t.Fatal(err)
		}
	}
	for what, id := range map[string]dsec.SandboxID{"stopped": stopped.ID, "deleted": deleted.ID} {
		if sb, err := w.Get(t.Context(), id); err != nil || sb.Blame != nil || sb.Result.Cause != dsec.CauseCompleted {
			t.Errorf("%s: %+v, %v", what, sb, err)
		}
	}
	sb, err := w.Get(t.Context(), lives.ID)
	if err != nil || sb.Blame == nil || sb.Blame.Since.After(time.Now()) || sb.Blame.Since.Before(sb.Created) {
		t.Errorf("one that lives: %+v, %v", sb.Blame, err)
	}
}

// TestWhoWasDeletedSinceIsBlamed in its record, and the record can be read
// afterwards.
func TestWhoWasDeletedSinceIsBlamed(t *testing.T) {
	w := blameWorld(t)
	sb, at := w.withToolkit(), time.Now()
	if _, err := w.Delete(t.Context(), sb.ID, ""); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := w.layerFailed(at); err != nil {
			t.Fatal(err)
		}
	}
	w.crash()
	sb, err := w.Get(t.Context(), sb.ID)
	if err != nil {
		t.Fatal(err)
	}
	wantBlamed(t, "deleted since", sb.Result, dsec.CauseCompleted)
	if n := strings.Count(strings.Join(sb.Result.Evidence, "\n"), "connection refused"); n != 1 {
		t.Errorf("evidence %q", sb.Result.Evidence)
	}
	if all, err := w.List(t.Context(), Filter{All: true}); err != nil || len(all) != 1 {
		t.Errorf("%d records, %v", len(all), err)
	}
}

// TestProcessesLiveUntilTheirEndIsKnown: those of a sandbox that is being stopped
// may read on, and its end is not when its record was changed last.
func TestProcessesLiveUntilTheirEndIsKnown(t *testing.T) {
	w := blameWorld(t)
	sb := w.withToolkit()
	disarm := failpoint.Arm("node.stop.runtime", failpoint.Times(100, errBroken))
	if _, err := w.Stop(t.Context(), sb.ID, dsec.CauseAgentError, ""); err == nil {
		t.Fatal("stopped")
	}
	disarm()
	time.Sleep(time.Millisecond) // so that the trouble is after the last change
	w.layerFails()
	if sb, err := w.Get(t.Context(), sb.ID); err != nil || sb.State != dsec.Stopping || sb.Blame == nil {
		t.Errorf("stopping: %+v, %v", sb, err)
	}
	b := w.find(sb.ID)
	b.later(nil)
	b.mu.Lock()
	b.retryAt = time.Time{}
	b.mu.Unlock()
	w.until("stopped", func() bool { return w.stateOf(sb.ID) == dsec.Stopped })

	ended := w.withToolkit()
	if _, err := w.Stop(t.Context(), ended.ID, dsec.CauseAgentError, ""); err != nil {
		t.Fatal(err)
	}
	at := time.Now()
	disarm = failpoint.Arm("node.delete.runtime", failpoint.Times(100, errBroken))
	if _, err := w.Delete(t.Context(), ended.ID, ""); err == nil { // writes the intent
		t.Fatal("deleted")
	}
	disarm()
	if err := w.layerFailed(at); err != nil {
		t.Fatal(err)
	}
	if sb, err := w.Get(t.Context(), ended.ID); err != nil || sb.Blame != nil || !sb.Changed.After(at) {
		t.Errorf("ended before, changed after: %+v, %v", sb, err)
	}
}

// TestFailedCreationsAreBlamedInEitherOrder of error and trouble.
func TestFailedCreationsAreBlamedInEitherOrder(t *testing.T) {
	eio := dsec.E(dsec.NotFound, "find user", "root", &os.PathError{Op: "read", Path: "/etc/passwd", Err: syscall.EIO})
	for _, c := range []struct {
		err  error
		want dsec.Cause
	}{
		{dsec.E(dsec.Internal, "start", "", errors.New("broken pipe")), dsec.CauseInfraImage},
		{dsec.E(dsec.Timeout, "start", "", errors.New("too late")), dsec.CauseInfraImage},
		{eio, dsec.CauseInfraImage},
		{dsec.E(dsec.NotFound, "find user", "nobody2", nil), dsec.CauseTaskSetup},
		{dsec.E(dsec.Invalid, "start", "", errors.New("a name with a zero")), dsec.CauseTaskInvalid},
		{dsec.E(dsec.Canceled, "start", "", errors.New("not wanted")), dsec.CauseCancelled},
	} {
		for _, first := range []bool{true, false} {
			w := blameWorld(t)
			disarm := failpoint.Arm("fake.create.start.before", func(context.Context, string) error {
				if first {
					w.layerFails()
				}
				return c.err
			})
			began := time.Now()
			_, err := w.Create(t.Context(), "proj", spec(func(s *dsec.Spec) { s.Layers = []dsec.LayerRef{toolkit} }))
			disarm()
			if err == nil {
				t.Fatal("created")
			}
			if !first {
				if err := w.layerFailed(began); err != nil {
					t.Fatal(err)
				}
			}
			all, err := w.List(t.Context(), Filter{All: true})
			if err != nil || len(all) != 1 {
				t.Fatalf("%+v, %v", all, err)
			}
			if got := all[0].Result; got.Cause != c.want {
				t.Errorf("%v, trouble first: %v: %+v, want %s", c.err, first, got, c.want)
			}
			w.shut()
		}
	}
}

// TestTheLastAgentWasAliveWhenItWroteTheLastTime, in order or not.
func TestTheLastAgentWasAliveWhenItWroteTheLastTime(t *testing.T) {
	w := newWorld(t, nil)
	if at := w.LastAlive(); !at.IsZero() {
		t.Errorf("the first agent: %v", at)
	}
	w.clock.add(time.Minute)
	sb := w.create(nil)
	want := w.clock.Now()
	w.clock.add(time.Hour)
	w.crash()
	if at := w.LastAlive(); !at.Equal(want) {
		t.Errorf("%v, want %v", at, want)
	}
	w.clock.add(time.Hour)
	if _, err := w.Stop(t.Context(), sb.ID, "", ""); err != nil {
		t.Fatal(err)
	}
	want = w.clock.Now()
	w.shut()
	w.clock.add(time.Hour)
	w.open()
	if at := w.LastAlive(); !at.Equal(want) {
		t.Errorf("%v, want %v", at, want)
	}
}

// TestTroublesMayComeAtAnyMoment of the life of a sandbox (for the race detector),
// and whoever had the layer then is blamed, once for all.
func TestTroublesMayComeAtAnyMoment(t *testing.T) {
	w := blameWorld(t)
	stop, stopped := make(chan struct{}), make(chan error, 1)
	go func() {
		for {
			select {
			case <-stop:
				stopped <- nil
				return
			default:
			}
			if err := w.layerFailed(time.Now()); err != nil {
				stopped <- err
				return
			}
		}
	}()
	for i := range 20 {
		with := func(s *dsec.Spec) {
			s.Layers, s.Lifetimes.KeepFailed = []dsec.LayerRef{toolkit}, time.Hour
		}
		if i%2 == 0 {
			disarm := failpoint.Arm("fake.create.start.before", failpoint.Times(2, dsec.E(dsec.NotFound, "find user", "nobody2", nil)))
			_, err := w.Create(t.Context(), "proj", spec(with))
			disarm()
			wantClass(t, err, dsec.NotFound)
			continue
		}
		sb := w.create(with)
		for b := w.find(sb.ID); ; { // until one has come
			b.mu.Lock()
			blamed := b.rec.Blame != nil && b.blames == b.blamesIn
			b.mu.Unlock()
			if blamed {
				break
			}
			time.Sleep(100 * time.Microsecond)
		}
		if _, err := w.Delete(t.Context(), sb.ID, ""); err != nil {
			t.Fatal(err)
		}
	}
	close(stop)
	if err := <-stopped; err != nil {
		t.Fatal(err)
	}
	w.crash()
	all, err := w.List(t.Context(), Filter{All: true})
	if err != nil || len(all) != 20 {
		t.Fatalf("%d, %v", len(all), err)
	}
	for _, sb := range all {
		if c := sb.Result.Cause; c != dsec.CauseInfraImage && c != dsec.CauseTaskSetup || (c == dsec.CauseInfraImage) != (sb.Starts > 0) {
			t.Errorf("%+v", sb.Result)
		}
	}
}

// TestABlameThatCannotBeRead was one.
func TestABlameThatCannotBeRead(t *testing.T) {
	w := blameWorld(t)
	sb := w.withToolkit()
	err := w.ledger.commit(func(tx *bbolt.Tx) error { return tx.Bucket(bucketBlame).Put([]byte(sb.ID), []byte("\x09{}")) })
	if err != nil {
		t.Fatal(err)
	}
	if bl := w.inLedger(sb.ID); bl == nil || bl.Cause != dsec.CauseInfraImage || !bl.Since.Equal(sb.Created) {
		t.Errorf("%+v", bl)
	}
}

// TestWhetherADiskIsKeptIsReadUnderTheLock: troubles change the result meanwhile.
func TestWhetherADiskIsKeptIsReadUnderTheLock(t *testing.T) {
	w := blameWorld(t)
	sb := w.create(func(s *dsec.Spec) {
		s.Layers, s.Lifetimes.KeepFailed = []dsec.LayerRef{toolkit}, time.Hour
	})
	b, over := w.find(sb.ID), make(chan struct{})
	go func() {
		defer close(over)
		for range 3000 {
			b.mu.Lock()
			b.rec.Result, b.rec.Blame = dsec.NewResult(dsec.CauseCompleted, "run", dsec.InducedBySelf), nil
			b.mu.Unlock()
			b.suffers(&trouble{cause: dsec.CauseInfraImage, layer: layer.DigestOf([]byte(toolkit)), at: time.Now(), err: errBroken})
		}
	}()
	for {
		select {
		case <-over:
			return
		default:
		}
		if err := w.keepFailed(t.Context(), b); err != nil {
			t.Fatal(err)
		}
	}
}
