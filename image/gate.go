package image

import (
	"io"
	"net/http"
	"sync"
	"time"

	"github.com/opendsec/dsec/internal/within"
)

// gate is the way to one registry. When the registry limits its rate, every
// request to it waits as long as it asked, within reason.
type gate struct {
	next  http.RoundTripper
	mu    sync.Mutex
	until time.Time // nobody asks before
}

func newGate(next http.RoundTripper) *gate { return &gate{next: next} }

// fallbackWait is how long to wait where a registry does not say.
const fallbackWait = 5 * time.Second

func (g *gate) RoundTrip(req *http.Request) (*http.Response, error) {
	for waits := 0; ; waits++ {
		g.mu.Lock()
		wait := time.Until(g.until)
		g.mu.Unlock()
		if wait > 0 {
			if err := within.Sleep(req.Context(), wait); err != nil {
				return nil, err
			}
		}
		resp, err := g.next.RoundTrip(req)
		if err != nil || resp.StatusCode != http.StatusTooManyRequests || waits == maxWaits || req.Body != nil && req.Body != http.NoBody {
			return resp, err
		}
		asked, ok := retryAfter(resp.Header.Get("Retry-After"), time.Now())
		if !ok {
			asked = fallbackWait
		}
		if asked > maxRetryAfter {
			return resp, nil
		}
		_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, 1<<16)) // so that the connection can be used again
		resp.Body.Close()
		g.mu.Lock()
		if t := time.Now().Add(asked); t.After(g.until) {
			g.until = t
		}
		g.mu.Unlock()
	}
}
