// Package mirror serves packages to sandboxes: PyPI, npm and Go modules as they
// were at a cut-off time, and Debian as it is. It is read-only, speaks plain HTTP
// under names of its own (pypi.mirror.dsec), and looks into nobody's TLS.
//
// What it promises: of the first three services a sandbox with a cut-off time sees
// no version, and gets no byte of a file, that its index does not date at or before
// that time, however it asks; nor of a name that is denied to it. A file whose
// digest the index has reaches nobody as a success unless it matches. Nothing of a
// request goes upstream but which thing is asked for.
//
// docs/formats/mirror.md says what each service offers, and how the cache is kept.
// A Mirror is one http.Handler; its methods may be called at one time.
package mirror

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/netpolicy"
)

// Access is what one sandbox may have.
type Access struct {
	Services []string            // names of dsec.Mirrors
	Cutoff   time.Time           // what is newer is hidden; zero: nothing is
	Deny     map[string][]string // names of packages, by service
}

// Upstreams are base URLs; an empty one: that service is not offered.
type Upstreams struct {
	PyPI           string // below which is simple/
	NPM            string // a registry
	Go             string // a module proxy
	SumDB          string // its checksum database, whose name is the host
	Debian         string // below which is dists/
	DebianSecurity string // below which is dists/
}

// Config of a Mirror. Zero means the default; New fills it in.
type Config struct {
	Upstreams  Upstreams
	Hosts      []string                                                          // besides those of Upstreams, that files and redirects may lead to: "files.pythonhosted.org"
	Dir        string                                                            // of the cache; it is made, and must be this user's alone
	MaxBytes   int64                                                             // of the cache; 10 GiB
	MaxIndex   int64                                                             // bytes of an index, unpacked; 64 MiB
	MaxFile    int64                                                             // bytes of a file; 4 GiB
	Fresh      time.Duration                                                     // for which an index is not asked for again; 10 min
	Stale      time.Duration                                                     // for which it is served while upstream is away; 7 days
	HeaderWait time.Duration                                                     // until upstream begins to answer; 30 s
	BodyWait   time.Duration                                                     // for upstream's next byte; 30 s
	PerSandbox int                                                               // requests of one at once; 64
	Lookup     func(from netip.Addr) (Access, bool)                              // whose address it is
	Dial       func(ctx context.Context, network, addr string) (net.Conn, error) // where the outside is; nil: here
	Log        *slog.Logger
}

func (c *Config) fill() {
	setDefault(&c.MaxBytes, 10<<30)
	setDefault(&c.MaxIndex, 64<<20)
	setDefault(&c.MaxFile, 4<<30)
	setDefault(&c.Fresh, 10*time.Minute)
	setDefault(&c.Stale, 7*24*time.Hour)
	setDefault(&c.HeaderWait, 30*time.Second)
	setDefault(&c.BodyWait, 30*time.Second)
	setDefault(&c.PerSandbox, 64)
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
}

func setDefault[T comparable](v *T, def T) {
	var zero T
	if *v == zero {
		*v = def
	}
}

// Stats count since New.
type Stats struct {
	Requests  int64 // that were answered, however
	Refused   int64 // of them: not for this sandbox, or too many at once
	Hidden    int64 // of them: newer than the cut-off, or not there
	Hits      int64 // things from the cache
	Misses    int64 // things from upstream
	Stale     int64 // indexes from the cache because upstream was away
	Errors    int64 // of upstream
	Corrupt   int64 // entries of the cache and files of upstream that were not what they are to be
	CacheSize int64 // bytes, now
}

// Mirror is an http.Handler.
type Mirror struct {
	c      Config
	ctx    context.Context
	cancel context.CancelFunc
	work   sync.WaitGroup
	up     *http.Client
	bases  map[string]*url.URL // of the upstreams, by name
	hosts  map[string]string   // that may be asked, with their scheme
	cache  *cache
	parses chan struct{} // places for indexes that are worked on

	mu        sync.Mutex
	stats     Stats
	own       map[netip.Addr]*sandbox
	told      time.Time // when something was last logged
	documents map[string]*fetching
	files     map[string]*download
}

// parsesAtOnce bounds memory: an index may have MaxIndex bytes.
const parsesAtOnce = 4

// New opens the cache. Invalid for a configuration that cannot work.
func New(c Config) (*Mirror, error) {
	const op = "open mirror"
	c.fill()
	if c.Lookup == nil {
		return nil, dsec.Errorf(dsec.Invalid, op, "lookup", "is required")
	}
	m := &Mirror{c: c, bases: map[string]*url.URL{}, hosts: map[string]string{}, parses: make(chan struct{}, parsesAtOnce),
		own: map[netip.Addr]*sandbox{}, documents: map[string]*fetching{}, files: map[string]*download{}}
	if err := m.upstreams(); err != nil {
		return nil, dsec.E(dsec.Invalid, op, "upstreams", err)
	}
	var err error
	if m.cache, err = openCache(c.Dir, c.MaxBytes); err != nil {
		return nil, dsec.E(dsec.ClassOf(err), op, c.Dir, err)
	}
	m.ctx, m.cancel = context.WithCancel(context.Background())
	m.up = m.client()
	return m, nil
}

