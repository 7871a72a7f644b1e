package gateway

import (
	"context"
	"encoding/hex"
	"net"
	"net/http"
	"net/http/httputil"
	"strconv"
	"strings"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/api/wire"
)

const portIdle = 30 * time.Second

// place is a port of a sandbox as one project sees it, written as the host
// name by which the transport keeps connections apart.
type place struct {
	sandbox string
	port    uint16
	scope   string
}

func (p place) host() string {
	return strconv.Itoa(int(p.port)) + "." + p.sandbox + ".p" + hex.EncodeToString([]byte(p.scope))
}

func parsePlace(host string) (place, error) {
	part := strings.Split(host, ".")
	if len(part) != 3 || !strings.HasPrefix(part[2], "p") {
		return place{}, dsec.Errorf(dsec.Internal, "dial port", host, "no place")
	}
	port, err := parsePort(part[0])
	if err != nil {
		return place{}, err
	}
	scope, err := hex.DecodeString(part[2][1:])
	if err != nil {
		return place{}, dsec.E(dsec.Internal, "dial port", host, err)
	}
	return place{part[1], port, string(scope)}, nil
}

func parsePort(s string) (uint16, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil || n == 0 {
		return 0, dsec.Errorf(dsec.Invalid, "parse port", dsec.Quote(s), "want 1 to 65535")
	}
	return uint16(n), nil
}

// portTransport dials nothing but ports of sandboxes.
func (g *Gateway) portTransport() *http.Transport {
	return &http.Transport{
		DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
			host, _, err := net.SplitHostPort(addr)
			if err != nil {
				return nil, err
			}
			p, err := parsePlace(host)
			if err != nil {
				return nil, err
			}
			return g.cfg.Cluster.Tunnel(ctx, p.scope, p.sandbox, p.port)
		},
		DisableCompression: true, IdleConnTimeout: portIdle, MaxIdleConnsPerHost: 16,
	}
}

func (g *Gateway) place(r *http.Request) (place, error) {
	id, _, err := dsec.ParseSandboxID(r.PathValue("id"))
	if err != nil {
		return place{}, err
	}
	port, err := parsePort(r.PathValue("port"))
	return place{string(id), port, scope(r.Context())}, err
}

// port passes HTTP and WebSocket on to a port of a sandbox. The server there
// sees the path below ports/{port}, localhost as its name, and no key of ours.
func (g *Gateway) port(w http.ResponseWriter, r *http.Request) error {
	p, err := g.place(r)
	if err != nil {
		return err
	}
	prefix := "/v1/sandboxes/" + r.PathValue("id") + "/ports/" + r.PathValue("port")
	proxy := &httputil.ReverseProxy{
		Rewrite: func(pr *httputil.ProxyRequest) {
			u := *pr.In.URL
			u.Scheme, u.Host = "http", p.host()
			u.Path = strings.TrimPrefix(pr.In.URL.Path, prefix)
			u.RawPath = strings.TrimPrefix(pr.In.URL.EscapedPath(), prefix)
			pr.Out.URL = &u
			pr.Out.Host = "localhost:" + strconv.Itoa(int(p.port))
			pr.Out.Header.Set("X-Forwarded-Prefix", prefix)
			hide(pr.Out.Header)
		},
		Transport: g.ports, FlushInterval: -1,
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, err error) {
			refuse(w, r, wire.FromConnect("reach port "+strconv.Itoa(int(p.port))+" of "+p.sandbox, err))
		},
	}
	proxy.ServeHTTP(w, r)
	return nil
}

// tunnel turns the connection into a byte stream to a port.
func (g *Gateway) tunnel(w http.ResponseWriter, r *http.Request) error {
	p, err := g.place(r)
	if err != nil {
		return err
	}
	if !strings.EqualFold(r.Header.Get("Upgrade"), wire.TunnelProtocol) || r.ProtoMajor != 1 {
		return dsec.Errorf(dsec.Invalid, "open tunnel", p.sandbox, "want HTTP/1.1 with Upgrade: %s", wire.TunnelProtocol)
	}
	in, err := g.cfg.Cluster.Tunnel(r.Context(), p.scope, p.sandbox, p.port)
	if err != nil {
		return err
	}
	out, err := wire.Accept(w)
	if err != nil {
		_ = in.Close()
		return nil // the client went away
	}
	stop := context.AfterFunc(g.ctx, func() {
		_ = in.Close()
		_ = out.Close()
	})
	defer stop()
	if g.tunnels.Join() {
		defer g.tunnels.Leave()
	}
	wire.Splice(out, in)
	return nil
}
