package gateway

import (
	"context"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec/api/wire"
)

// checking holds every request message against the caps of package wire, before
// any method sees it. The node does the same again.
type checking struct{}

func (checking) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		if m, ok := req.Any().(proto.Message); ok {
			if err := wire.Check(m); err != nil {
				return nil, err
			}
		}
		return next(ctx, req)
	}
}

func (checking) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

func (checking) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		return next(ctx, &checkedConn{conn})
	}
}

// checkedConn checks what it receives.
type checkedConn struct{ connect.StreamingHandlerConn }

func (c *checkedConn) Receive(msg any) error {
	if err := c.StreamingHandlerConn.Receive(msg); err != nil {
		return err
	}
	if m, ok := msg.(proto.Message); ok {
		return wire.Check(m)
	}
	return nil
}
