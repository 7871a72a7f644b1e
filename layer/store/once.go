package store

import (
	"context"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
)

// job is one piece of work that any number of callers wait for.
type job struct {
	done chan struct{} // closed when info and err are there
	info layer.Info
	err  error
}

// once runs work, or waits for whoever runs it under the same key. If that one
// was cancelled the next caller runs it again.
func (s *Store) once(ctx context.Context, key string, work func() (layer.Info, error)) (layer.Info, error) {
	for {
		s.mu.Lock()
		j, running := s.jobs[key]
		if !running {
			j = &job{done: make(chan struct{})}
			s.jobs[key] = j
		}
		s.mu.Unlock()
		if !running {
			j.info, j.err = work()
			s.mu.Lock()
			delete(s.jobs, key)
			s.mu.Unlock()
			close(j.done)
			return j.info, j.err
		}
		select {
		case <-j.done:
			if class := dsec.ClassOf(j.err); class == dsec.Canceled || class == dsec.Timeout {
				continue
			}
			return j.info, j.err
		case <-ctx.Done():
			return layer.Info{}, dsec.E(dsec.ClassOf(ctx.Err()), "wait for layer", "", ctx.Err())
		}
	}
}
