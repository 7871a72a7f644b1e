package s3test

import (
	"context"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/time/rate"

	"github.com/opendsec/dsec/blob/fault"
)

// Proxy is what a client of the server connects to.
type Proxy struct {
	address string
	bound   int // a socket that keeps the port when nobody listens
	to      *httputil.ReverseProxy
	dial    func(context.Context, string, string) (net.Conn, error)
	now     atomic.Pointer[broken]
	count   atomic.Int64
	read    atomic.Int64 // bytes of answers
	written atomic.Int64 // bytes of requests

	mu     sync.Mutex
	server *http.Server // nil: connections are refused
	closed bool
}

type broken struct {
	fault.Faults
	limit *rate.Limiter
}

func newProxy(socket string) (*Proxy, error) {
	p := &Proxy{dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}
	if err := p.bind(); err != nil {
		return nil, fmt.Errorf("find a port for the proxy: %w", err)
	}
	p.to = &httputil.ReverseProxy{
		// The client signed the host it knows, so it is kept.
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.URL.Scheme, r.Out.URL.Host, r.Out.Host = "http", "s3.invalid", r.In.Host
		},
		Transport:      &http.Transport{DialContext: p.dial, MaxIdleConnsPerHost: 64, DisableCompression: true, IdleConnTimeout: 10 * time.Second},
		FlushInterval:  -1,
		ModifyResponse: p.answer,
		ErrorHandler:   func(w http.ResponseWriter, _ *http.Request, _ error) { say(w, fault.Unavailable) },
		ErrorLog:       log.New(io.Discard, "", 0),
	}
	p.now.Store(&broken{})
	return p, p.listen()
}

// bind takes a port for good. With SO_REUSEADDR others may listen on it as long
// as this socket does not, and no connection is given it by chance.
func (p *Proxy) bind() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	p.bound = fd
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		return err
	}
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		return err
	}
	sa, err := unix.Getsockname(fd)
	if err != nil {
		return err
	}
	p.address = net.JoinHostPort("127.0.0.1", strconv.Itoa(sa.(*unix.SockaddrInet4).Port))
	return nil
}

func (p *Proxy) listen() error {
	l, err := net.Listen("tcp", p.address)
	if err != nil {
		return err
	}
	p.server = &http.Server{Handler: p, ErrorLog: log.New(io.Discard, "", 0)}
	go p.server.Serve(l) //nolint:errcheck // ends with the server
	return nil
}

// Address is host and port.
func (p *Proxy) Address() string { return p.address }

// Requests is how many have begun.
func (p *Proxy) Requests() int64 { return p.count.Load() }

// Bytes are those of all bodies, read from the server and written to it.
func (p *Proxy) Bytes() (read, written int64) { return p.read.Load(), p.written.Load() }

// Set makes every request that begins from now on go wrong like this. Refuse
// ends the connections there are.
func (p *Proxy) Set(f fault.Faults) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.now.Store(&broken{f, f.Limiter()})
	switch {
	case p.closed:
	case f.Mode == fault.Refuse && p.server != nil:
		p.server.Close()
		p.server = nil
	case f.Mode != fault.Refuse && p.server == nil:
		if err := p.listen(); err != nil {
			panic(fmt.Sprintf("listen on a port that is ours: %v", err))
		}
	}
}

// Close ends all connections.
func (p *Proxy) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return
	}
	p.closed = true
	if p.server != nil {
		p.server.Close()
	}
	p.to.Transport.(*http.Transport).CloseIdleConnections()
	unix.Close(p.bound)
}

type modeKey struct{}

// ServeHTTP implements http.Handler.
func (p *Proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	now := p.now.Load()
	mode := now.Broken(fault.Request{Op: r.Method, Key: r.URL.Path, N: p.count.Add(1) - 1})
	ctx := r.Context()
	select {
	case <-time.After(now.Latency):
	case <-ctx.Done():
		return
	}
	switch mode {
	case fault.Refuse: // came in just before
		panic(http.ErrAbortHandler)
	case fault.Hang:
		_, _ = io.Copy(io.Discard, r.Body) // only then is it noticed that the client leaves
		<-ctx.Done()
		return
	case fault.Forbidden, fault.Missing, fault.Throttled, fault.Unavailable:
		_, _ = io.Copy(io.Discard, r.Body)
		say(w, mode)
		return
	}
	up := &fault.Body{Ctx: ctx, R: r.Body, Limit: now.limit}
	if r.ContentLength > 0 && (mode == fault.Cut || mode == fault.Stall) {
		up.Mode, up.Middle = mode, r.ContentLength/2
	}
	if r.ContentLength != 0 {
		r.Body = body{counted{up, &p.written}, r.Body}
	}
	p.to.ServeHTTP(w, r.WithContext(context.WithValue(ctx, modeKey{}, &answering{mode, now.limit})))
}

type answering struct {
	mode  fault.Mode
	limit *rate.Limiter
}

// answer breaks the body of an answer. Corrupt is for objects: what the server
// says about itself stays readable.
func (p *Proxy) answer(r *http.Response) error {
	a := r.Request.Context().Value(modeKey{}).(*answering)
	b := &fault.Body{Ctx: r.Request.Context(), R: r.Body, Limit: a.limit}
	object := r.Request.Method == http.MethodGet && r.StatusCode < 300 && !strings.Contains(r.Header.Get("Content-Type"), "xml")
	switch a.mode {
	case fault.Corrupt:
		if object {
			b.Mode = a.mode
		}
	case fault.Cut, fault.Stall:
		if r.ContentLength > 0 && r.Request.Method != http.MethodHead {
			b.Mode, b.Middle = a.mode, r.ContentLength/2
		}
	}
	r.Body = body{counted{b, &p.read}, r.Body}
	return nil
}

type body struct {
	io.Reader
	io.Closer
}

type counted struct {
	r io.Reader
	n *atomic.Int64
}

func (c counted) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n.Add(int64(n))
	return n, err
}

// say answers as S3 does.
func say(w http.ResponseWriter, m fault.Mode) {
	status, code := http.StatusServiceUnavailable, "ServiceUnavailable"
	switch m {
	case fault.Forbidden:
		status, code = http.StatusForbidden, "AccessDenied"
	case fault.Missing:
		status, code = http.StatusNotFound, "NoSuchKey"
	case fault.Throttled:
		status, code = http.StatusTooManyRequests, "SlowDown"
	}
	w.Header().Set("Content-Type", "application/xml")
	w.WriteHeader(status)
	fmt.Fprintf(w, `<?xml version="1.0" encoding="UTF-8"?><Error><Code>%s</Code><Message>said by the proxy</Message></Error>`, code)
}
