package process

import (
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
)

func TestCommandsThatCanNeverRunNameTheField(t *testing.T) {
	long := strings.Repeat("x", 3<<20)
	for i, x := range []struct {
		field string
		spoil func(*Spec)
	}{
		{"argv", func(s *Spec) { s.Argv = nil }},
		{"argv", func(s *Spec) { s.Argv = []string{"echo", "a\x00b"} }},
		{"argv, env", func(s *Spec) { s.Argv = []string{"echo", long} }},
		{"argv, env", func(s *Spec) { s.Argv = append(s.Argv, make([]string, MaxArgBytes)...) }},
		{"argv, env", func(s *Spec) { s.Env = map[string]string{"A": long} }},
		{"env", func(s *Spec) { s.Env = map[string]string{"A": "a\x00b"} }},
		{"env", func(s *Spec) { s.Env = map[string]string{"A\x00": "b"} }},
		{"env", func(s *Spec) { s.Env = map[string]string{"A=": "b"} }},
		{"cwd", func(s *Spec) { s.Cwd = "/a\x00b" }},
		{"cwd", func(s *Spec) { s.Cwd = "/" + strings.Repeat("x", 5000) }},
		{"user", func(s *Spec) { s.User = "root\x00" }},
		{"user", func(s *Spec) { s.User = long }},
		{"timeout", func(s *Spec) { s.Timeout = math.MaxInt64 }},
		{"timeout", func(s *Spec) { s.Timeout = -1 }},
		{"head", func(s *Spec) { s.Head = math.MaxInt64 }},
		{"tail", func(s *Spec) { s.Tail = math.MinInt64 }},
		{"on_limit", func(s *Spec) { s.OnLimit = "maybe" }},
	} {
		s := Spec{Argv: []string{"true"}}
		if err := s.Validate(); err != nil {
			t.Fatal(err)
		}
		x.spoil(&s)
		var e *dsec.Error
		if err := s.Validate(); !errors.As(err, &e) || e.Class != dsec.Invalid || e.Object != x.field {
			t.Errorf("%d: %v, want invalid %s", i, err, x.field)
		}
	}
	s := Spec{Argv: []string{"echo", strings.Repeat("x", MaxArgBytes-100)}}
	if err := s.Validate(); err != nil {
		t.Error(err)
	}
}
