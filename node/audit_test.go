package node

import (
	"errors"
	"path/filepath"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/audit"
)

// TestEvidenceOutlivesTheSandbox, but not its record.
func TestEvidenceOutlivesTheSandbox(t *testing.T) {
	store, err := audit.Open(audit.Config{Dir: filepath.Join(t.TempDir(), "audit")})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	w := newWorld(t, func(c *Config) { c.Audit = store })
	sb := w.create(nil)
	w.NetworkRefused(sb.ID, "tcp 203.0.113.7:443", "", 2, 5)
	b := w.find(sb.ID)
	b.emit(dsec.Event{Type: dsec.EventPhase, Detail: "grade"})
	store.Append(sb.ID, dsec.AuditRecord{Kind: dsec.AuditProcess, Exe: "/bin/sh"})
	_, err = w.Delete(t.Context(), sb.ID, "")
	if err != nil {
		t.Fatal(err)
	}
	read := func(f dsec.AuditFilter) (all []dsec.AuditRecord, err error) {
		err = w.Audit(t.Context(), sb.ID, f, func(r dsec.AuditRecord) error { all = append(all, r); return nil })
		return all, err
	}
	all, err := read(dsec.AuditFilter{Follow: true}) // which ends, because it is gone
	if err != nil || len(all) != 3 || all[0].Kind != dsec.AuditNetwork || all[0].Count != 5 || all[1].Kind != dsec.AuditPhase || all[2].Phase != "grade" {
		t.Errorf("%+v %v", all, err)
	}
	if all, err := read(dsec.AuditFilter{Since: 1, Kinds: []dsec.AuditKind{dsec.AuditProcess}}); err != nil || len(all) != 1 {
		t.Errorf("%+v %v", all, err)
	}
	if err := w.forgetAudits(); err != nil {
		t.Fatal(err)
	}
	if all, err := read(dsec.AuditFilter{}); err != nil || len(all) != 3 {
		t.Errorf("a record is there, the evidence is not: %v %v", all, err)
	}
	stray := dsec.NewSandboxID("abcdef")
	store.Append(stray, dsec.AuditRecord{Kind: dsec.AuditNote})
	if err := w.forgetAudits(); err != nil {
		t.Fatal(err)
	}
	if known, err := store.Known(); err != nil || len(known) != 1 || known[0] != sb.ID {
		t.Errorf("%v %v", known, err)
	}
	if err := w.Audit(t.Context(), stray, dsec.AuditFilter{}, nil); !errors.Is(err, dsec.NotFound.Err()) {
		t.Errorf("of no sandbox: %v", err)
	}
}
