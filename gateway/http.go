package gateway

import (
	"net"
	"net/http"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/api/dsec/v1/dsecv1connect"
	"github.com/opendsec/dsec/api/wire"
)

// handler is every route, from the outside in: log and metrics, host check,
// bound of what is at work, identity, service.
func (g *Gateway) handler() http.Handler {
	m := http.NewServeMux()
	one := g.connectOptions(maxMessage)
	many := g.connectOptions(maxBatch)
	mount := func(path string, h http.Handler) { m.Handle(path, g.authenticated(h)) }
	mount(dsecv1connect.NewSandboxesHandler(&sandboxes{g}, many...))
	mount(dsecv1connect.NewCommandsHandler(&commands{g}, one...))
	mount(dsecv1connect.NewEventsHandler(&events{g}, one...))
	mount(dsecv1connect.NewFilesHandler(&fileService{g}, one...))
	mount(dsecv1connect.NewLayersHandler(&layers{g}, one...))
	mount(dsecv1connect.NewFunctionsHandler(&functions{g}, many...))
	mount(dsecv1connect.NewScreensHandler(&screens{g}, one...))
	mount(dsecv1connect.NewSystemHandler(&system{g}, one...))
	mount(dsecv1connect.NewKeysHandler(&keys{g}, one...))
	for pattern, fn := range g.raw() {
		m.Handle(pattern, g.authenticated(rawHandler(fn)))
	}
	m.HandleFunc("GET /healthz", g.healthz)
	m.HandleFunc("GET /readyz", g.readyz)
	m.Handle("GET /metrics", g.authenticated(g.metrics.handler()))
	m.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		refuse(w, r, dsec.Errorf(dsec.NotFound, "route", r.URL.Path, "no such endpoint"))
	})
	return g.observe(g.hosts(g.bounded(m)), m)
}

// raw is every route of bytes, ports and tunnels.
func (g *Gateway) raw() map[string]func(http.ResponseWriter, *http.Request) error {
	return map[string]func(http.ResponseWriter, *http.Request) error{
		"GET /v1/sandboxes/{id}/files":              g.readFile,
		"PUT /v1/sandboxes/{id}/files":              g.writeFile,
		"GET /v1/sandboxes/{id}/tree":               g.downloadTree,
		"PUT /v1/sandboxes/{id}/tree":               g.uploadTree,
		"PUT /v1/sandboxes/{id}/execs/{exec}/stdin": g.feedStdin,
		"POST /v1/layers/upload":                    g.uploadLayer,
		"GET /v1/layers/export":                     g.exportImage,
		"GET /v1/sandboxes/{id}/tunnel/{port}":      g.tunnel,
		"/v1/sandboxes/{id}/ports/{port}/{rest...}": g.port,
		"GET /v1/nodes/{node}/metrics":              g.nodeMetrics,
	}
}

func (g *Gateway) connectOptions(most int) []connect.HandlerOption {
	return []connect.HandlerOption{
		connect.WithCodec(wire.JSON{}), connect.WithReadMaxBytes(most), connect.WithInterceptors(errorMapping{g}, checking{}),
		connect.WithCompression("gzip", nil, nil), // most callers are on this machine
	}
}

// rawHandler writes the error of a handler that has not answered yet.
func rawHandler(fn func(http.ResponseWriter, *http.Request) error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := fn(w, r); err != nil {
			refuse(w, r, err)
		}
	})
}

// hosts refuses what is meant for another machine: requests of a client that
// takes the gateway for a proxy, and names that were made to resolve to us.
func (g *Gateway) hosts(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodConnect || r.URL.Host != "" || !g.ours(r.Host) {
			refuse(w, r, dsec.Errorf(dsec.PermissionDenied, "route", dsec.Quote(r.Host), "this is no proxy, and no name of this gateway"))
			return
		}
		next.ServeHTTP(w, r)
	})
}

// bounded refuses what is too much at once.
func (g *Gateway) bounded(next http.Handler) http.Handler {
	if g.cfg.MaxInFlight <= 0 {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n := g.atWork.Add(1)
		defer g.atWork.Add(-1)
		if n > int64(g.cfg.MaxInFlight) && !health(requestOf(r.Context()).pattern) {
			refuse(w, r, dsec.Errorf(dsec.ResourceExhausted, "serve", "", "%d requests are at work, the most there may be", g.cfg.MaxInFlight))
			return
		}
		next.ServeHTTP(w, r)
	})
}

