package mirror

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/opendsec/dsec"
)

// client asks upstream: nothing but who we are goes with it, redirects lead to
// known hosts only, and no proxy of the environment is used.
func (m *Mirror) client() *http.Client {
	dial := m.c.Dial
	if dial == nil {
		dial = (&net.Dialer{Timeout: 10 * time.Second}).DialContext
	}
	return &http.Client{
		Transport: &http.Transport{DialContext: dial, ForceAttemptHTTP2: true, MaxConnsPerHost: 64, MaxIdleConnsPerHost: 16, IdleConnTimeout: time.Minute,
			TLSHandshakeTimeout: 10 * time.Second, ResponseHeaderTimeout: m.c.HeaderWait, MaxResponseHeaderBytes: 64 << 10},
		CheckRedirect: func(r *http.Request, via []*http.Request) error {
			if len(via) > 5 {
				return errors.New("more than 5 redirects")
			}
			r.Header.Del("Referer")
			return m.mayAsk(r.URL)
		},
	}
}

// mayAsk: only hosts of the configuration are.
func (m *Mirror) mayAsk(u *url.URL) error {
	scheme, ok := m.hosts[strings.ToLower(u.Host)]
	if !ok || u.User != nil || u.Scheme != scheme && u.Scheme != "https" {
		return dsec.Errorf(dsec.Unavailable, "ask upstream", dsec.Quote(u.Scheme+"://"+u.Host), "not one of the hosts of this mirror")
	}
	return nil
}

// ask sends a request. The answer has status 200, 206 never, or 304 if etag was
// given; NotFound, Unavailable and Timeout are what upstream says or does.
func (m *Mirror) ask(ctx context.Context, at *url.URL, header http.Header) (*http.Response, error) {
	const op = "ask upstream"
	if err := m.mayAsk(at); err != nil {
		return nil, err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, at.String(), nil)
	if err != nil {
		return nil, dsec.E(dsec.Internal, op, at.Redacted(), err)
	}
	r.Header = header
	r.Header.Set("User-Agent", "dsec-mirror")
	resp, err := m.up.Do(r)
	if err != nil {
		return nil, m.explain(at, err)
	}
	switch {
	case resp.StatusCode == http.StatusOK, resp.StatusCode == http.StatusNotModified && header.Get("If-None-Match") != "":
		return resp, nil
	case resp.StatusCode == http.StatusNotFound, resp.StatusCode == http.StatusGone:
		err = dsec.Errorf(dsec.NotFound, op, at.Redacted(), "it has none")
	default:
		err = dsec.Errorf(dsec.Unavailable, op, at.Redacted(), "status %d", resp.StatusCode)
	}
	_ = resp.Body.Close()
	return nil, err
}

// explain says what became of a question.
func (m *Mirror) explain(at *url.URL, err error) error {
	const op = "ask upstream"
	if e, ok := errors.AsType[*dsec.Error](err); ok {
		return e
	}
	if u, ok := errors.AsType[*url.Error](err); ok && !u.Timeout() {
		err = u.Err // without the URL, which is the object
	}
	if n, ok := errors.AsType[net.Error](err); ok && n.Timeout() {
		return dsec.E(dsec.Timeout, op, at.Redacted(), err)
	}
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, errStalled) {
		return dsec.E(dsec.Timeout, op, at.Redacted(), err)
	}
	return dsec.E(dsec.Unavailable, op, at.Redacted(), err)
}

// However slowly upstream gives it.
const (
	maxIndexTime = 5 * time.Minute
	maxFileTime  = 2 * time.Hour
	maxAnswer    = 5 * time.Minute // for a sandbox to take an index
)

var errStalled = errors.New("no byte for too long")

// stallReader ends a body whose next byte does not come.
type stallReader struct {
	r      io.Reader
	wait   time.Duration
	timer  *time.Timer
	cancel context.CancelCauseFunc
	ctx    context.Context
}

func (s *stallReader) Read(p []byte) (int, error) {
	s.timer.Reset(s.wait)
	n, err := s.r.Read(p)
	s.timer.Stop()
	if err != nil && err != io.EOF && errors.Is(context.Cause(s.ctx), errStalled) {
		err = errStalled
	}
	return n, err
}

// body asks and gives the answer's body, which ends if it stalls.
func (m *Mirror) body(ctx context.Context, at *url.URL, header http.Header) (*http.Response, io.Reader, func(), error) {
	ctx, cancel := context.WithCancelCause(ctx)
	resp, err := m.ask(ctx, at, header)
	if err != nil {
		cancel(nil)
		return nil, nil, nil, err
	}
	t := time.AfterFunc(m.c.BodyWait, func() { cancel(errStalled) })
	s := &stallReader{resp.Body, m.c.BodyWait, t, cancel, ctx}
	return resp, s, func() { t.Stop(); cancel(nil); _ = resp.Body.Close() }, nil
}

// document is an index as upstream has it.
type document struct {
	body  []byte
	stale bool // upstream is away
}

// fetching is a document that somebody fetches, and others wait for.
type fetching struct {
	done chan struct{}
	doc  document
	err  error
}

// wanted is a document to get.
type wanted struct {
	at      *url.URL
	accept  string
	forever bool                    // it never changes
	check   func(body []byte) error // whether it is what it should be; nil: anything is
}

func (w *wanted) key() string { return w.accept + " " + w.at.String() }

