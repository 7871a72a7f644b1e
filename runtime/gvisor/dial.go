package gvisor

import (
	"context"
	"net"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/runtime/gvisor/inside"
)

// Dial connects to a port of the sandbox's loopback, IPv4 first. A process inside, which
// has no rights, passes the bytes.
func (r *Runtime) Dial(ctx context.Context, id dsec.SandboxID, port uint16) (net.Conn, error) {
	const op = "connect to sandbox"
	sb, err := r.boxes.Live(op, id)
	if err != nil {
		return nil, err
	}
	if sb.IsPaused() {
		return nil, dsec.Errorf(dsec.IllegalState, op, string(id), "the sandbox is paused")
	}
	c, err := r.dial(ctx, sb, name(id), inside.Service{Port: port})
	if err != nil {
		if ctx.Err() != nil {
			return nil, dsec.E(dsec.ClassOf(ctx.Err()), op, string(id), context.Cause(ctx))
		}
		return nil, explain(op, sb, dsec.Errorf(dsec.Unavailable, op, string(id), "port %d: %w", port, err))
	}
	return c, nil
}
