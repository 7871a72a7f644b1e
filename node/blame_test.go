package node

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/process"
)

var (
	toolkit   = dsec.LayerRef("toolkit:1")
	errBroken = dsec.E(dsec.Unavailable, "read layer", "sha256:00", errors.New("connection refused"))
)

// blameWorld has the clock of the commands, whose ends are compared with it.
func blameWorld(t *testing.T) *world {
	return newWorld(t, func(c *Config) { c.Clock = time.Now })
}

func (w *world) withToolkit() Sandbox {
	return w.create(func(s *dsec.Spec) { s.Layers = []dsec.LayerRef{toolkit} })
}

func (w *world) layerFailed(at time.Time) error {
	return w.LayerFailed(layer.DigestOf([]byte(toolkit)), at, errBroken)
}

func (w *world) layerFails() {
	w.t.Helper()
	if err := w.layerFailed(time.Now()); err != nil {
		w.t.Fatal(err)
	}
}

// wantBlamed: it ended as infra_image, and the evidence has both the error and
// what it would have ended as.
func wantBlamed(t *testing.T, what string, r *dsec.Result, otherwise dsec.Cause) {
	t.Helper()
	if r == nil || r.Cause != dsec.CauseInfraImage || r.Outcome != dsec.OutcomeInfra || r.InducedBy != dsec.InducedByPlatform || !r.Mask() || !r.Retryable {
		t.Errorf("%s: %+v", what, r)
		return
	}
	if e := strings.Join(r.Evidence, "\n"); !strings.Contains(e, "connection refused") || !strings.Contains(e, "otherwise: "+string(otherwise)) {
		t.Errorf("%s: evidence %q", what, r.Evidence)
	}
}

func TestWhoCouldHaveSeenAnErrorOfALayerEndsInfraImage(t *testing.T) {
	w := blameWorld(t)
	ctx := t.Context()
	ended := w.withToolkit()
	if _, err := w.Delete(ctx, ended.ID, ""); err != nil {
		t.Fatal(err)
	}
	had, other := w.withToolkit(), w.create(nil)
	before, _ := w.run(had.ID, "exit 3")
	w.layerFails()
	w.layerFails() // within a second
	after, _ := w.run(had.ID, "exit 3")
	if before.Blame != "" || after.Blame != dsec.CauseInfraImage || after.ExitCode != 3 {
		t.Errorf("commands: %+v, %+v", before, after)
	}
	if r, _ := w.run(other.ID, "exit 3"); r.Blame != "" {
		t.Errorf("one without the layer: %+v", r)
	}
	later := w.withToolkit()
	sb, err := w.Get(ctx, had.ID)
	if err != nil || sb.State != dsec.Running || sb.Result != nil || sb.Blame == nil || sb.Blame.Cause != dsec.CauseInfraImage || len(sb.Blame.Evidence) != 1 {
		t.Errorf("while it runs: %+v, %v", sb, err)
	}
	rec, err := w.Record(ctx, had.ID)
	if err != nil {
		t.Fatal(err)
	}
	events := 0
	for _, e := range rec.Events {
		if e.Type == dsec.EventLayerError {
			events++
		}
	}
	if events != 1 {
		t.Errorf("%d events of two errors within a second", events)
	}
	sb, err = w.Stop(ctx, had.ID, dsec.CauseAgentError, "")
	if err != nil {
		t.Fatal(err)
	}
	wantBlamed(t, "by the verdict of its owner", sb.Result, dsec.CauseAgentError)
	for what, id := range map[string]dsec.SandboxID{"without the layer": other.ID, "made since": later.ID, "ended before": ended.ID} {
		if _, err := w.Delete(ctx, id, ""); err != nil {
			t.Fatal(err)
		}
		if sb, err = w.Get(ctx, id); err != nil || sb.Result.Cause != dsec.CauseCompleted || sb.Blame != nil {
			t.Errorf("%s: %+v, %v", what, sb, err)
		}
	}
}

// TestBlameOutlivesTheAgent: also one that is killed, and the sandbox that is
// stopped and started again.
func TestBlameOutlivesTheAgent(t *testing.T) {
	w := blameWorld(t)
	ctx := t.Context()
	a, b := w.withToolkit(), w.withToolkit()
	w.layerFails()
	w.crash()
	r, _ := w.run(a.ID, "exit 1")
	if r.Blame != dsec.CauseInfraImage {
		t.Errorf("a command of the next agent: %+v", r)
	}
	if _, err := w.Stop(ctx, a.ID, "", ""); err != nil {
		t.Fatal(err)
	}
	w.shut()
	w.open()
	if sb, err := w.Start(ctx, a.ID, ""); err != nil || sb.Result != nil || sb.Blame == nil {
		t.Errorf("started again: %+v, %v", sb, err)
	}
	for _, id := range []dsec.SandboxID{a.ID, b.ID} {
		if _, err := w.Delete(ctx, id, ""); err != nil {
			t.Fatal(err)
		}
		sb, err := w.Get(ctx, id)
		if err != nil {
			t.Fatal(err)
		}
		wantBlamed(t, "deleted", sb.Result, dsec.CauseCompleted)
	}
}

// TestAnErrorThatIsToldLate: who ended since lived with it; whose end the
// platform or a policy is stays that.
func TestAnErrorThatIsToldLate(t *testing.T) {
	w := blameWorld(t)
	ctx := t.Context()
	before, during := w.withToolkit(), w.withToolkit()
	if _, err := w.Stop(ctx, before.ID, "", ""); err != nil {
		t.Fatal(err)
	}
	at := time.Now()
	if _, err := w.Stop(ctx, during.ID, dsec.CauseAgentTimeout, ""); err != nil {
		t.Fatal(err)
	}
	if err := w.layerFailed(at); err != nil {
		t.Fatal(err)
	}
	w.crash()
	sb, err := w.Get(ctx, during.ID)
	if err != nil {
		t.Fatal(err)
	}
	wantBlamed(t, "ended meanwhile", sb.Result, dsec.CauseAgentTimeout)
	if sb, err := w.Get(ctx, before.ID); err != nil || sb.Blame != nil || sb.Result.Cause != dsec.CauseCompleted {
		t.Errorf("ended before: %+v, %v", sb, err)
	}
	r := &record{Blame: sb.Blame}
	for _, c := range []dsec.Cause{dsec.CausePolicyKill, dsec.CausePreempted, dsec.CauseInfraNodeLost} {
		if got := r.verdict(dsec.NewResult(c, "run", dsec.InducedBySelf)); got.Cause != c {
			t.Errorf("%s became %s", c, got.Cause)
		}
	}
}

// TestACommandThatRunsWhenALayerFails is blamed, in the record too.
func TestACommandThatRunsWhenALayerFails(t *testing.T) {
	w := blameWorld(t)
	sb := w.withToolkit()
	p, err := w.Exec(t.Context(), sb.ID, process.Spec{Argv: []string{"/bin/sh", "-c", "cat; exit 5"}, Stdin: true})
	if err != nil {
		t.Fatal(err)
	}
	w.layerFails()
	if err := p.CloseStdin(t.Context()); err != nil {
		t.Fatal(err)
	}
	r, err := p.Wait(t.Context())
	if err != nil || r.Blame != dsec.CauseInfraImage {
		t.Errorf("%+v, %v", r, err)
	}
	w.until("its end is in the record", func() bool {
		b := w.find(sb.ID)
		b.mu.Lock()
		defer b.mu.Unlock()
		return len(b.rec.Outputs) == 1 && b.rec.Outputs[0].Blame == dsec.CauseInfraImage
	})
}
