package hold

import (
	"context"
	"maps"
	"slices"

	"github.com/opendsec/dsec"
)

// quiesce brings everything to a stop at which nothing is lost and the state can
// be told: no request is served, nobody waits for an end or reads output, no
// deadline fires. After an error, too, resume makes it go on.
func (s *server) quiesce(ctx context.Context) error {
	s.requests.close()
	s.quiesced.Store(true)
	_ = s.lis.SetDeadline(aLongTimeAgo)
	if err := s.requests.empty(ctx); err != nil {
		return dsec.E(dsec.Timeout, "wait for requests in flight", "", err)
	}
	all := s.living()
	for _, sb := range all {
		select {
		case <-sb.prepared:
		case <-ctx.Done():
			return dsec.E(dsec.Timeout, "wait for shell", sb.name(), ctx.Err())
		}
		sb.mu.Lock()
		_ = sb.pidfd.SetReadDeadline(aLongTimeAgo)
		for h := range sb.helpers {
			_ = h.child.pidfd.SetReadDeadline(aLongTimeAgo)
		}
		for _, e := range sb.execs {
			_ = e.pidfd.SetReadDeadline(aLongTimeAgo)
		}
		for l := range sb.listeners {
			_ = l.f.SetReadDeadline(aLongTimeAgo)
		}
		sb.mu.Unlock()
	}
	for _, p := range s.startedPlains() {
		p.mu.Lock()
		if p.pidfd != nil {
			_ = p.pidfd.SetReadDeadline(aLongTimeAgo)
		}
		p.mu.Unlock()
	}
	if err := s.watchers.empty(ctx); err != nil {
		return dsec.E(dsec.Timeout, "wait for ends that are being told", "", err)
	}
	for _, p := range s.allPumps() {
		p.pause()
	}
	if err := s.pumping.empty(ctx); err != nil {
		return dsec.E(dsec.Timeout, "wait for output", "", err)
	}
	for _, sb := range all {
		for _, e := range sb.list() {
			e.clock.pause()
		}
	}
	return nil
}

// resume starts what quiesce stopped, and in a new program what the state says.
func (s *server) resume() {
	s.quiesced.Store(false)
	for _, p := range s.allPumps() {
		p.start()
	}
	for _, sb := range s.living() {
		sb.mu.Lock()
		ended, helpers, listeners := sb.ended, slices.Collect(maps.Keys(sb.helpers)), slices.Collect(maps.Keys(sb.listeners))
		sb.mu.Unlock()
		for _, l := range listeners {
			l.watch()
		}
		if !ended {
			sb.watch()
		}
		for _, h := range helpers {
			h.watch()
		}
		for _, e := range sb.list() {
			if !e.hasEnded() {
				e.clock.resume()
				e.watch()
			}
		}
	}
	for _, p := range s.startedPlains() {
		p.watch()
	}
	s.listen()
	s.requests.open()
}

func (s *server) allPumps() []*pump {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Keys(s.pumps))
}
