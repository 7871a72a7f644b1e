package client

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/api/wire"
)

// Dial connects to a port inside a sandbox, whatever its network mode.
// Unavailable: nothing listens there.
func (c *Client) Dial(ctx context.Context, id dsec.SandboxID, port uint16) (net.Conn, error) {
	op := fmt.Sprintf("dial port %d", port)
	conn, err := c.dial(ctx)
	if err != nil {
		return nil, dsec.E(dsec.Unavailable, op, string(id), err)
	}
	if c.base.Scheme == "https" {
		conn = tls.Client(conn, &tls.Config{ServerName: c.base.Hostname(), MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}})
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	req, err := http.NewRequest(http.MethodGet, fmt.Sprintf("%s%s/tunnel/%d", c.base, sandboxPath(id), port), nil)
	if err != nil {
		return nil, dsec.E(dsec.Invalid, op, string(id), err)
	}
	auth{c.key}.set(req.Header)
	up, err := wire.Upgrade(conn, req)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		_ = conn.Close()
		return nil, wire.FromConnect(op, err)
	}
	return up, nil
}