func health(pattern string) bool { return pattern == "GET /healthz" || pattern == "GET /readyz" }

func (g *Gateway) ours(host string) bool {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	host = strings.ToLower(strings.Trim(host, "[]"))
	if ip := net.ParseIP(host); ip != nil && ip.IsLoopback() {
		return true
	}
	return host == "localhost" || host == "dsec" || slices.Contains(g.cfg.Hosts, host)
}

// observe logs and counts each request, bounds slow clients and keeps a panic
// from taking more than its request.
func (g *Gateway) observe(next http.Handler, routes *http.ServeMux) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		rec := &recorder{ResponseWriter: w, rc: http.NewResponseController(w)}
		_, pattern := routes.Handler(r)
		a, r := arrived(w, r, pattern)
		defer func() {
			p := recover()
			if p != nil && p != http.ErrAbortHandler {
				g.log.Error("panic", "request", a.id, "method", method(r, pattern), "value", p, "stack", string(debug.Stack()))
				p = http.ErrAbortHandler
			}
			g.metrics.request(route(pattern, r.URL.Path), rec.status, time.Since(a.begun))
			g.logAccess(a, r, rec, p != nil)
			if p != nil {
				panic(p)
			}
		}()
		next.ServeHTTP(rec, r)
	})
}

// route names a request in metrics: of a service its method, else the pattern,
// so that the set is bounded.
func route(pattern, path string) string {
	if strings.HasPrefix(pattern, "/dsec.v1.") && strings.Count(path, "/") == 2 && knownMethod(path) {
		return path
	}
	return pattern
}

func knownMethod(path string) bool {
	_, method, _ := strings.Cut(path[1:], "/")
	return slices.Contains(methods, method)
}

var methods = []string{"Create", "CreateMany", "Get", "List", "Start", "Stop", "Delete", "Pause", "Resume", "Fork", "Checkpoint", "FindCheckpoint", "Renew", "SetNetwork", "Egress", "SetPhase",
	"Commit", "Changes", "Stats", "Audit", "Findings", "Grade", "Call", "Exec", "WriteStdin", "CloseStdin", "Signal", "Kill", "Resize", "Wait", "Output", "Kept", "Release",
	"Open", "Subscribe", "Unsubscribe", "Ack", "Stat", "Mkdir", "Move", "Remove", "SetAttr", "Watch", "Import", "Build",
	"Inspect", "Tag", "Ensure", "CreateTemplate", "Merge", "Trace", "Repack", "Evict", "OnDemand", "Info", "Nodes", "Doctor", "Revoke", "Screenshot", "Act", "Console", "Power", "Mark", "Revert", "Marks"}

// recorder notes what is answered, and gives each write its own deadline: a
// client that takes nothing for that long is cut off.
type recorder struct {
	http.ResponseWriter
	rc     *http.ResponseController
	status int
	bytes  int64
}

func (r *recorder) WriteHeader(code int) {
	r.status = code
	r.ResponseWriter.WriteHeader(code)
}

func (r *recorder) Write(p []byte) (int, error) {
	if r.status == 0 {
		r.status = http.StatusOK
	}
	_ = r.rc.SetWriteDeadline(time.Now().Add(stall)) // HTTP/2 and HTTP/1 both can
	n, err := r.ResponseWriter.Write(p)
	_ = r.rc.SetWriteDeadline(time.Time{}) // HTTP/2 resets idle streams whose deadline passed
	r.bytes += int64(n)
	return n, err
}

// Flush is what streaming handlers look for.
func (r *recorder) Flush() {
	_ = r.rc.SetWriteDeadline(time.Now().Add(stall))
	_ = r.rc.Flush() // a client that left is seen at the next write
	_ = r.rc.SetWriteDeadline(time.Time{})
}

// Unwrap gives http.ResponseController the connection.
func (r *recorder) Unwrap() http.ResponseWriter { return r.ResponseWriter }

func (g *Gateway) healthz(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("ok\n")) }

// readyz: a node that takes sandboxes is there.
func (g *Gateway) readyz(w http.ResponseWriter, r *http.Request) {
	for _, n := range g.cfg.Cluster.Nodes() {
		if n.Alive && !n.Draining {
			_, _ = w.Write([]byte("ok\n"))
			return
		}
	}
	refuse(w, r, dsec.Errorf(dsec.Unavailable, "serve", "", "no node takes sandboxes"))
}