// upstreams reads base URLs. Only their hosts, and those of c.Hosts by TLS, are asked.
func (m *Mirror) upstreams() error {
	u := m.c.Upstreams
	for _, h := range m.c.Hosts {
		m.hosts[strings.ToLower(h)] = "https"
	}
	for name, base := range map[string]string{"pypi": u.PyPI, "npm": u.NPM, "go": u.Go, "sumdb": u.SumDB, "debian": u.Debian, "debian-security": u.DebianSecurity} {
		if base == "" {
			continue
		}
		b, err := url.Parse(strings.TrimSuffix(base, "/"))
		if err != nil {
			return err
		}
		if b.Scheme != "http" && b.Scheme != "https" || b.Host == "" || b.RawQuery != "" || b.User != nil {
			return dsec.Errorf(dsec.Invalid, "read upstream", name, "%s is not http(s)://host/path", dsec.Quote(base))
		}
		m.bases[name], m.hosts[strings.ToLower(b.Host)] = b, b.Scheme
	}
	return nil
}

// Close ends what is at work, when no request is any more. The cache stays.
func (m *Mirror) Close() error {
	m.cancel()
	m.work.Wait()
	m.up.CloseIdleConnections()
	return nil
}

// Stats so far.
func (m *Mirror) Stats() Stats {
	m.mu.Lock()
	defer m.mu.Unlock()
	s := m.stats
	s.CacheSize = m.cache.size()
	return s
}

func (m *Mirror) count(what *int64) {
	m.mu.Lock()
	*what++
	m.mu.Unlock()
}

// request is one that may be answered.
type request struct {
	w      http.ResponseWriter
	r      *http.Request
	host   string // as it was asked for, with a port if it had one
	path   string // canonical, without the first slash
	access Access
	own    *sandbox
}

// sandbox is one that asks, or what it began goes on.
type sandbox struct {
	addr      netip.Addr
	requests  int
	goes      int           // what goes on upstream, whether it still waits or not
	indexes   chan struct{} // places for requests that hold an index
	documents chan struct{} // places for indexes that come from upstream
	files     chan struct{} // places for files that do
}

// filesAtOnce come from upstream because one sandbox has asked; others wait. Of
// indexes as many do as it may hold.
const filesAtOnce = 16

type ownKey struct{}

// place waits for one in which something is fetched because of the sandbox that
// asks, until leave is called: who goes away does not end it, and must not begin
// without end.
func (m *Mirror) place(ctx context.Context, of func(*sandbox) chan struct{}) (leave func(), err error) {
	own := ctx.Value(ownKey{}).(*sandbox)
	select {
	case of(own) <- struct{}{}:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	m.mu.Lock()
	own.goes++
	m.mu.Unlock()
	return func() {
		<-of(own)
		m.mu.Lock()
		own.goes--
		m.restLocked(own)
		m.mu.Unlock()
	}, nil
}

// indexesAtOnce of a sandbox are in memory; others wait.
const indexesAtOnce = 8

// hold waits for a place for an index, until leave is called.
func (q *request) hold() (leave func(), err error) {
	select {
	case q.own.indexes <- struct{}{}:
		return sync.OnceFunc(func() { <-q.own.indexes }), nil
	case <-q.r.Context().Done():
		return nil, q.r.Context().Err()
	}
}

// ServeHTTP implements http.Handler. The name that is asked for says the service.
func (m *Mirror) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	m.count(&m.stats.Requests)
	err := m.serve(w, r)
	if err == nil {
		return
	}
	if errors.Is(err, http.ErrAbortHandler) {
		panic(http.ErrAbortHandler) // the answer has begun, and must not end like a whole one
	}
	m.refuse(w, r, err)
}

func (m *Mirror) serve(w http.ResponseWriter, r *http.Request) error {
	const op = "serve packages"
	from, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return dsec.Errorf(dsec.PermissionDenied, op, "", "nobody's address")
	}
	addr := from.Addr().Unmap()
	access, ok := m.c.Lookup(addr)
	if !ok {
		return dsec.Errorf(dsec.PermissionDenied, op, addr.String(), "no sandbox has this address")
	}
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		w.Header().Set("Allow", "GET, HEAD")
		return dsec.Errorf(dsec.Unsupported, op, r.Method, "this mirror is read-only")
	}
	host, path, err := target(r)
	if err != nil {
		return err
	}
	service, _ := netpolicy.MirrorService(hostname(host))
	if !slices.Contains(access.Services, service) {
		return dsec.Errorf(dsec.PermissionDenied, op, dsec.Quote(host), "the policy of this sandbox does not open it")
	}
	own := m.begin(addr)
	if own == nil {
		return dsec.Errorf(dsec.ResourceExhausted, op, addr.String(), "more than %d requests at once", m.c.PerSandbox)
	}
	defer m.end(addr)
	q := &request{w, r.WithContext(context.WithValue(r.Context(), ownKey{}, own)), host, path, access, own}
	switch service {
	case "pypi":
		return m.pypi(q)
	case "npm":
		return m.npm(q)
	case "go":
		return m.goModules(q)
	case "debian":
		return m.debian(q)
	}
	return dsec.Errorf(dsec.NotFound, op, dsec.Quote(host), "no such service")
}

