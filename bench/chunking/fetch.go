package chunking

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"time"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sync/errgroup"
)

// Server is a store of packs that is some time away.
type Server struct {
	URL  string
	http *http.Server
	done chan error
}

// Serve serves the files of dir on loopback; each request waits for the latency first.
func Serve(dir string, latency time.Duration) (*Server, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	files := http.FileServer(http.Dir(dir))
	s := &Server{URL: "http://" + l.Addr().String(), done: make(chan error, 1)}
	s.http = &http.Server{ReadHeaderTimeout: 10 * time.Second, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		t := time.NewTimer(latency)
		defer t.Stop()
		select {
		case <-t.C:
			files.ServeHTTP(w, r)
		case <-r.Context().Done():
		}
	})}
	go func() { s.done <- s.http.Serve(l) }()
	return s, nil
}

// Close ends the server.
func (s *Server) Close() error {
	err := s.http.Close()
	if serveErr := <-s.done; !errors.Is(serveErr, http.ErrServerClosed) {
		err = errors.Join(err, serveErr)
	}
	return err
}

// Fetcher does what a loader does: ask for a range, check each chunk, write it
// where it is read from.
type Fetcher struct {
	url    string
	client *http.Client
	z      *zstd.Decoder
	to     *os.File
	line   Line
}

// NewFetcher keeps as many connections as the line has requests at one time;
// to is a sparse file, as large as the largest data file.
func NewFetcher(s *Server, l Line, to *os.File) (*Fetcher, error) {
	z, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(0), zstd.WithDecoderMaxMemory(16<<20))
	if err != nil {
		return nil, err
	}
	return &Fetcher{url: s.URL, z: z, to: to, line: l, client: &http.Client{Transport: &http.Transport{
		MaxIdleConnsPerHost: l.Parallel, MaxConnsPerHost: l.Parallel, DisableCompression: true}}}, nil
}

// Close ends the connections.
func (f *Fetcher) Close() {
	f.client.CloseIdleConnections()
	f.z.Close()
}

// Warm opens the connections, which a running loader has.
func (f *Fetcher) Warm(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	for range f.line.Parallel {
		g.Go(func() error {
			_, err := f.get(ctx, Request{Len: 1})
			return err
		})
	}
	return g.Wait()
}

// Prefetch fetches all that an access will read and returns the time it took.
func (f *Fetcher) Prefetch(ctx context.Context, p *Packed, a Access) (time.Duration, error) {
	reqs := p.Plan(a, f.line, nil)
	begin := time.Now()
	err := f.all(ctx, reqs)
	return time.Since(begin), err
}

// Demand fetches what each read lacks, one read after the other.
func (f *Fetcher) Demand(ctx context.Context, p *Packed, a Access) (time.Duration, error) {
	s := NewState(false)
	begin := time.Now()
	for _, r := range a.Reads {
		if err := f.all(ctx, Coalesce(s.wait(p, r, f.line.Ahead), f.line)); err != nil {
			return 0, err
		}
	}
	return time.Since(begin), nil
}

func (f *Fetcher) all(ctx context.Context, reqs []Request) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(f.line.Parallel)
	for _, r := range reqs {
		g.Go(func() error {
			b, err := f.get(ctx, r)
			if err != nil {
				return err
			}
			return f.unpack(r, b)
		})
	}
	return g.Wait()
}

func (f *Fetcher) get(ctx context.Context, r Request) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, f.url+"/pack-"+strconv.Itoa(r.Pack), nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Range", fmt.Sprintf("bytes=%d-%d", r.Off, r.Off+r.Len-1))
	resp, err := f.client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusPartialContent {
		return nil, fmt.Errorf("get pack %d at %d: %s", r.Pack, r.Off, resp.Status)
	}
	b := make([]byte, r.Len)
	_, err = io.ReadFull(resp.Body, b)
	return b, err
}

func (f *Fetcher) unpack(r Request, b []byte) error {
	var plain []byte
	for _, c := range r.Chunks {
		at := c.At - r.Off
		var err error
		if plain, err = f.z.DecodeAll(b[at:at+c.Size], plain[:0]); err != nil {
			return err
		}
		if sha256.Sum256(plain) != c.Sum {
			return fmt.Errorf("chunk at %d of pack %d: content has another digest", c.At, c.Pack)
		}
		if _, err := f.to.WriteAt(plain, c.Off); err != nil {
			return err
		}
	}
	return nil
}