// document gets an index: from the cache while it is fresh, else from upstream,
// and from the cache again while upstream is away. Who asks for one at a time gets
// one.
func (m *Mirror) document(ctx context.Context, w wanted) (document, error) {
	key := w.key()
	leave, err := m.place(ctx, func(s *sandbox) chan struct{} { return s.documents })
	if err != nil {
		return document{}, err
	}
	m.mu.Lock()
	f := m.documents[key]
	if f == nil {
		f = &fetching{done: make(chan struct{})}
		m.documents[key] = f
		end := leave
		leave = func() {}
		m.work.Go(func() { // whoever goes away does not end it for others
			defer end()
			f.doc, f.err = m.fetch(w)
			m.mu.Lock()
			delete(m.documents, key)
			m.mu.Unlock()
			close(f.done)
		})
	}
	m.mu.Unlock()
	leave()
	select {
	case <-f.done:
		return f.doc, f.err
	case <-ctx.Done():
		return document{}, ctx.Err()
	}
}

func (m *Mirror) fetch(w wanted) (document, error) {
	key := w.key()
	kept, corrupt := m.cache.get(key)
	if corrupt {
		m.count(&m.stats.Corrupt)
	}
	var old document
	var etag string
	age := time.Duration(0)
	if kept != nil {
		defer func() { _ = kept.Close() }()
		body, err := io.ReadAll(kept)
		if err != nil {
			return document{}, dsec.E(dsec.Internal, "read cache entry", key, err)
		}
		old, etag, age = document{body: body}, kept.footer.ETag, time.Since(kept.checked)
		if w.forever || age >= 0 && age < m.c.Fresh {
			m.count(&m.stats.Hits)
			return old, nil
		}
	}
	body, unchanged, err := m.download(w, etag)
	switch {
	case err == nil && unchanged:
		m.cache.touch(key)
		m.count(&m.stats.Hits)
		return old, nil
	case err == nil:
		m.count(&m.stats.Misses)
		return document{body: body}, nil
	case kept != nil && dsec.ClassOf(err) != dsec.NotFound && age < m.c.Stale:
		m.count(&m.stats.Stale)
		m.warn("index not renewed", "at", w.at.Redacted(), "age", age, "err", err)
		old.stale = true
		return old, nil
	}
	return document{}, err
}

// download gets a document from upstream, and keeps it.
func (m *Mirror) download(w wanted, etag string) (body []byte, unchanged bool, err error) {
	header := http.Header{}
	if w.accept != "" {
		header.Set("Accept", w.accept)
	}
	if etag != "" {
		header.Set("If-None-Match", etag)
	}
	ctx, cancel := context.WithTimeout(m.ctx, maxIndexTime)
	defer cancel()
	resp, r, done, err := m.body(ctx, w.at, header)
	if err != nil {
		return nil, false, err
	}
	defer done()
	if resp.StatusCode == http.StatusNotModified {
		return nil, true, nil
	}
	body, err = io.ReadAll(io.LimitReader(r, m.c.MaxIndex+1)) // unpacked by then
	if err != nil {
		return nil, false, m.explain(w.at, err)
	}
	if int64(len(body)) > m.c.MaxIndex {
		return nil, false, dsec.Errorf(dsec.Unavailable, "read index", w.at.Redacted(), "more than %d bytes", m.c.MaxIndex)
	}
	if w.check != nil {
		if err := w.check(body); err != nil {
			return nil, false, dsec.E(dsec.Unavailable, "read index", w.at.Redacted(), err)
		}
	}
	if len(resp.Header.Get("ETag")) <= 256 {
		etag = resp.Header.Get("ETag")
	}
	m.keep(w.key(), body, etag)
	return body, false, nil
}

// keep writes a document to the cache, if it takes it.
func (m *Mirror) keep(key string, body []byte, etag string) {
	d := m.cache.create(int64(len(body)))
	if d == nil {
		return
	}
	sum := sha256.Sum256(body)
	if err := m.cache.write(d, body); err != nil {
		m.cache.discard(d)
		m.warn("index not kept", "err", err)
		return
	}
	if err := m.cache.commit(d, footer{key, int64(len(body)), hex.EncodeToString(sum[:]), etag}); err != nil {
		m.warn("index not kept", "err", err)
	}
}

// answer gives a document that was made of an index.
func (q *request) answer(contentType string, body []byte, stale bool) error {
	h := q.w.Header()
	h.Set("Content-Type", contentType)
	h.Set("X-Content-Type-Options", "nosniff")
	if stale {
		h.Set("Warning", `110 dsec-mirror "upstream is away: this is older"`)
	}
	_ = http.NewResponseController(q.w).SetWriteDeadline(time.Now().Add(maxAnswer)) // it is in memory so long
	http.ServeContent(q.w, q.r, "", time.Time{}, bytes.NewReader(body))
	return nil
}

// parse runs f when there is a place for it: an index takes memory.
func (m *Mirror) parse(ctx context.Context, f func() error) error {
	select {
	case m.parses <- struct{}{}:
		defer func() { <-m.parses }()
		return f()
	case <-ctx.Done():
		return ctx.Err()
	}
}

// below is a URL below a base. Only what must be is escaped: not the "!" of modules.
func below(base *url.URL, path string) *url.URL {
	u := *base
	u.Path = strings.TrimSuffix(base.Path, "/") + "/" + path
	u.RawPath = u.Path
	return &u
}

// base is an upstream; NotFound if it is not set.
func (m *Mirror) base(name string) (*url.URL, error) {
	if b := m.bases[name]; b != nil {
		return b, nil
	}
	return nil, dsec.Errorf(dsec.NotFound, "serve packages", name, "this mirror has no upstream for it")
}
