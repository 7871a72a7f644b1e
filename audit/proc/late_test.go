package proc

import (
	"slices"
	"testing"
	"time"

	"github.com/opendsec/dsec"
)

func nobody(dsec.SandboxID) bool    { return false }
func everybody(dsec.SandboxID) bool { return true }

// TestARecordWaitsForTheNameOfItsCommand, as long as that may come, and for nothing else.
func TestARecordWaitsForTheNameOfItsCommand(t *testing.T) {
	var told []dsec.AuditRecord
	g := &groups{known: map[uint64]string{}}
	p := newTellings(g, func(_ dsec.SandboxID, r ...dsec.AuditRecord) { told = append(told, r...) })
	now := time.Now()
	gone := func(group uint64) telling {
		return telling{id: "a", group: group, until: now.Add(nameWithin), record: &dsec.AuditRecord{PID: int(group)}}
	}
	p.add(telling{id: "a", record: &dsec.AuditRecord{Exec: "known"}})
	p.add(gone(1))
	p.add(gone(2))
	p.deliver(now, nobody)
	if len(told) != 1 || told[0].Exec != "known" {
		t.Fatalf("%+v", told)
	}
	g.say(1, "one")
	p.deliver(now, nobody)
	if len(told) != 2 || told[1].Exec != "one" || told[1].PID != 1 {
		t.Fatalf("%+v", told)
	}
	p.deliver(now.Add(nameWithin+1), nobody)
	if len(told) != 3 || told[2].PID != 2 || told[2].Exec != "" {
		t.Fatalf("%+v", told)
	}
	other := gone(4)
	other.id = "b"
	p.add(gone(3))
	p.add(other)
	p.deliver(now, func(id dsec.SandboxID) bool { return id == "a" }) // which is removed
	if len(told) != 4 || told[3].PID != 3 || len(p.late) != 1 {
		t.Errorf("%+v, %d wait", told, len(p.late))
	}
}

// TestWhatWaitedIsToldBeforeWhatCameAfter it, and only so much waits.
func TestWhatWaitedIsToldBeforeWhatCameAfter(t *testing.T) {
	var told []dsec.AuditRecord
	g := &groups{known: map[uint64]string{}}
	p := newTellings(g, func(_ dsec.SandboxID, r ...dsec.AuditRecord) { told = append(told, r...) })
	now := time.Now()
	p.add(telling{id: "a", group: 1, until: now.Add(nameWithin), record: &dsec.AuditRecord{PID: 1}})
	p.deliver(now, nobody)
	p.add(telling{id: "a", record: &dsec.AuditRecord{PID: 2, PPID: 1}})
	g.say(1, "one")
	p.deliver(now, nobody)
	if len(told) != 2 || told[0].PID != 1 || told[0].Exec != "one" || told[1].PID != 2 {
		t.Errorf("%+v", told)
	}
	for range 2 * mostLate {
		p.add(telling{id: "a", group: 2, until: now.Add(nameWithin), record: &dsec.AuditRecord{}})
	}
	if len(p.late) != mostLate || p.count != mostLate {
		t.Errorf("%d wait, %d are ready", len(p.late), p.count)
	}
	told = nil
	if p.deliver(now, everybody); len(told) != 2*mostLate {
		t.Errorf("%d of %d are told", len(told), 2*mostLate)
	}
}

// TestNoFileIsBelievedOfWhoBecameAnother of the same name before it was told.
func TestNoFileIsBelievedOfWhoBecameAnother(t *testing.T) {
	var told []dsec.AuditRecord
	p := newTellings(&groups{known: map[uint64]string{}}, func(_ dsec.SandboxID, r ...dsec.AuditRecord) { told = append(told, r...) })
	started := func(pid int, name string, late uint64) telling {
		return telling{id: "a", group: late, until: time.Now().Add(nameWithin), record: &dsec.AuditRecord{Exe: "/usr/bin/git"}, start: start{pid, name, "~/tmp/git"}}
	}
	for _, x := range []telling{started(1, "git", 0), started(2, "git", 7), started(1, "git", 0), started(2, "git", 0), started(3, "sh", 0), started(3, "git", 0)} {
		p.add(x)
	}
	p.deliver(time.Now(), everybody)
	var exes []string
	for _, r := range told {
		exes = append(exes, r.Exe)
	}
	if want := []string{"~/tmp/git", "~/tmp/git", "/usr/bin/git", "/usr/bin/git", "/usr/bin/git", "/usr/bin/git"}; !slices.Equal(exes, want) {
		t.Errorf("%q", exes)
	}
}

func TestGroupsAreForgottenOldestFirst(t *testing.T) {
	g := &groups{known: map[uint64]string{}}
	for i := range uint64(mostGroups + 10) {
		g.say(i, "x")
	}
	if _, named := g.said(20); !named {
		t.Error("one of the last thousands is forgotten")
	}
	for i := range uint64(2 * mostGroups) {
		g.say(1_000_000+i, "x")
	}
	if _, named := g.said(20); named || len(g.known)+len(g.older) > 2*mostGroups {
		t.Errorf("%d and %d are kept", len(g.known), len(g.older))
	}
}
