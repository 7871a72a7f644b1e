// Package nodeapi serves a node over the wire: control calls as NATS requests
// on node.<id>.<verb>, everything that is large, long or a stream over HTTP on
// a data listener, heartbeats, and the node's registration with its epoch. It
// holds no truth: all of that is in the node.Service it serves.
//
// While NATS is away the data listener goes on serving and the node's
// sandboxes run; registration and heartbeats begin again by themselves. The
// data listener believes a caller that shows the token of the registration,
// and takes the caller's word for whose project it acts for. Every call has a
// deadline; a stream lasts as long as its reader keeps reading.
package nodeapi

import (
	"context"
	"crypto/subtle"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/api/wire"
	"github.com/opendsec/dsec/internal/crew"
	"github.com/opendsec/dsec/node"
	"github.com/opendsec/dsec/runtime"
)

// Config of a Server. Layers and Doctor may be nil: their calls are then
// Unsupported.
type Config struct {
	Node    dsec.NodeID
	Service node.Service
	Inside  node.Inside
	Watcher node.Watcher
	Auditor node.Auditor // nil: Audit is Unsupported
	Layers  Layers
	Caller  node.Caller // nil: Call is Unsupported
	Doctor  func(ctx context.Context) []runtime.Report
	Metrics http.Handler // Prometheus text; nil: NotFound

	NATS     string // URL
	User     string
	Password string
	Creds    string // file, instead of user and password

	PortConns int // connections to ports of one sandbox at once; 0: 256

	Listener net.Listener // of the data connection; the Server closes it
	Address  string       // how the gateway reaches it: "unix:/path" or "tcp:host:port"
	Version  string
	Every    time.Duration // between heartbeats; 0 is 1 s
	Log      *slog.Logger
}

const (
	maxCalls      = 4096 // control calls at work; beyond it Unavailable
	headerWithin  = 10 * time.Second
	closeWithin   = 5 * time.Second
	reconnectWait = 250 * time.Millisecond
	tokenDigits   = 40
)

// errClosed is why what was in flight ended when the Server closed.
var errClosed = dsec.Errorf(dsec.Unavailable, "serve node", "", "agent is closing")

// Server serves one node until Close.
type Server struct {
	cfg   Config
	log   *slog.Logger
	token string
	verbs map[string]verb
	nc    *nats.Conn
	http  *http.Server
	calls chan struct{} // holds one element for each call at work

	ctx    context.Context
	cancel context.CancelCauseFunc
	crew   crew.Crew

	answers  answers
	owners   owners
	stdins   stdins
	sessions sessions
	conns    conns
}

// Open starts to serve. NATS may be away still.
func Open(cfg Config) (*Server, error) {
	if cfg.Every == 0 {
		cfg.Every = time.Second
	}
	if cfg.PortConns == 0 {
		cfg.PortConns = 256
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	s := &Server{cfg: cfg, log: cfg.Log, token: dsec.Random(tokenDigits), calls: make(chan struct{}, maxCalls)}
	s.ctx, s.cancel = context.WithCancelCause(context.Background())
	s.verbs = s.table()
	s.sessions.open = map[string]*session{}
	s.serveData()
	if err := s.connect(); err != nil {
		_ = s.Close()
		return nil, err
	}
	s.crew.Go(s.beat)
	return s, nil
}

func (s *Server) serveData() {
	s.http = &http.Server{
		Handler: s.authorize(s.mux()), ReadHeaderTimeout: headerWithin,
		BaseContext: func(net.Listener) context.Context { return s.ctx },
		ErrorLog:    slog.NewLogLogger(s.log.Handler(), slog.LevelWarn),
	}
	s.crew.Go(func() {
		if err := s.http.Serve(s.cfg.Listener); !errors.Is(err, http.ErrServerClosed) {
			s.log.Error("data listener ended", "err", err)
		}
	})
}

// authorize lets through who shows the token.
func (s *Server) authorize(next http.Handler) http.Handler {
	want := []byte("Bearer " + s.token)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if subtle.ConstantTimeCompare([]byte(r.Header.Get("Authorization")), want) != 1 {
			wire.WriteError(w, dsec.Errorf(dsec.Unauthenticated, "call node", string(s.cfg.Node), "wrong token"))
			return
		}
		next.ServeHTTP(w, r)
	})
}

func (s *Server) connect() error {
	opts := []nats.Option{nats.Name("dsec node " + string(s.cfg.Node)), nats.MaxReconnects(-1),
		nats.ReconnectWait(reconnectWait), nats.RetryOnFailedConnect(true), nats.CustomInboxPrefix(wire.Inbox(s.cfg.Node)),
		nats.IgnoreAuthErrorAbort(), nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			s.log.Warn("nats", "err", err)
		})}
	switch {
	case s.cfg.Creds != "":
		opts = append(opts, nats.UserCredentials(s.cfg.Creds))
	case s.cfg.User != "":
		opts = append(opts, nats.UserInfo(s.cfg.User, s.cfg.Password))
	}
	var err error
	if s.nc, err = nats.Connect(s.cfg.NATS, opts...); err != nil {
		return dsec.E(dsec.Unavailable, "connect to nats", s.cfg.NATS, err)
	}
	if _, err = s.nc.Subscribe(wire.Subject(s.cfg.Node, "*"), s.control); err != nil {
		return dsec.E(dsec.Unavailable, "subscribe", wire.Subject(s.cfg.Node, "*"), err)
	}
	return nil
}

// Close ends every call and stream in flight; no sandbox notices.
func (s *Server) Close() error {
	s.crew.Close()
	s.cancel(errClosed)
	if s.nc != nil {
		s.nc.Close()
	}
	ctx, stop := context.WithTimeout(context.Background(), closeWithin)
	defer stop()
	err := s.http.Shutdown(ctx)
	if err != nil {
		err = s.http.Close()
	}
	s.crew.Wait()
	return err
}
