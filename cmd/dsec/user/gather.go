package user

import (
	"context"
	"sync"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

const (
	gatherQuiet = 500 * time.Millisecond // without an event: there are no more
	gatherMost  = 10 * time.Second
)

// gather returns the events of the past. A stream of events has no end, so it
// ends when nothing came for a while.
func gather(ctx context.Context, cl *client.Client, e client.Events) ([]dsec.Event, error) {
	ctx, cancel := context.WithTimeout(ctx, gatherMost)
	defer cancel()
	if e.Since.IsZero() {
		e.Since = time.Unix(1, 0)
	}
	var mu sync.Mutex
	var all []dsec.Event
	came := make(chan struct{}, 1)
	s, err := cl.OpenSession(ctx, &e, func(ev dsec.Event) {
		mu.Lock()
		all = append(all, ev)
		mu.Unlock()
		select {
		case came <- struct{}{}:
		default:
		}
	})
	if err != nil {
		return nil, err
	}
	quiet := time.NewTimer(gatherQuiet)
	defer quiet.Stop()
	for waiting := true; waiting; {
		select {
		case <-came:
			quiet.Reset(gatherQuiet)
		case <-quiet.C:
			waiting = false
		case <-ctx.Done():
			waiting = false
		}
	}
	err = s.Close()
	mu.Lock()
	defer mu.Unlock()
	return all, err
}

// execsOf returns the commands that events tell of, oldest first.
func execsOf(events []dsec.Event) (ids []string) {
	for _, e := range events {
		if e.Type == dsec.EventExecStarted {
			ids = append(ids, e.Exec)
		}
	}
	return ids
}
