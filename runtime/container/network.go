package container

import (
	"context"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/netpolicy"
)

// policy is what is in force, or comes into force at the next start.
func (r *record) policy() dsec.NetworkPolicy {
	if r.Network != nil {
		return *r.Network
	}
	return r.Request.Spec.PolicyIn(max(0, r.phase()))
}

func (b *build) network(ctx context.Context) (err error) {
	b.lease = netpolicy.Lease{Mode: dsec.NetworkNone}
	// One that was made without a network has none, whatever its policy became.
	if !b.rec.Request.Spec.HasLink() {
		return nil
	}
	number, err := b.sb.group.Number()
	if err != nil {
		return err
	}
	at := netpolicy.Place{NetNS: b.shell.NetNS, Group: number, Rate: b.rec.Request.Spec.Limits.Bandwidth, Link: true}
	b.lease, err = b.r.cfg.Network.Attach(ctx, b.sb.ID, b.rec.policy(), at)
	return err
}

// SetNetwork implements runtime.Networker.
func (r *Runtime) SetNetwork(ctx context.Context, id dsec.SandboxID, p dsec.NetworkPolicy) (generation uint64, err error) {
	const op = "set network of sandbox"
	sb, err := r.boxes.Acquire(ctx, op, id)
	if err != nil {
		return 0, err
	}
	defer sb.Leave()
	if _, err := r.boxes.Live(op, id); err != nil {
		return 0, err
	}
	if r.cfg.Network == nil {
		return 0, dsec.Errorf(dsec.Unsupported, op, string(id), "this node has no network for sandboxes")
	}
	return r.setNetwork(ctx, op, sb, p)
}

// setNetwork puts a policy in force, now and for later starts. The turn is held.
func (r *Runtime) setNetwork(ctx context.Context, op string, sb *sandbox, p dsec.NetworkPolicy) (generation uint64, err error) {
	ns, err := r.hold.Namespaces(ctx, string(sb.ID))
	if err != nil {
		return 0, r.explain(op, sb, err)
	}
	defer ns.Close()
	if generation, err = r.cfg.Network.Change(ctx, sb.ID, p, ns.NetNS); err != nil {
		return 0, err
	}
	return generation, r.wrap(op, sb.ID, r.rerecord(sb, func(rec *record) { rec.Network = &p }))
}

// Egress implements runtime.Networker.
func (r *Runtime) Egress(ctx context.Context, id dsec.SandboxID) (dsec.Egress, error) {
	const op = "read egress of sandbox"
	sb, err := r.boxes.Live(op, id)
	if err != nil {
		return dsec.Egress{}, err
	}
	if r.cfg.Network == nil || !sb.rec.Request.Spec.HasLink() {
		return dsec.Egress{Rows: []dsec.EgressRow{}}, nil
	}
	return r.cfg.Network.Egress(ctx, id)
}
