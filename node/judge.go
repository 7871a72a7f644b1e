package node

import (
	"context"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/audit"
)

// judged is how many records are judged at most: half of them the first, half the last.
const judged = 20_000

// judgingsAtOnce bounds the memory, which is that of so many records, and the processors that
// who asks for findings takes; judgeTime is what slow patterns get of them.
const (
	judgingsAtOnce  = 2
	projectJudgings = 1
	judgeTime       = 20 * time.Second
)

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
	done, err := n.judgings.take(ctx, r.Sandbox.Project)
	if err != nil {
		return nil, dsec.E(dsec.ClassOf(err), op, string(id), err)
	}
	defer done()
	k := audit.Known{Events: r.Events, End: r.Sandbox.Result, Pids: r.Sandbox.Spec.Limits.Pids}
	if k.Records, err = n.records(id); err != nil {
		return nil, err
	}
	jctx, stop := context.WithTimeout(ctx, judgeTime)
	defer stop()
	found, err := n.cfg.Judge.Judge(jctx, task, k)
	if jctx.Err() != nil && ctx.Err() == nil { // and would not sooner the next time
		err = dsec.Errorf(dsec.Invalid, op, string(id), "its patterns take more than %v for its evidence", judgeTime)
	}
	return found, err
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
	found, err := b.n.cfg.Judge.Judge(context.WithoutCancel(b.n.ctx), dsec.HackTask{}, k) // no patterns are a stranger's
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
