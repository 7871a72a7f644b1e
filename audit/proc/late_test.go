package proc

import (
	"testing"
	"time"

	"github.com/opendsec/dsec"
)

// TestARecordWaitsForTheNameOfItsCommand, as long as that may come, and for nothing else.
func TestARecordWaitsForTheNameOfItsCommand(t *testing.T) {
	var told []dsec.AuditRecord
	g := &groups{known: map[uint64]string{}}
	p := &tellings{groups: g, ready: map[dsec.SandboxID][]dsec.AuditRecord{}, take: func(_ dsec.SandboxID, r ...dsec.AuditRecord) { told = append(told, r...) }}
	now := time.Now()
	nobody := func(dsec.SandboxID) bool { return false }
	gone := func(group uint64) telling {
		return telling{id: "a", group: group, until: now.Add(nameWithin), record: dsec.AuditRecord{PID: int(group)}}
	}
	p.add(telling{id: "a", record: dsec.AuditRecord{Exec: "known"}})
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
