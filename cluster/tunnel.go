package cluster

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/api/wire"
)

// Tunnel opens a byte stream to a port of a sandbox.
func (c *Cluster) Tunnel(ctx context.Context, project, sandbox string, port uint16) (net.Conn, error) {
	id := dsec.SandboxID(sandbox).Node()
	_, reg, _, err := c.reach(id)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, callWithin)
	defer cancel()
	network, address, _ := strings.Cut(reg.Address, ":")
	conn, err := (&net.Dialer{Timeout: dialWithin}).DialContext(ctx, network, address)
	if err != nil {
		return nil, callError(ctx, id, "tunnel", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	req, err := http.NewRequest(http.MethodGet, fmt.Sprintf("http://node%s%s/tunnel/%d", wire.PathSandbox, sandbox, port), nil)
	if err != nil {
		return nil, dsec.E(dsec.Internal, "open tunnel", sandbox, err)
	}
	req.Header.Set("Authorization", "Bearer "+reg.Token)
	req.Header.Set(wire.HeaderProject, project)
	up, err := wire.Upgrade(conn, req)
	if !stop() && err == nil {
		_ = up.Close()
		err = ctx.Err()
	}
	if err != nil {
		_ = conn.Close()
		return nil, callError(ctx, id, "tunnel", err)
	}
	return up, nil
}
