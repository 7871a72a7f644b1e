package node

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/audit"
)

// pathJudge finds a hack in each path; what the task declares it holds to be less sure.
type pathJudge struct{}

func (pathJudge) Judge(_ context.Context, task dsec.HackTask, k audit.Known) (found []dsec.HackFinding, err error) {
	for _, r := range k.Records {
		switch {
		case slices.Contains(task.Tests, "bad"):
			return nil, dsec.Errorf(dsec.Invalid, "judge", "tests", "bad")
		case r.Path == "":
		case slices.Contains(task.Tests, r.Path):
			found = append(found, dsec.HackFinding{Class: dsec.HackClass(r.Path), Confidence: 0.1})
		default:
			found = append(found, dsec.HackFinding{Class: dsec.HackClass(r.Path), Confidence: 0.9})
		}
	}
	return append(found, dsec.HackFinding{Class: "weak", Confidence: 0.4}), nil
}

func (pathJudge) Event(f dsec.HackFinding) dsec.Event {
	return dsec.Event{Type: dsec.EventFinding, Fields: map[string]string{"class": string(f.Class)}}
}

// findings of a sandbox, which may be deleted: class and detail.
func (w *world) findings(id dsec.SandboxID) (all []string) {
	w.t.Helper()
	events, err := w.oldEvents(Filter{All: true}, time.Time{}, true)
	if err != nil {
		w.t.Fatal(err)
	}
	for _, e := range events {
		if e.Sandbox == id && e.Type == dsec.EventFinding {
			all = append(all, e.Fields["class"])
		}
	}
	return all
}

// TestFindingsAreToldOnceAndChangeNothing: when a sandbox has ended, and for what was
// found later when it is removed; not again by the next agent.
func TestFindingsAreToldOnceAndChangeNothing(t *testing.T) {
	store, err := audit.Open(audit.Config{Dir: filepath.Join(t.TempDir(), "audit")})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	w := newWorld(t, func(c *Config) {
		c.Audit = store
		c.Judge = pathJudge{}
	})
	honest, cheats := w.create(nil), w.create(nil)
	store.Append(honest.ID, dsec.AuditRecord{Kind: dsec.AuditProcess, Exe: "/bin/sh"})
	store.Append(cheats.ID, dsec.AuditRecord{Kind: dsec.AuditWrite, Path: "/bin/sh"}, dsec.AuditRecord{Kind: dsec.AuditWrite, Path: "/bin/sh"})
	for _, id := range []dsec.SandboxID{honest.ID, cheats.ID} {
		if sb, err := w.Stop(t.Context(), id, dsec.CauseCompleted, ""); err != nil || sb.Result.Cause != dsec.CauseCompleted {
			t.Fatalf("%+v, %v", sb.Result, err)
		}
	}
	w.until("the end is judged", func() bool { return len(w.findings(cheats.ID)) > 0 })
	w.crash()
	store.Append(cheats.ID, dsec.AuditRecord{Kind: dsec.AuditWrite, Path: "/lib/libc.so.6", Detail: dsec.WriteDiffers})
	for _, id := range []dsec.SandboxID{honest.ID, cheats.ID} {
		if _, err := w.Delete(t.Context(), id, ""); err != nil {
			t.Fatal(err)
		}
	}
	if all := w.findings(honest.ID); len(all) != 0 {
		t.Errorf("the honest one: %q", all)
	}
	if all := w.findings(cheats.ID); len(all) != 2 || all[0] != "/bin/sh" || all[1] != "/lib/libc.so.6" {
		t.Errorf("the other one: %q", all)
	}
}

// TestOfALongLogBothEndsAreJudged, and no more.
func TestOfALongLogBothEndsAreJudged(t *testing.T) {
	store, err := audit.Open(audit.Config{Dir: filepath.Join(t.TempDir(), "audit")})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	w := newWorld(t, func(c *Config) { c.Audit = store })
	sb := w.create(nil)
	const n = judged + judged/2
	for i := range n {
		store.Append(sb.ID, dsec.AuditRecord{Kind: dsec.AuditProcess, PID: i + 1, Exe: fmt.Sprint("/bin/", i)})
	}
	all, err := w.records(sb.ID)
	if err != nil || len(all) != judged || all[0].PID != 1 || all[judged-1].PID != n || all[judged/2-1].PID != judged/2 {
		t.Errorf("%d records, %v", len(all), err)
	}
}

// TestFindingsAreForWhoAsks, with what the task is like, and also after the sandbox is deleted.
func TestFindingsAreForWhoAsks(t *testing.T) {
	store, err := audit.Open(audit.Config{Dir: filepath.Join(t.TempDir(), "audit")})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	w := newWorld(t, func(c *Config) { c.Audit, c.Judge = store, pathJudge{} })
	sb := w.create(nil)
	store.Append(sb.ID, dsec.AuditRecord{Kind: dsec.AuditWrite, Path: "/tests/a"})
	for range 2 {
		for tests, want := range map[string]float64{"/other": 0.9, "/tests/a": 0.1} {
			all, err := w.Findings(t.Context(), sb.ID, dsec.HackTask{Tests: []string{tests}})
			if err != nil || len(all) != 2 || all[0].Class != "/tests/a" || all[0].Confidence != want || all[1].Class != "weak" {
				t.Errorf("%s: %+v, %v", tests, all, err)
			}
		}
		if _, err := w.Delete(t.Context(), sb.ID, ""); err != nil {
			t.Fatal(err)
		}
	}
	_, err = w.Findings(t.Context(), sb.ID, dsec.HackTask{Tests: []string{"bad"}})
	wantClass(t, err, dsec.Invalid)
	_, err = w.Findings(t.Context(), dsec.NewSandboxID("abcdef"), dsec.HackTask{})
	wantClass(t, err, dsec.NotFound)
	none := newWorld(t, nil)
	_, err = none.Findings(t.Context(), none.create(nil).ID, dsec.HackTask{})
	wantClass(t, err, dsec.Unsupported)
}

// stuckJudge judges until nobody waits for it.
type stuckJudge struct {
	pathJudge
	begun chan time.Duration // what it may take
}

func (j stuckJudge) Judge(ctx context.Context, _ dsec.HackTask, _ audit.Known) ([]dsec.HackFinding, error) {
	deadline, _ := ctx.Deadline()
	j.begun <- time.Until(deadline)
	<-ctx.Done()
	return nil, ctx.Err()
}

// TestWhoAsksForFindingsTakesNotAllOfTheNode: one at a time of a project, and each for so long.
func TestWhoAsksForFindingsTakesNotAllOfTheNode(t *testing.T) {
	store, err := audit.Open(audit.Config{Dir: filepath.Join(t.TempDir(), "audit")})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	j := stuckJudge{begun: make(chan time.Duration, 8)}
	w := newWorld(t, func(c *Config) { c.Audit, c.Judge = store, j })
	sb := w.create(nil)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() {
		_, err := w.Findings(ctx, sb.ID, dsec.HackTask{})
		ended <- err
	}()
	if may := <-j.begun; may <= 0 || may > judgeTime {
		t.Errorf("it may take %v", may)
	}
	short, end := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer end()
	_, err = w.Findings(short, sb.ID, dsec.HackTask{})
	wantClass(t, err, dsec.Timeout)
	if len(j.begun) != 0 {
		t.Error("two at once")
	}
	stop()
	<-ended
	go func() {
		_, err := w.Findings(ctx, sb.ID, dsec.HackTask{})
		ended <- err
	}()
	wantClass(t, <-ended, dsec.Canceled)
}
