package node

import (
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/audit"
)

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
		c.Judge = func(records []dsec.AuditRecord, _ []dsec.Event, _ *dsec.Result) (found []dsec.Event) {
			for _, r := range records {
				if r.Path != "" {
					found = append(found, dsec.Event{Type: dsec.EventFinding, Detail: r.Path, Fields: map[string]string{"class": r.Path}})
				}
			}
			return found
		}
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
	all, err := w.find(sb.ID).records()
	if err != nil || len(all) != judged || all[0].PID != 1 || all[judged-1].PID != n || all[judged/2-1].PID != judged/2 {
		t.Errorf("%d records, %v", len(all), err)
	}
}
