package dsec

import (
	"errors"
	"slices"
	"strings"
	"testing"
)

func phased(p ...Phase) *Spec { return &Spec{Tier: TierContainer, Image: "base:test", Phases: p} }

func TestPhasesAreValidated(t *testing.T) {
	many := make([]Phase, MaxPhases+1)
	for i := range many {
		many[i].Name = string(rune('a' + i))
	}
	paths := make([]string, MaxPhasePaths+1)
	for i := range paths {
		paths[i] = "/p/" + strings.Repeat("x", i+1)
	}
	link := &NetworkPolicy{Mode: "sideways"}
	for name, s := range map[string]*Spec{
		"too many":             phased(many...),
		"no name":              phased(Phase{}),
		"a bad name":           phased(Phase{Name: "a b"}),
		"twice":                phased(Phase{Name: "a"}, Phase{Name: "a"}),
		"relative":             phased(Phase{Name: "a", Hide: []string{"x"}}),
		"the root":             phased(Phase{Name: "a", ReadOnly: []string{"/"}}),
		"not clean":            phased(Phase{Name: "a", Hide: []string{"/a/../b"}}),
		"a NUL":                phased(Phase{Name: "a", Writable: []string{"/a\x00"}}),
		"too many paths":       phased(Phase{Name: "a", Hide: paths}),
		"proc":                 phased(Phase{Name: "a", ReadOnly: []string{"/proc/sys"}}),
		"twice in a list":      phased(Phase{Name: "a", Hide: []string{"/x", "/x"}}),
		"hidden and revealed":  phased(Phase{Name: "a", Hide: []string{"/x"}, Reveal: []string{"/x"}}),
		"hidden and read-only": phased(Phase{Name: "a", Hide: []string{"/x"}, ReadOnly: []string{"/x/y"}}),
		"hidden and writable":  phased(Phase{Name: "a", Hide: []string{"/x"}, Writable: []string{"/x"}}),
		"hidden below hidden":  phased(Phase{Name: "a", Hide: []string{"/x", "/x/y"}}),
		"revealed too late":    phased(Phase{Name: "a", ReadOnly: []string{"/x"}}, Phase{Name: "b", Reveal: []string{"/x"}}),
		"back to a later one":  phased(Phase{Name: "a", Back: []string{"b"}}, Phase{Name: "b"}),
		"a bad network":        phased(Phase{Name: "a", Network: link}),
		"unknown capability":   phased(Phase{Name: "a", DropCapabilities: []string{"sys_everything"}}),
		"default not allowed":  phased(Phase{Name: "a", Users: []string{"user"}, User: "root"}),
		"user with a group":    phased(Phase{Name: "a", User: "user:0"}),
		"a limit above":        {Tier: TierContainer, Image: "b", Limits: Limits{Memory: 8 << 20}, Phases: []Phase{{Name: "a", Limits: PhaseLimits{Memory: 16 << 20}}}},
		"a main process":       {Tier: TierContainer, Image: "b", Command: []string{"x"}, Phases: []Phase{{Name: "a"}}},
		"on a host mount":      {Tier: TierContainer, Image: "b", Mounts: []HostMount{{"/data", "/x/data"}}, Phases: []Phase{{Name: "a", Hide: []string{"/x"}}}},
	} {
		if err := s.Validate(); !errors.Is(err, Invalid.Err()) {
			t.Errorf("%s: %v", name, err)
		}
	}
	good := phased(Phase{Name: "setup"}, Phase{Name: "code", Hide: []string{"/solution"}, ReadOnly: []string{"/repo/.git"}, Writable: []string{"/repo", "/tmp"},
		Users: []string{"user", "1000"}, User: "user", DropCapabilities: []string{"all"}},
		Phase{Name: "test", Reveal: []string{"/repo/tests"}, ReadOnly: []string{"/repo/tests"}, Back: []string{"code"}})
	if err := good.Validate(); err != nil {
		t.Fatal(err)
	}
}

func TestWhatIsHiddenInAPhase(t *testing.T) {
	s := phased(Phase{Name: "a", Hide: []string{"/h"}}, Phase{Name: "b", Reveal: []string{"/r", "/q"}}, Phase{Name: "c", Hide: []string{"/r"}, Reveal: []string{"/q"}})
	for i, want := range [][]string{{"/h", "/q", "/r"}, nil, {"/r"}} {
		if got := s.HiddenIn(i); !slices.Equal(got, want) {
			t.Errorf("phase %d hides %q, want %q", i, got, want)
		}
	}
}

func TestPhasesDecideTheNetwork(t *testing.T) {
	open, none := &NetworkPolicy{Mode: NetworkOpen}, &NetworkPolicy{Mode: NetworkNone}
	s := phased(Phase{Name: "a", Network: none}, Phase{Name: "b", Network: open}, Phase{Name: "c"})
	if !s.HasLink() || !s.PhasesNetwork() || s.NetworkPolicy().Mode != NetworkNone || s.PolicyIn(1).Mode != NetworkOpen || s.PolicyIn(2).Mode != "" {
		t.Error("the policies of phases are not what they say")
	}
	if phased(Phase{Name: "a", Network: none}).HasLink() || (&Spec{}).HasLink() {
		t.Error("a link without any policy that needs one")
	}
}
