package gateway

import (
	"context"
	"net/http"
	"strings"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/api/wire"
	"github.com/opendsec/dsec/iam"
)

type principalKey struct{}

// authenticated lets known callers through.
func (g *Gateway) authenticated(next http.Handler) http.Handler {
	errs := connect.NewErrorWriter()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p, err := g.identify(r)
		a := requestOf(r.Context())
		if err != nil {
			a.class = dsec.ClassOf(err)
			_ = errs.Write(w, r, wire.ConnectError(err)) // the caller went away
			return
		}
		a.who = p.Name
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), principalKey{}, p)))
	})
}

// identify: a key that is shown decides, also on the unix socket; without one
// the uid does. Authorization that is no key of ours is for the port of a
// sandbox.
func (g *Gateway) identify(r *http.Request) (iam.Principal, error) {
	if secret := shown(r.Header); iam.LooksLikeKey(secret) {
		return g.cfg.Keys.Authenticate(r.Context(), secret)
	}
	if peer, ok := r.Context().Value(peerKey{}).(iam.Peer); ok {
		return g.cfg.Local.Identify(peer)
	}
	return iam.Principal{}, dsec.Errorf(dsec.Unauthenticated, "authenticate", "", "no valid API key")
}

const keyHeader = "X-Api-Key"

// shown returns the key of a request. Authorization may hold something that is
// meant for a port of a sandbox when the key is in its own header.
func shown(h http.Header) string {
	if k := h.Get(keyHeader); k != "" {
		return k
	}
	scheme, secret, _ := strings.Cut(h.Get("Authorization"), " ")
	if strings.EqualFold(scheme, "Bearer") {
		return strings.TrimSpace(secret)
	}
	return ""
}

// hide removes our keys from what is passed on to a sandbox.
func hide(h http.Header) {
	_, secret, _ := strings.Cut(h.Get("Authorization"), " ")
	if iam.LooksLikeKey(strings.TrimSpace(secret)) {
		h.Del("Authorization")
	}
	h.Del(keyHeader)
}

func principal(ctx context.Context) iam.Principal {
	p, _ := ctx.Value(principalKey{}).(iam.Principal)
	return p
}

// scope is the project a call is limited to: none for admins.
func scope(ctx context.Context) string {
	p := principal(ctx)
	if p.Role == iam.Admin {
		return ""
	}
	return p.Project
}

func admin(ctx context.Context, op string) error {
	if p := principal(ctx); p.Role != iam.Admin {
		return dsec.Errorf(dsec.PermissionDenied, op, p.Name, "needs the role admin")
	}
	return nil
}

// errorMapping turns every error into one with class and detail.
type errorMapping struct{ g *Gateway }

func (m errorMapping) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		resp, err := next(ctx, req)
		return resp, m.mapped(ctx, err)
	}
}

func (errorMapping) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

func (m errorMapping) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		return m.mapped(ctx, next(ctx, conn))
	}
}

// mapped leaves alone what the library says about its own wire. What is cut
// short because the gateway ends was not canceled by its caller.
func (m errorMapping) mapped(ctx context.Context, err error) error {
	if m.g.ctx.Err() != nil && dsec.ClassOf(err) == dsec.Canceled {
		err = errClosed
	}
	if err == nil {
		return nil
	}
	a := requestOf(ctx)
	if own, ok := err.(*connect.Error); ok {
		a.class = dsec.ClassOf(wire.FromConnect("", own))
		return err
	}
	a.class = dsec.ClassOf(err)
	return wire.ConnectError(err)
}
