package process

import (
	"time"

	"github.com/opendsec/dsec"
)

// MaxTimeout of a command: the longest a sandbox may live.
const MaxTimeout = dsec.MaxLifetime

// Validate reports the first thing in s that can never work, as an Invalid
// error that names the field. It touches nothing outside s.
func (s *Spec) Validate() error {
	bad := func(field, format string, args ...any) error {
		return dsec.Errorf(dsec.Invalid, "validate exec", field, format, args...)
	}
	if len(s.Argv) == 0 || s.Argv[0] == "" {
		return bad("argv", "is empty")
	}
	switch {
	case s.Timeout < 0 || s.Timeout > MaxTimeout:
		return bad("timeout", "%v, want 0 to %v", s.Timeout.Round(time.Millisecond), MaxTimeout)
	case s.Head < 0 || s.Head > MaxKeep:
		return bad("head", "%d bytes, want 0 to %d", s.Head, MaxKeep)
	case s.Tail < 0 || s.Tail > MaxKeep:
		return bad("tail", "%d bytes, want 0 to %d", s.Tail, MaxKeep)
	}
	switch s.OnLimit {
	case "", Truncate, Kill:
	default:
		return bad("on_limit", "unknown choice %s", dsec.Quote(string(s.OnLimit)))
	}
	return nil
}
