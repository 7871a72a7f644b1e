package node

import (
	"context"
	"strconv"
	"strings"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/runtime"
)

// NetworkRefused tells that the policy of a sandbox has refused a packet, or a
// connection, and how many so far. program is who tried, "" if that is not known.
func (n *Node) NetworkRefused(id dsec.SandboxID, what, program string, generation uint64, refused int64) {
	b := n.find(id)
	if b == nil {
		return
	}
	e := dsec.Event{Type: dsec.EventRefused, Detail: strings.ToValidUTF8(what, "?"), Fields: map[string]string{"generation": strconv.FormatUint(generation, 10), "refused": strconv.FormatInt(refused, 10)}}
	if program != "" {
		e.Fields["program"] = strings.ToValidUTF8(program, "?")
	}
	b.emit(e)
}

// keepCutoff: what the mirror hides from a sandbox is of its task, and stays so.
func (t *turn) keepCutoff(p dsec.NetworkPolicy) dsec.NetworkPolicy {
	spec := t.sandbox().Spec
	p.Cutoff, p.MirrorDeny = spec.Cutoff, spec.MirrorDeny
	return p
}

// SetNetwork implements Service. The policy is in force before it is written down:
// one that nobody has acknowledged may be in force after a crash, or not.
func (n *Node) SetNetwork(ctx context.Context, id dsec.SandboxID, p dsec.NetworkPolicy, callID string) (Sandbox, error) {
	const op = "set network of sandbox"
	if p.Mode == "" {
		p.Mode = dsec.NetworkNone
	}
	if err := p.Validate(); err != nil {
		return Sandbox{}, dsec.E(dsec.ClassOf(err), op, string(id), err)
	}
	_, err := n.once(ctx, "set_network", id, callID, p, func(t *turn) (string, error) {
		r, ok := t.rt.(runtime.Networker)
		if !ok {
			return "", t.unsupported(op)
		}
		if s := t.state(); s != dsec.Running && s != dsec.Paused {
			return "", t.illegal(op)
		}
		p := t.keepCutoff(p)
		generation, err := r.SetNetwork(ctx, id, p)
		if err != nil {
			return "", err
		}
		now := &dsec.NetworkState{NetworkPolicy: p, Generation: generation}
		if err := t.move(func(r *record) { r.Network = now }, t.remember("")); err != nil {
			return "", err
		}
		t.emit(dsec.Event{Type: dsec.EventNetwork, Detail: string(p.Mode), Fields: map[string]string{"generation": strconv.FormatUint(generation, 10)}})
		return "", nil
	})
	if err != nil {
		return Sandbox{}, err
	}
	return n.Get(ctx, id)
}

// Egress implements Service.
func (n *Node) Egress(ctx context.Context, id dsec.SandboxID) (dsec.Egress, error) {
	const op = "read egress of sandbox"
	b := n.find(id)
	if b == nil {
		return dsec.Egress{}, n.goneError(op, id)
	}
	r, ok := b.rt.(runtime.Networker)
	if !ok {
		return dsec.Egress{}, dsec.Errorf(dsec.Unsupported, op, string(id), "the tier %s cannot", kindOf(&b.rec.Spec))
	}
	e, err := r.Egress(ctx, id)
	return e, b.explain(op, err)
}
