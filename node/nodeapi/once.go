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
// What a sandbox is, is in the ledger, with keys of its own. When there are too many
// the project that has most forgets its oldest: none can make another repeat a call.
type answers struct {
	mu       sync.Mutex
	projects map[string]*projectAnswers
	count    int // of all
}

type projectAnswers struct {
	known map[string]*answer
	order []*answer // of known, oldest first, and some that were forgotten
}

type answer struct {
	key  string
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
		a, first := s.answers.get(who.project, name+"/"+req.GetCallId(), sha256.Sum256(body))
		if a.sum != sha256.Sum256(body) {
			return nil, dsec.Errorf(dsec.Conflict, name, dsec.Quote(req.GetCallId()), "the call_id was used with other parameters")
		}
		if first {
			a.resp, a.err = fn(ctx, who, req)
			if dsec.ClassOf(a.err).Retryable() || dsec.ClassOf(a.err) == dsec.Canceled {
				s.answers.forget(who.project, a)
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
func (x *answers) get(project, key string, sum [sha256.Size]byte) (a *answer, first bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	now := time.Now()
	for name, p := range x.projects {
		for len(p.order) > 0 && now.Sub(p.order[0].at) >= rememberFor {
			x.dropLocked(name, p)
		}
	}
	if p := x.projects[project]; p != nil && p.known[key] != nil {
		return p.known[key], false
	}
	for x.count >= rememberMost {
		name, most := x.mostLocked()
		x.dropLocked(name, most)
	}
	p := x.projects[project]
	if p == nil {
		p = &projectAnswers{known: map[string]*answer{}}
		if x.projects == nil {
			x.projects = map[string]*projectAnswers{}
		}
		x.projects[project] = p
	}
	a = &answer{key: key, sum: sum, at: now, done: make(chan struct{})}
	p.known[key] = a
	p.order = append(p.order, a)
	x.count++
	return a, true
}

// mostLocked is the project that has most.
func (x *answers) mostLocked() (name string, most *projectAnswers) {
	for n, p := range x.projects {
		if most == nil || len(p.order) > len(most.order) {
			name, most = n, p
		}
	}
	return name, most
}

// dropLocked forgets the oldest of a project that has some.
func (x *answers) dropLocked(name string, p *projectAnswers) {
	a := p.order[0]
	p.order = p.order[1:]
	x.count--
	if p.known[a.key] == a {
		delete(p.known, a.key)
	}
	if len(p.order) == 0 {
		delete(x.projects, name)
	}
}

// forget lets the call be done again.
func (x *answers) forget(project string, a *answer) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if p := x.projects[project]; p != nil && p.known[a.key] == a {
		delete(p.known, a.key)
	}
}
