package gateway

import (
	"context"
	"log/slog"
	"net/http"
	"regexp"
	"strings"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/api/wire"
)

// requestHeader carries the id of a request: the caller's own, or one that was
// made. The answer has it, and the access log.
const requestHeader = "X-Request-Id"

var requestID = regexp.MustCompile(`^[A-Za-z0-9._-]{1,64}$`)

// request is what is known of a request beside HTTP: handlers add to it.
type request struct {
	id      string
	pattern string // of its route
	begun   time.Time
	who     string     // name of the principal: "key:" and the id of a key, or "uid:"
	class   dsec.Class // of the error that was answered; "": none
}

type requestKey struct{}

// arrived gives a request its id, and a place for what is to be logged.
func arrived(w http.ResponseWriter, r *http.Request, pattern string) (*request, *http.Request) {
	a := &request{id: r.Header.Get(requestHeader), pattern: pattern, begun: time.Now()}
	if !requestID.MatchString(a.id) {
		a.id = dsec.Random(20)
	}
	w.Header().Set(requestHeader, a.id)
	return a, r.WithContext(context.WithValue(r.Context(), requestKey{}, a))
}

func requestOf(ctx context.Context) *request {
	if a, ok := ctx.Value(requestKey{}).(*request); ok {
		return a
	}
	return &request{}
}

// refuse answers with an error.
func refuse(w http.ResponseWriter, r *http.Request, err error) {
	requestOf(r.Context()).class = dsec.ClassOf(err)
	wire.WriteError(w, err)
}

// logAccess writes the line of a request that was answered. Paths are logged as
// their pattern, and no query and no header is: all may hold secrets of what
// runs in a sandbox, and headers ours.
func (g *Gateway) logAccess(a *request, r *http.Request, rec *recorder, aborted bool) {
	if g.cfg.Access == nil || a.class == "" && health(a.pattern) {
		return // asked every second
	}
	status := rec.status
	switch {
	case status != 0:
	case r.Header.Get("Upgrade") != "":
		status = http.StatusSwitchingProtocols // by whoever took the connection over
	default:
		status = http.StatusOK
	}
	code := "ok"
	switch {
	case a.class != "":
		code = string(a.class)
	case aborted:
		code = "aborted"
	case status >= 400: // of the library, or of a server in a sandbox
		code = "http"
	}
	attrs := []slog.Attr{slog.String("request", a.id), slog.String("who", a.who), slog.String("method", method(r, a.pattern)),
		slog.String("code", code), slog.Int("status", status), slog.Float64("took", time.Since(a.begun).Seconds()), slog.Int64("bytes", rec.bytes)}
	if _, _, err := dsec.ParseSandboxID(r.PathValue("id")); err == nil {
		attrs = append(attrs, slog.String("sandbox", r.PathValue("id")))
	}
	g.cfg.Access.LogAttrs(r.Context(), slog.LevelInfo, "request", attrs...)
}

// method names what was called: of a service its method, else HTTP's with the
// pattern of the path.
func method(r *http.Request, pattern string) string {
	name := route(pattern, r.URL.Path)
	if strings.HasPrefix(pattern, "/dsec.v1.") || strings.Contains(name, " ") {
		return name
	}
	m := r.Method
	if len(m) > 16 {
		m = m[:16]
	}
	return m + " " + name
}
