package proc

import (
	"time"

	"github.com/opendsec/dsec"
)

// telling is a record on its way to the log.
type telling struct {
	id     dsec.SandboxID
	record dsec.AuditRecord
	// group is the number of a control group that is gone, and of which nobody has said yet
	// what command it was made for: who started that does so a moment later. 0: nothing is missing.
	group uint64
	until time.Time // it is told by then
}

// nameWithin is how long a record waits for the name of its command.
const nameWithin = time.Second

// mostLate wait at one time; more are told without. They are asked about at each delivery.
const mostLate = 4096

// tellings come together: a log is opened for each write.
type tellings struct {
	groups *groups
	take   func(dsec.SandboxID, ...dsec.AuditRecord)
	ready  map[dsec.SandboxID][]dsec.AuditRecord
	late   []telling
	count  int // ready
}

func (p *tellings) add(x telling) {
	if x.group != 0 && len(p.late) < mostLate {
		p.late = append(p.late, x)
		return
	}
	p.ready[x.id] = append(p.ready[x.id], x.record)
	p.count++
}

// deliver tells all that is ready, and with all what still waits.
func (p *tellings) deliver(now time.Time, all bool) {
	late := p.late
	p.late = nil
	after := p.ready // what waited is older
	p.ready = map[dsec.SandboxID][]dsec.AuditRecord{}
	for _, x := range late {
		var named bool
		if x.record.Exec, named = p.groups.said(x.group); named || all || now.After(x.until) {
			x.group = 0
		}
		p.add(x)
	}
	for id, records := range after {
		p.ready[id] = append(p.ready[id], records...)
	}
	for id, records := range p.ready {
		p.take(id, records...)
		delete(p.ready, id)
	}
	p.count = 0
}
