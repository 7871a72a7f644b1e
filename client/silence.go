package client

import (
	"context"
	"io"
	"sync/atomic"
	"time"

	"github.com/opendsec/dsec"
)

// silence is how long a connection may give no sign of life unless the Config
// says otherwise.
const silence = 30 * time.Second

// silent ends what gives no sign of life for too long: a connection whose
// packets are dropped would hang for ever.
type silent struct {
	t     *time.Timer
	after time.Duration
	done  atomic.Bool
}

func (c *Client) newSilence(cancel context.CancelFunc) *silent {
	s := &silent{after: c.silence}
	s.t = time.AfterFunc(s.after, func() {
		s.done.Store(true)
		cancel()
	})
	return s
}

func (s *silent) restart() { s.t.Reset(s.after) }
func (s *silent) stop()    { s.t.Stop() }

// blame turns an error that silence led to into what it is.
func (s *silent) blame(op, object string, err error) error {
	if err == nil || !s.done.Load() {
		return err
	}
	return dsec.Errorf(dsec.Unavailable, op, object, "no sign of life for %v", s.after)
}

// heard is what comes from the platform: silence counts while it is read.
type heard struct {
	io.Reader
	s *silent
}

func (h heard) Read(p []byte) (int, error) {
	h.s.restart()
	n, err := h.Reader.Read(p)
	h.s.stop()
	return n, err
}

// sent is what goes to the platform: silence counts while nothing more is
// asked for. After the end the platform may take its time to store it.
type sent struct {
	io.Reader
	s *silent
}

func (b sent) Read(p []byte) (int, error) {
	b.s.stop()
	n, err := b.Reader.Read(p)
	if err == nil {
		b.s.restart()
	}
	return n, err
}
