package client

import (
	"context"
	"time"

	"github.com/opendsec/dsec"
)

// Live waits until fn has got every event of the past that the session was
// opened for; what fn gets from then on happens now. The nodes it returns could
// not be asked for what happened there. A session without events has no such
// moment.
func (s *Session) Live(ctx context.Context) (absent []dsec.NodeID, err error) {
	select {
	case <-s.live:
	case <-ctx.Done():
		return nil, dsec.E(dsec.ClassOf(ctx.Err()), "read past events", "", ctx.Err())
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.absent, s.past
}

func (s *Session) liveLocked(absent []string) {
	select {
	case <-s.live:
		return // the first of a stream that was opened again counts
	default:
	}
	for _, n := range absent {
		s.absent = append(s.absent, dsec.NodeID(n))
	}
	s.past = s.err
	close(s.live)
}

// Past returns what happened up to now and is still known, from e.Since on, and
// the nodes that could not be asked.
func (c *Client) Past(ctx context.Context, e Events) (events []dsec.Event, absent []dsec.NodeID, err error) {
	if e.Since.IsZero() {
		e.Since = time.Unix(1, 0)
	}
	s, err := c.OpenSession(ctx, &e, func(ev dsec.Event) { events = append(events, ev) })
	if err != nil {
		return nil, nil, err
	}
	absent, err = s.Live(ctx)
	if cerr := s.Close(); err == nil {
		err = cerr
	}
	return events, absent, err
}
