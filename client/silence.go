package client

import (
	"context"
	"sync/atomic"
	"time"
)

// silence is how long a stream may say nothing, not even that it is alive.
const silence = 30 * time.Second

// silent ends a stream that says nothing for too long: a connection whose
// packets are dropped would hang for ever.
type silent struct {
	t    *time.Timer
	done atomic.Bool
}

func newSilence(cancel context.CancelFunc) *silent {
	s := &silent{}
	s.t = time.AfterFunc(silence, func() {
		s.done.Store(true)
		cancel()
	})
	return s
}

func (s *silent) restart()    { s.t.Reset(silence) }
func (s *silent) stop()       { s.t.Stop() }
func (s *silent) fired() bool { return s.done.Load() }
