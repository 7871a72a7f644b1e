package egress

import (
	"context"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"strings"
	"sync"
	"time"

	"github.com/opendsec/dsec/netpolicy/hello"
)

// Why requests are refused, besides names.
const (
	whyProxy = "it asks for a proxy"
	whyHost  = "it says no host"
)

// webConn is a client that speaks HTTP.
type webConn struct {
	*net.TCPConn
	c      *conn
	once   sync.Once
	closed chan struct{}
}

func (w *webConn) Close() error {
	w.once.Do(func() { close(w.closed) })
	return w.TCPConn.Close()
}

// webs is where the HTTP server gets its connections from.
type webs struct {
	s *Server
}

func (w webs) Accept() (net.Conn, error) {
	select {
	case c := <-w.s.webs:
		return c, nil
	case <-w.s.ctx.Done():
		return nil, net.ErrClosed
	}
}

func (w webs) Close() error   { return nil }
func (w webs) Addr() net.Addr { return &net.TCPAddr{} }

type connKey struct{}

// openWeb serves HTTP: each request is read, judged and written anew, so that what
// is judged is what the other end reads.
func (s *Server) openWeb() {
	quiet := log.New(io.Discard, "", 0)
	s.webs = make(chan net.Conn)
	s.web = &http.Server{Handler: http.HandlerFunc(s.request), ReadHeaderTimeout: helloWithin, IdleTimeout: halfWithin, MaxHeaderBytes: 64 << 10, ErrorLog: quiet,
		DisableGeneralOptionsHandler: true,
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, connKey{}, c.(*webConn).c)
		}}
	s.work.Go(func() { _ = s.web.Serve(webs{s}) })
}

// serveWeb returns when the connection has ended.
func (s *Server) serveWeb(c *conn) {
	w := &webConn{TCPConn: c.client, c: c, closed: make(chan struct{})}
	c.transport = &http.Transport{DisableCompression: true, MaxIdleConns: 1, MaxIdleConnsPerHost: 1, IdleConnTimeout: halfWithin, MaxResponseHeaderBytes: 1 << 20, ExpectContinueTimeout: time.Second,
		DialContext: func(ctx context.Context, _, name string) (net.Conn, error) {
			host, _, err := net.SplitHostPort(name)
			if err != nil {
				return nil, err
			}
			server, r, err := s.reach(ctx, c, host)
			if err != nil {
				return nil, err
			}
			return &counted{server, r, func() { s.lost(c, server) }}, nil
		}}
	defer c.transport.CloseIdleConnections()
	select {
	case s.webs <- w:
		<-w.closed
	case <-c.ctx.Done():
	}
}

// counted is the other end of a client that speaks HTTP.
type counted struct {
	net.Conn
	r    *row
	lost func()
}

func (c *counted) Close() error {
	c.lost()
	return c.Conn.Close()
}

func (c *counted) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.r.in.Add(int64(n))
	c.r.used()
	return n, err
}

func (c *counted) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.r.out.Add(int64(n))
	c.r.used()
	return n, err
}

// request passes one on to the host it names, at the address it was sent to.
func (s *Server) request(w http.ResponseWriter, r *http.Request) {
	c := r.Context().Value(connKey{}).(*conn)
	name, why := hostOf(r)
	if why != "" {
		s.refuse(c, name, why)
	} else {
		why = s.admit(c, name, nil)
	}
	if why != "" {
		w.Header().Set("Connection", "close")
		http.Error(w, "dsec: "+why, http.StatusForbidden)
		return
	}
	if !strings.EqualFold(r.Header.Get("Upgrade"), "websocket") {
		r.Header.Del("Upgrade") // to what has requests of its own that nobody would look at, as HTTP/2
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	defer context.AfterFunc(c.ctx, cancel)()
	proxy := &httputil.ReverseProxy{Transport: c.transport, FlushInterval: -1, ErrorLog: s.web.ErrorLog,
		Rewrite: func(p *httputil.ProxyRequest) {
			p.Out.URL.Scheme, p.Out.URL.Host, p.Out.Host = "http", name, p.In.Host
			p.Out.URL.RawQuery = p.In.URL.RawQuery
			for _, said := range []string{"Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto"} {
				if v := p.In.Header[said]; v != nil { // as it is
					p.Out.Header[said] = v
				}
			}
		},
		// As if it had not answered.
		ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) }}
	proxy.ServeHTTP(w, r.WithContext(ctx))
}

// hostOf is whom a request is for.
func hostOf(r *http.Request) (name, why string) {
	if r.Method == http.MethodConnect || r.URL.Host != "" || r.URL.Scheme != "" {
		return "", whyProxy
	}
	name, err := hello.Host(strings.TrimSuffix(r.Host, ":80"))
	if err != nil {
		return "", whyHost
	}
	return name, ""
}

// refuse counts a request that nobody is to be asked about.
func (s *Server) refuse(c *conn, name, why string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refuseLocked(c.box, name, c.to, why)
}
