package gvisor

import (
	"context"

	"github.com/opendsec/dsec"
)

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
	ns, err := r.hold.Namespaces(ctx, name(id))
	if err != nil {
		return 0, explain(op, sb, err)
	}
	defer ns.Close()
	if generation, err = r.cfg.Network.Change(ctx, sb.ID, p, ns.NetNS); err != nil {
		return 0, err
	}
	rec := *sb.record()
	rec.Network = &p
	if err := writeRecord(r.dir(id), &rec); err != nil {
		return 0, dsec.E(dsec.Internal, op, string(id), err)
	}
	sb.Mu.Lock()
	sb.rec = &rec
	sb.Mu.Unlock()
	return generation, nil
}

// Egress implements runtime.Networker.
func (r *Runtime) Egress(ctx context.Context, id dsec.SandboxID) (dsec.Egress, error) {
	const op = "read egress of sandbox"
	sb, err := r.boxes.Live(op, id)
	if err != nil {
		return dsec.Egress{}, err
	}
	if r.cfg.Network == nil || !sb.record().Request.Spec.HasLink() {
		return dsec.Egress{Rows: []dsec.EgressRow{}}, nil
	}
	return r.cfg.Network.Egress(ctx, id)
}
