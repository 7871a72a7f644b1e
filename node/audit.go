package node

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/audit"
)

// Auditor shows the evidence of what sandboxes did.
type Auditor interface {
	// Audit calls fn with the records that f selects, in order, also of a sandbox that
	// is deleted, as long as there is a record of it. With f.Follow it goes on
	// until the sandbox is deleted, ctx ends or fn errs.
	Audit(ctx context.Context, id dsec.SandboxID, f dsec.AuditFilter, fn func(dsec.AuditRecord) error) error
	// Findings judges the evidence there is by now, likewise of a sandbox that is deleted:
	// one of each class of reward hacks of which there is any sign, however weak.
	Findings(ctx context.Context, id dsec.SandboxID, task dsec.HackTask) ([]dsec.HackFinding, error)
}

var _ Auditor = (*Node)(nil)

// followCheck is how often one who follows looks whether the sandbox is still there.
const followCheck = 2 * time.Second

// Audit implements Auditor.
func (n *Node) Audit(ctx context.Context, id dsec.SandboxID, f dsec.AuditFilter, fn func(dsec.AuditRecord) error) error {
	const op = "read audit log"
	if n.cfg.Audit == nil {
		return dsec.Errorf(dsec.Unsupported, op, string(id), "this node keeps none: node.audit is off")
	}
	if _, err := n.Get(ctx, id); err != nil {
		return err
	}
	c, err := n.cfg.Audit.Read(id, f.Since)
	if err != nil {
		return err
	}
	for {
		gone := n.find(id) == nil // before the records are read: then these are all
		records, err := c.Next()
		if err != nil {
			return err
		}
		for _, r := range records {
			if len(f.Kinds) > 0 && !slices.Contains(f.Kinds, r.Kind) {
				continue
			}
			if err := fn(r); err != nil {
				return err
			}
		}
		if len(records) == 0 && (!f.Follow || gone) {
			return nil
		}
		if len(records) == 0 {
			if err := n.waitAudit(ctx, c); err != nil {
				return err
			}
		}
	}
}

func (n *Node) waitAudit(ctx context.Context, c *audit.Cursor) error {
	short, cancel := context.WithTimeout(ctx, followCheck)
	defer cancel()
	stop := context.AfterFunc(n.ctx, cancel)
	defer stop()
	err := c.Wait(short)
	switch {
	case n.ctx.Err() != nil:
		return dsec.E(dsec.Unavailable, "follow audit log", "", context.Cause(n.ctx))
	case ctx.Err() != nil:
		return dsec.E(dsec.ClassOf(ctx.Err()), "follow audit log", "", context.Cause(ctx))
	case errors.Is(err, dsec.Timeout.Err()):
		return nil
	}
	return err
}

// evidence puts what an event tells into the log of its sandbox.
func (b *box) evidence(e dsec.Event) {
	if b.n.cfg.Audit == nil {
		return
	}
	r := dsec.AuditRecord{Time: e.Time, UID: dsec.NobodyID, GID: dsec.NobodyID, Detail: e.Detail, Exec: e.Exec}
	switch e.Type {
	case dsec.EventRefused:
		r.Kind = dsec.AuditNetwork
		r.Count, _ = strconv.ParseInt(e.Fields["refused"], 10, 64) // so far
		if p := e.Fields["program"]; p != "" {
			r.Exe = "~" + p
		}
	case dsec.EventNetwork:
		r.Kind, r.Detail = dsec.AuditPolicy, e.Detail+", generation "+e.Fields["generation"]
	case dsec.EventPhase:
		r.Kind, r.Phase, r.Detail = dsec.AuditPhase, e.Detail, ""
	case dsec.EventRepercussion, dsec.EventGraded:
		r.Kind, r.Detail = dsec.AuditNote, string(e.Type)+": "+e.Detail
	case dsec.EventAdopted:
		r.Kind, r.Detail = dsec.AuditNote, "the agent was away, and is back"
	default:
		return
	}
	b.n.cfg.Audit.Append(b.id, r)
}

// forgetAudits removes the logs of sandboxes of which there is no record any more.
func (n *Node) forgetAudits() error {
	if n.cfg.Audit == nil {
		return nil
	}
	known, err := n.cfg.Audit.Known()
	if err != nil {
		return err
	}
	var errs []error
	for _, id := range known {
		if n.find(id) != nil {
			continue
		}
		r, err := n.ledger.ended(id)
		if err == nil && r == nil && n.find(id) == nil {
			err = n.cfg.Audit.Remove(id)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
