package process

import (
	"strings"
	"time"

	"github.com/opendsec/dsec"
)

// MaxArgBytes of arguments and environment together, as the kernel has it for a
// stack of the usual size.
const MaxArgBytes = 2 << 20

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
	if err := s.validateTexts(bad); err != nil {
		return err
	}
	if s.Service && (s.User != "" || s.PTY != nil) {
		return bad("service", "it has a user of its own, and no terminal")
	}
	switch s.OnLimit {
	case "", Truncate, Kill:
	default:
		return bad("on_limit", "unknown choice %s", dsec.Quote(string(s.OnLimit)))
	}
	return nil
}

// validateTexts: no string has a NUL, at which the kernel would end it.
func (s *Spec) validateTexts(bad func(field, format string, args ...any) error) error {
	for _, t := range []struct {
		field, value string
		most         int
	}{{"cwd", s.Cwd, dsec.MaxPathBytes}, {"user", s.User, dsec.MaxUserBytes}} {
		switch {
		case len(t.value) > t.most:
			return bad(t.field, "%d bytes, at most %d", len(t.value), t.most)
		case strings.Contains(t.value, "\x00"):
			return bad(t.field, "%s holds a NUL byte", dsec.Quote(t.value))
		}
	}
	total := 0
	for _, a := range s.Argv {
		if strings.Contains(a, "\x00") {
			return bad("argv", "%s holds a NUL byte", dsec.Quote(a))
		}
		total += len(a) + 1
	}
	for k, v := range s.Env {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.Contains(v, "\x00") {
			return bad("env", "variable %s is not representable", dsec.Quote(k))
		}
		total += len(k) + len(v) + 2
	}
	if total > MaxArgBytes {
		return bad("argv, env", "%d bytes, at most %d", total, MaxArgBytes)
	}
	return nil
}
