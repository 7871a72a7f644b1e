package node

import (
	"context"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/audit"
)

// judged is how many records are judged at most: half of them the first, half the last.
const judged = 20_000

// Findings implements Auditor.
func (n *Node) Findings(ctx context.Context, id dsec.SandboxID, task dsec.HackTask) ([]dsec.HackFinding, error) {
	const op = "look for reward hacks in"
	if n.cfg.Audit == nil || n.cfg.Judge == nil {
		return nil, dsec.Errorf(dsec.Unsupported, op, string(id), "this node keeps no evidence: node.audit is off")
	}
	r, err := n.Record(ctx, id)
	if err != nil {
		return nil, err
	}
	k := audit.Known{Events: r.Events, End: r.Sandbox.Result, Pids: r.Sandbox.Spec.Limits.Pids}
	if k.Records, err = n.records(id); err != nil {
		return nil, err
	}
	return n.cfg.Judge.Judge(task, k)
}

// judge tells what looks like a reward hack by now, each class once in the life of a
// sandbox. A result is never changed by it.
func (b *box) judge() {
	if b.n.cfg.Judge == nil || b.n.cfg.Audit == nil {
		return
	}
	records, err := b.n.records(b.id)
	if err != nil {
		b.n.cfg.Log.Warn("evidence not judged", "sandbox", b.id, "err", err)
		return
	}
	b.mu.Lock()
	k := audit.Known{Records: records, Events: append([]dsec.Event(nil), b.ring...), End: b.rec.Result, Pids: b.rec.Spec.Limits.Pids}
	b.mu.Unlock()
	found, err := b.n.cfg.Judge.Judge(dsec.HackTask{}, k)
	if err != nil {
		b.n.cfg.Log.Error("evidence not judged", "sandbox", b.id, "err", err)
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.gone { // and was judged before
		return
	}
	for _, f := range found {
		class := string(f.Class)
		if f.Confidence < dsec.HackConfidence || b.found[class] {
			continue
		}
		if b.found == nil {
			b.found = map[string]bool{}
		}
		b.found[class] = true
		b.emitLocked(b.n.cfg.Judge.Event(f))
	}
}

// records are those of the audit log of a sandbox that are judged.
func (n *Node) records(id dsec.SandboxID) (first []dsec.AuditRecord, err error) {
	c, err := n.cfg.Audit.Read(id, 0)
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
