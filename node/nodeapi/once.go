package nodeapi

import (
	"context"
	"crypto/sha256"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
)

const (
	rememberFor  = 24 * time.Hour
	rememberMost = 1 << 16
)

// answers remembers what small calls were answered, by key, so that a repeated
// one does nothing twice. It is in memory: an agent that restarts forgets it.
// What a sandbox is, is in the ledger, with keys of its own.
type answers struct {
	mu    sync.Mutex
	known map[string]*answer
	order []string // of known, oldest first
}

type answer struct {
	sum  [sha256.Size]byte // of the request
	at   time.Time
	done chan struct{} // closed when resp and err are final
	resp proto.Message
	err  error
}

// once makes a verb whose requests have a call_id idempotent.
func once[Q any, P interface {
	*Q
	proto.Message
	GetCallId() string
}](s *Server, name string, fn func(ctx context.Context, who caller, req P) (proto.Message, error)) verb {
	return unary(func(ctx context.Context, who caller, req P) (proto.Message, error) {
		if req.GetCallId() == "" {
			return fn(ctx, who, req)
		}
		body, err := proto.MarshalOptions{Deterministic: true}.Marshal(req)
		if err != nil {
			return nil, dsec.E(dsec.Internal, name, "", err)
		}
		key := who.project + "/" + name + "/" + req.GetCallId()
		a, first := s.answers.get(key, sha256.Sum256(body))
		if a.sum != sha256.Sum256(body) {
			return nil, dsec.Errorf(dsec.Conflict, name, dsec.Quote(req.GetCallId()), "the call_id was used with other parameters")
		}
		if first {
			a.resp, a.err = fn(ctx, who, req)
			if dsec.ClassOf(a.err).Retryable() || dsec.ClassOf(a.err) == dsec.Canceled {
				s.answers.forget(key, a)
			}
			close(a.done)
			return a.resp, a.err
		}
		select {
		case <-a.done:
			return a.resp, a.err
		case <-ctx.Done():
			return nil, dsec.E(dsec.ClassOf(ctx.Err()), name, dsec.Quote(req.GetCallId()), ctx.Err())
		}
	})
}

// get returns the answer of a key; the first caller has to make it.
func (x *answers) get(key string, sum [sha256.Size]byte) (a *answer, first bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	now := time.Now()
	for len(x.order) > 0 {
		oldest, known := x.known[x.order[0]]
		if known && len(x.order) < rememberMost && now.Sub(oldest.at) < rememberFor {
			break
		}
		delete(x.known, x.order[0])
		x.order = x.order[1:]
	}
	if a = x.known[key]; a != nil {
		return a, false
	}
	if x.known == nil {
		x.known = map[string]*answer{}
	}
	a = &answer{sum: sum, at: now, done: make(chan struct{})}
	x.known[key] = a
	x.order = append(x.order, key)
	return a, true
}

// forget lets the call be done again.
func (x *answers) forget(key string, a *answer) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.known[key] == a {
		delete(x.known, key)
	}
}
