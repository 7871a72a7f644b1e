package tier

import (
	"context"
	"maps"
	"sync"

	"github.com/opendsec/dsec/files"
)

// mostServices is how many users of one sandbox keep a connection; beyond it idle ones are
// forgotten.
const mostServices = 16

// Services are the open file services of a sandbox by user. The zero value has none; the methods
// may be called at any time.
type Services struct {
	mu  sync.Mutex
	all map[string]keptService
}

type keptService struct {
	fs *files.Redialing
	of any
}

// Get returns the service of a user, or opens one if there is none, or one of another session
// only, which is closed. of is the session, which can be compared; nil where all have one.
func (s *Services) Get(ctx context.Context, user string, of any, open func(context.Context) (*files.Redialing, error)) (*files.Redialing, error) {
	if fs := s.find(user, of); fs != nil {
		return fs, nil
	}
	fs, err := open(ctx)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	old, ok := s.all[user]
	if ok && old.of == of { // another call was there first
		s.mu.Unlock()
		_ = fs.Close()
		return old.fs, nil
	}
	if len(s.all) >= mostServices {
		maps.DeleteFunc(s.all, func(_ string, k keptService) bool { return k.fs.Idle() })
	}
	if s.all == nil {
		s.all = map[string]keptService{}
	}
	s.all[user] = keptService{fs, of}
	s.mu.Unlock()
	if ok {
		_ = old.fs.Close() // its session has ended
	}
	return fs, nil
}

func (s *Services) find(user string, of any) *files.Redialing {
	s.mu.Lock()
	defer s.mu.Unlock()
	if k, ok := s.all[user]; ok && k.of == of {
		return k.fs
	}
	return nil
}

// Idle reports whether nobody uses one.
func (s *Services) Idle() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, k := range s.all {
		if !k.fs.Idle() {
			return false
		}
	}
	return true
}

// Close ends all, calls in flight included. Later ones are opened anew.
func (s *Services) Close() {
	s.mu.Lock()
	all := s.all
	s.all = nil
	s.mu.Unlock()
	for _, k := range all {
		_ = k.fs.Close() // it only ever reports what is wanted here
	}
}
