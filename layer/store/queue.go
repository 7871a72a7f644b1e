package store

import (
	"context"
	"slices"
	"sync"
)

// maxImages is how many images are made at a time: more would only slow the
// first down.
const maxImages = 4

// queue lets a few images be made at a time, in the order in which they came.
type queue struct {
	mu      sync.Mutex
	running int
	waiting []chan struct{}
}

// enter waits for a turn. leave must be called after it, if it has no error.
func (q *queue) enter(ctx context.Context, turn chan struct{}) error {
	q.mu.Lock()
	if q.running < maxImages && len(q.waiting) == 0 {
		q.running++
		close(turn)
		q.mu.Unlock()
		return nil
	}
	q.waiting = append(q.waiting, turn)
	q.mu.Unlock()
	select {
	case <-turn:
		return nil
	case <-ctx.Done():
	}
	q.mu.Lock()
	i := slices.Index(q.waiting, turn)
	if i >= 0 {
		q.waiting = slices.Delete(q.waiting, i, i+1)
	}
	q.mu.Unlock()
	if i < 0 { // it was our turn after all
		q.leave()
	}
	return ctx.Err()
}

func (q *queue) leave() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.waiting) == 0 {
		q.running--
		return
	}
	close(q.waiting[0])
	q.waiting = q.waiting[1:]
}

// position counts those that are before a waiting one, and it; 0 if it does not wait.
func (q *queue) position(turn chan struct{}) int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return slices.Index(q.waiting, turn) + 1
}

// slots bound what is fetched and converted at a time, by number and by bytes:
// all that lies in the way of layers that are not finished is at most twice the
// largest of them.
type slots struct {
	mu    sync.Mutex
	n     int
	bytes int64
	freed chan struct{} // closed and replaced when something is
}

func (s *slots) take(ctx context.Context, size, largest int64, limit int) error {
	for {
		s.mu.Lock()
		if s.n == 0 || s.n < limit && s.bytes+size <= 2*largest {
			s.n, s.bytes = s.n+1, s.bytes+size
			s.mu.Unlock()
			return nil
		}
		if s.freed == nil {
			s.freed = make(chan struct{})
		}
		freed := s.freed
		s.mu.Unlock()
		select {
		case <-freed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (s *slots) give(size int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.n, s.bytes = s.n-1, s.bytes-size
	if s.freed != nil {
		close(s.freed)
		s.freed = nil
	}
}
