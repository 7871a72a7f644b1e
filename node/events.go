package node

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/opendsec/dsec"
)

const subscriberQueue = 4096 // events that a subscriber may be behind

// subscriptions fans events out. A subscriber that does not keep up is cut off
// and told so; it comes back with the time of the last event it saw.
type subscriptions struct {
	metrics *Metrics

	mu  sync.Mutex
	all map[*subscriber]struct{}
}

type subscriber struct {
	filter Filter
	events chan dsec.Event
	lost   bool // guarded by subscriptions.mu; then events is closed
}

func (s *subscriptions) add(f Filter) *subscriber {
	f.States = nil // a filter of sandboxes, not of moments
	sub := &subscriber{filter: f, events: make(chan dsec.Event, subscriberQueue)}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all[sub] = struct{}{}
	return sub
}

func (s *subscriptions) remove(sub *subscriber) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.all, sub)
}

// publish never waits.
func (s *subscriptions) publish(e dsec.Event, r *record) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for sub := range s.all {
		if !sub.filter.matches(r) {
			continue
		}
		select {
		case sub.events <- e:
		default:
			sub.lost = true
			close(sub.events)
			delete(s.all, sub)
			s.metrics.lost.Inc()
		}
	}
}

// Events implements Watcher. A zero time begins with everything that is still
// known of sandboxes that are not deleted; another time, or f.All, with those
// of deleted ones too. After a crash of the agent the numbers of events may
// jump; they never repeat.
func (n *Node) Events(ctx context.Context, f Filter, since time.Time, fn func(dsec.Event) error, live func() error) error {
	sub := n.subs.add(f)
	defer n.subs.remove(sub)
	old, err := n.oldEvents(sub.filter, since, f.All || !since.IsZero())
	if err != nil {
		return err
	}
	seen := map[dsec.SandboxID]uint64{}
	for _, e := range old {
		seen[e.Sandbox] = max(seen[e.Sandbox], e.Seq)
		if err := fn(e); err != nil {
			return err
		}
	}
	if live != nil {
		if err := live(); err != nil {
			return err
		}
	}
	for {
		select {
		case e, ok := <-sub.events:
			if !ok {
				return dsec.Errorf(dsec.Unavailable, "stream events", "", "the reader is %d events behind", subscriberQueue)
			}
			if e.Seq <= seen[e.Sandbox] {
				continue
			}
			if e.To == dsec.Deleted {
				delete(seen, e.Sandbox)
			}
			if err := fn(e); err != nil {
				return err
			}
		case <-ctx.Done():
			return dsec.E(dsec.ClassOf(ctx.Err()), "stream events", "", ctx.Err())
		case <-n.ctx.Done():
			return dsec.E(dsec.Unavailable, "stream events", "", context.Cause(n.ctx))
		}
	}
}

// oldEvents gathers what is known, in the order of time.
func (n *Node) oldEvents(f Filter, since time.Time, ended bool) ([]dsec.Event, error) {
	var out []dsec.Event
	add := func(events []dsec.Event) {
		for _, e := range events {
			if e.Time.After(since) {
				out = append(out, e)
			}
		}
	}
	known := map[dsec.SandboxID]bool{}
	for _, b := range n.all() {
		b.mu.Lock()
		if f.matches(&b.rec) {
			known[b.id] = true
			add(b.ring)
		}
		b.mu.Unlock()
	}
	if ended {
		err := n.ledger.eachEnded(since, func(r *record) bool {
			if !known[r.ID] && f.matches(r) {
				add(r.Events)
			}
			return true
		})
		if err != nil {
			return nil, err
		}
	}
	slices.SortStableFunc(out, func(a, b dsec.Event) int { return a.Time.Compare(b.Time) })
	return out, nil
}
