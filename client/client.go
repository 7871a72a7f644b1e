// Package client is the Go client of dsec, the only Go interface that is
// promised to stay as it is. It speaks the API of api/dsec/v1 in the types of
// package dsec and of the contracts process, files, layer and runtime.
//
// Errors are *dsec.Error; decide on dsec.ClassOf(err). ResultOf(err) tells how
// the sandbox ended, where an error says it is gone. Calls that change
// something carry a key, made here if the caller gave none, and are repeated
// with it when the platform was away; a Timeout means that the outcome is
// unknown. Every method ends when its context does. A Client may be used
// concurrently and holds few connections.
package client

import (
	"context"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/api/dsec/v1/dsecv1connect"
	"github.com/opendsec/dsec/api/wire"
	"github.com/opendsec/dsec/internal/within"
)

// Config of a Client.
type Config struct {
	URL     string       // "unix:///run/dsec/dsec.sock", "http://127.0.0.1:7423", "https://…"
	Key     string       // API key; may be empty on a unix socket
	Retries int          // of a call while the platform is away; 0 is 3, negative none
	HTTP    *http.Client // for URLs that are no socket; nil: a new one
	// Silence is how long a stream may say nothing, and a transfer stand still,
	// before the connection counts as broken; the server says something every
	// 10 s. 0 is 30 s.
	Silence time.Duration
}

const (
	retries     = 3
	firstPause  = 50 * time.Millisecond
	mostConns   = 32
	dialWithin  = 10 * time.Second
	idleTimeout = 90 * time.Second
	maxMessage  = 64 << 20
)

// Client talks to one gateway.
type Client struct {
	base    *url.URL
	key     string
	retries int
	silence time.Duration
	http    *http.Client
	dial    func(ctx context.Context) (net.Conn, error)

	sandboxes dsecv1connect.SandboxesClient
	functions dsecv1connect.FunctionsClient
	commands  dsecv1connect.CommandsClient
	events    dsecv1connect.EventsClient
	files     dsecv1connect.FilesClient
	layers    dsecv1connect.LayersClient
	screens   dsecv1connect.ScreensClient
	system    dsecv1connect.SystemClient
	keys      dsecv1connect.KeysClient
}

// New makes a client; it does not connect yet.
func New(cfg Config) (*Client, error) {
	u, err := url.Parse(cfg.URL)
	if err != nil || cfg.URL == "" {
		return nil, dsec.Errorf(dsec.Invalid, "make client", dsec.Quote(cfg.URL), "not a URL")
	}
	c := &Client{base: u, key: cfg.Key, retries: cfg.Retries, http: cfg.HTTP}
	if c.retries == 0 {
		c.retries = retries
	}
	if c.silence = cfg.Silence; c.silence == 0 {
		c.silence = silence
	}
	d := &net.Dialer{Timeout: dialWithin}
	network, address := "tcp", u.Host
	switch u.Scheme {
	case "unix":
		network, address = "unix", u.Path
		c.base = &url.URL{Scheme: "http", Host: "dsec"}
		c.http = nil
	case "http", "https":
		c.base = &url.URL{Scheme: u.Scheme, Host: u.Host}
		if u.Port() == "" {
			address = net.JoinHostPort(u.Hostname(), map[string]string{"http": "80", "https": "443"}[u.Scheme])
		}
	default:
		return nil, dsec.Errorf(dsec.Invalid, "make client", dsec.Quote(cfg.URL), "want unix, http or https")
	}
	c.dial = func(ctx context.Context) (net.Conn, error) { return d.DialContext(ctx, network, address) }
	if c.http == nil {
		c.http = &http.Client{Transport: c.transport(network == "unix")}
	}
	c.services()
	return c, nil
}

func (c *Client) transport(local bool) *http.Transport {
	t := &http.Transport{MaxIdleConnsPerHost: mostConns, IdleConnTimeout: idleTimeout, DisableCompression: true,
		WriteBufferSize: 64 << 10, ReadBufferSize: 64 << 10, Proxy: http.ProxyFromEnvironment}
	if local {
		t.Proxy = nil
		t.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) { return c.dial(ctx) }
	}
	return t
}

func (c *Client) services() {
	base := strings.TrimSuffix(c.base.String(), "/")
	opts := []connect.ClientOption{connect.WithInterceptors(auth{c.key}), connect.WithReadMaxBytes(maxMessage),
		connect.WithAcceptCompression("gzip", nil, nil)}
	c.sandboxes = dsecv1connect.NewSandboxesClient(c.http, base, opts...)
	c.commands = dsecv1connect.NewCommandsClient(c.http, base, opts...)
	c.events = dsecv1connect.NewEventsClient(c.http, base, opts...)
	c.files = dsecv1connect.NewFilesClient(c.http, base, opts...)
	c.functions = dsecv1connect.NewFunctionsClient(c.http, base, opts...)
	c.layers = dsecv1connect.NewLayersClient(c.http, base, opts...)
	c.screens = dsecv1connect.NewScreensClient(c.http, base, opts...)
	c.system = dsecv1connect.NewSystemClient(c.http, base, opts...)
	c.keys = dsecv1connect.NewKeysClient(c.http, base, opts...)
}

// Close lets idle connections go.
func (c *Client) Close() error {
	c.http.CloseIdleConnections()
	return nil
}

// ResultOf returns how the sandbox ended that err tells of, or nil.
func ResultOf(err error) *dsec.Result { return wire.ResultOf(err) }

// auth shows the key, and gives calls a deadline whose callers set none.
type auth struct{ key string }

const callWithin = 2 * time.Minute

// longCalls may take longer than others.
var longCalls = map[string]time.Duration{
	dsecv1connect.SandboxesCreateProcedure: 6 * time.Minute, dsecv1connect.SandboxesStartProcedure: 6 * time.Minute,
	dsecv1connect.SandboxesStopProcedure: 6 * time.Minute, dsecv1connect.SandboxesDeleteProcedure: 6 * time.Minute,
	dsecv1connect.SandboxesCommitProcedure: 31 * time.Minute, dsecv1connect.SandboxesGradeProcedure: 31 * time.Minute, dsecv1connect.CommandsExecProcedure: 11 * time.Minute,
	dsecv1connect.FunctionsCallProcedure: 31 * time.Minute,
	dsecv1connect.ScreensActProcedure:    11 * time.Minute, dsecv1connect.ScreensMarkProcedure: 11 * time.Minute, dsecv1connect.ScreensRevertProcedure: 11 * time.Minute,
}

func (a auth) set(h http.Header) {
	if a.key != "" {
		h.Set("Authorization", "Bearer "+a.key)
	}
}

func (a auth) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		a.set(req.Header())
		if _, ok := ctx.Deadline(); !ok {
			d := callWithin
			if long, ok := longCalls[req.Spec().Procedure]; ok {
				d = long
			}
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, d)
			defer cancel()
		}
		return next(ctx, req)
	}
}

func (a auth) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, spec connect.Spec) connect.StreamingClientConn {
		conn := next(ctx, spec)
		a.set(conn.RequestHeader())
		return conn
	}
}

func (a auth) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

// retry repeats a call that is safe to repeat while the platform is away or
// full.
func (c *Client) retry(ctx context.Context, op string, fn func() error) error {
	pause := firstPause
	for try := 0; ; try++ {
		err := wire.FromConnect(op, fn())
		if err == nil || try >= c.retries || dsec.ClassOf(err) != dsec.Unavailable {
			return err
		}
		if within.Sleep(ctx, pause) != nil {
			return err
		}
		pause *= 4
	}
}

// newKey makes an idempotency key.
func newKey() string { return "c" + dsec.Random(24) }
