package node

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
)

// TestWhoseDiskFailedEndsInfraDisk: whether the tick or its end is first, and it is
// known over a restart of the agent; who had ended is not, and nobody is admitted.
func TestWhoseDiskFailedEndsInfraDisk(t *testing.T) {
	w := newWorld(t, nil)
	ctx := t.Context()
	before, ticked, stopped, killed := w.create(nil), w.create(nil), w.create(nil), w.create(nil)
	if _, err := w.Stop(ctx, before.ID, "", ""); err != nil {
		t.Fatal(err)
	}
	w.clock.add(time.Second)
	w.machine.FailDisks(errors.New("its file system is read-only"))
	sb, err := w.Stop(ctx, stopped.ID, dsec.CauseCompleted, "")
	if err != nil {
		t.Fatal(err)
	}
	results := map[string]*dsec.Result{"stopped": sb.Result}
	w.sweep()
	if sb, err = w.Get(ctx, ticked.ID); err != nil || sb.State != dsec.Running || sb.Blame == nil || sb.Blame.Cause != dsec.CauseInfraDisk {
		t.Fatalf("%+v, %v", sb.Blame, err)
	}
	events := len(w.find(ticked.ID).rec.Events)
	w.sweep()
	if again := len(w.find(ticked.ID).rec.Events); again != events {
		t.Errorf("%d events became %d", events, again)
	}
	if _, err := w.Create(ctx, "p", dsec.Spec{Tier: dsec.TierContainer, Image: "base"}); dsec.ClassOf(err) != dsec.Unavailable || !strings.Contains(err.Error(), "read-only") {
		t.Errorf("admitted: %v", err)
	}
	w.machine.FailDisks(nil) // as if it had been mended
	w.shut()
	w.open()
	for name, id := range map[string]dsec.SandboxID{"ticked": ticked.ID, "killed": killed.ID, "before": before.ID} {
		if _, err := w.Delete(ctx, id, ""); err != nil {
			t.Fatal(err)
		}
		sb, err := w.Get(ctx, id)
		if err != nil {
			t.Fatal(err)
		}
		results[name] = sb.Result
	}
	for name, r := range results {
		want := dsec.CauseInfraDisk
		if name == "before" {
			want = dsec.CauseCompleted
		}
		if r == nil || r.Cause != want || r.Mask() != (want == dsec.CauseInfraDisk) {
			t.Errorf("%s: %+v", name, r)
		}
	}
}