// begin takes a place for a request; nil: there is none.
func (m *Mirror) begin(a netip.Addr) *sandbox {
	m.mu.Lock()
	defer m.mu.Unlock()
	s := m.own[a]
	if s == nil {
		s = &sandbox{addr: a, indexes: make(chan struct{}, indexesAtOnce), documents: make(chan struct{}, indexesAtOnce), files: make(chan struct{}, filesAtOnce)}
		m.own[a] = s
	}
	if s.requests >= m.c.PerSandbox {
		return nil
	}
	s.requests++
	return s
}

func (m *Mirror) end(a netip.Addr) {
	m.mu.Lock()
	defer m.mu.Unlock()
	s := m.own[a]
	s.requests--
	m.restLocked(s)
}

// restLocked forgets a sandbox for which nothing goes on.
func (m *Mirror) restLocked(s *sandbox) {
	if s.requests == 0 && s.goes == 0 {
		delete(m.own, s.addr)
	}
}

// warn logs, at most once a second: sandboxes decide how often it is called.
func (m *Mirror) warn(text string, args ...any) {
	m.mu.Lock()
	now := time.Now()
	quiet := now.Sub(m.told) < time.Second
	if !quiet {
		m.told = now
	}
	m.mu.Unlock()
	if !quiet {
		m.c.Log.Warn(text, args...)
	}
}

func hostname(host string) string {
	name, _, _ := strings.Cut(strings.ToLower(host), ":")
	return strings.TrimSuffix(name, ".")
}

// target is what is asked for. A path that is not written the one way it can be is
// Invalid, so that nothing is seen in two ways, here and upstream.
func target(r *http.Request) (host, path string, err error) {
	const op = "read path"
	p, ok := strings.CutPrefix(r.URL.Path, "/")
	if !ok || len(p) > 2048 {
		return "", "", dsec.Errorf(dsec.Invalid, op, "", "want one of at most 2048 bytes that begins with a slash")
	}
	for i := range len(p) {
		if c := p[i]; c <= ' ' || c >= 0x7f || strings.IndexByte(`\%?#"<>|^{}`+"`", c) >= 0 {
			return "", "", dsec.Errorf(dsec.Invalid, op, dsec.Quote(p), "has a %q", c)
		}
	}
	parts := strings.Split(p, "/")
	for i, s := range parts {
		if s == "." || s == ".." || s == "" && i < len(parts)-1 {
			return "", "", dsec.Errorf(dsec.Invalid, op, dsec.Quote(p), "has an element %s", dsec.Quote(s))
		}
	}
	return r.Host, p, nil
}

// denied says whether a name is, in any case, as the service compares names.
func (a *Access) denied(service string, same func(denied string) bool) bool {
	return slices.ContainsFunc(a.Deny[service], same)
}

// hides says whether what has this time is newer than may be seen. What has none
// may be.
func (a *Access) hides(t time.Time) bool {
	return !a.Cutoff.IsZero() && (t.IsZero() || t.After(a.Cutoff))
}

// statusOf says a class by HTTP.
func statusOf(err error) int {
	switch dsec.ClassOf(err) {
	case dsec.Invalid:
		return http.StatusBadRequest
	case dsec.PermissionDenied:
		return http.StatusForbidden
	case dsec.NotFound:
		return http.StatusNotFound
	case dsec.Unsupported:
		return http.StatusMethodNotAllowed
	case dsec.ResourceExhausted:
		return http.StatusTooManyRequests
	case dsec.Timeout:
		return http.StatusGatewayTimeout
	case dsec.Unavailable, dsec.Corrupt:
		return http.StatusBadGateway
	}
	return http.StatusInternalServerError
}

// refuse answers with a text.
func (m *Mirror) refuse(w http.ResponseWriter, r *http.Request, err error) {
	status := statusOf(err)
	switch status {
	case http.StatusForbidden, http.StatusTooManyRequests, http.StatusMethodNotAllowed, http.StatusBadRequest:
		m.count(&m.stats.Refused)
	case http.StatusNotFound:
		m.count(&m.stats.Hidden)
	default:
		m.count(&m.stats.Errors)
		m.warn("package not served", "host", r.Host, "path", r.URL.Path, "err", err)
	}
	http.Error(w, "dsec mirror: "+err.Error(), status)
}
