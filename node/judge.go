package node

import (
	"github.com/opendsec/dsec"
)

// Judge looks for reward hacks in what is known of a sandbox, in the order of time, and
// gives an event of each class it finds. It changes nothing and may be called at one time.
type Judge func(records []dsec.AuditRecord, events []dsec.Event, end *dsec.Result) []dsec.Event

// judged is how many records are judged at most: half of them the first, half the last.
const judged = 20_000

// judge tells what looks like a reward hack by now, each class once in the life of a
// sandbox. A result is never changed by it.
func (b *box) judge() {
	if b.n.cfg.Judge == nil || b.n.cfg.Audit == nil {
		return
	}
	records, err := b.records()
	if err != nil {
		b.n.cfg.Log.Warn("evidence not judged", "sandbox", b.id, "err", err)
		return
	}
	b.mu.Lock()
	events, end := append([]dsec.Event(nil), b.ring...), b.rec.Result
	b.mu.Unlock()
	found := b.n.cfg.Judge(records, events, end)
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.gone { // and was judged before
		return
	}
	for _, e := range found {
		if class := e.Fields["class"]; !b.found[class] {
			if b.found == nil {
				b.found = map[string]bool{}
			}
			b.found[class] = true
			b.emitLocked(e)
		}
	}
}

// records are those of the audit log that are judged.
func (b *box) records() (first []dsec.AuditRecord, err error) {
	c, err := b.n.cfg.Audit.Read(b.id, 0)
	if err != nil {
		return nil, err
	}
	var last []dsec.AuditRecord
	for {
		more, err := c.Next()
		if err != nil || len(more) == 0 {
			return append(first, last...), err
		}
		room := min(len(more), judged/2-len(first))
		first, last = append(first, more[:room]...), append(last, more[room:]...)
		last = last[max(0, len(last)-judged/2):]
	}
}

// foundBefore are the classes that were told, as far as the record's events say.
func foundBefore(events []dsec.Event) map[string]bool {
	var found map[string]bool
	for _, e := range events {
		if e.Type == dsec.EventFinding {
			if found == nil {
				found = map[string]bool{}
			}
			found[e.Fields["class"]] = true
		}
	}
	return found
}
