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
	return *r.Request.Spec.NetworkPolicy()
}

func (b *build) network(ctx context.Context) (err error) {
	b.lease = netpolicy.Lease{Mode: dsec.NetworkNone}
	// One that was made without a network has none, whatever its policy became.
	if !hasNetwork(b.rec.Request.Spec.Network) {
		return nil
	}
	number, err := b.sb.group.Number()
	if err != nil {
		return err
	}
	at := netpolicy.Place{NetNS: b.shell.NetNS, Group: number, Rate: b.rec.Request.Spec.Limits.Bandwidth}
	b.lease, err = b.r.cfg.Network.Attach(ctx, b.sb.id, b.rec.policy(), at)
	return err
}

// hasNetwork says whether a sandbox of a mode has a link.
func hasNetwork(m dsec.NetworkMode) bool { return m != "" && m != dsec.NetworkNone }

// SetNetwork implements runtime.Networker.
func (r *Runtime) SetNetwork(ctx context.Context, id dsec.SandboxID, p dsec.NetworkPolicy) (generation uint64, err error) {
	const op = "set network of sandbox"
	sb, err := r.acquire(ctx, op, id)
	if err != nil {
		return 0, err
	}
	defer sb.unlock()
	if _, err := r.live(op, id); err != nil {
		return 0, err
	}
	if r.cfg.Network == nil {
		return 0, dsec.Errorf(dsec.Unsupported, op, string(id), "this node has no network for sandboxes")
	}
	ns, err := r.hold.Namespaces(ctx, string(id))
	if err != nil {
		return 0, r.explain(op, sb, err)
	}
	_ = ns.UserNS.Close()
	defer func() { _ = ns.NetNS.Close() }()
	if generation, err = r.cfg.Network.Change(ctx, id, p, ns.NetNS); err != nil {
		return 0, err
	}
	return generation, r.wrap(op, id, r.rerecord(sb, func(rec *record) { rec.Network = &p }))
}

// Egress implements runtime.Networker.
func (r *Runtime) Egress(ctx context.Context, id dsec.SandboxID) (dsec.Egress, error) {
	const op = "read egress of sandbox"
	sb, err := r.live(op, id)
	if err != nil {
		return dsec.Egress{}, err
	}
	if r.cfg.Network == nil || !hasNetwork(sb.rec.Request.Spec.Network) {
		return dsec.Egress{Rows: []dsec.EgressRow{}}, nil
	}
	return r.cfg.Network.Egress(ctx, id)
}
