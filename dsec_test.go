package dsec

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestEveryMoveIsInTheTableOrAnErrorThatNamesBoth(t *testing.T) {
	for _, from := range States {
		for _, to := range States {
			got, err := MoveState("sbx", from, to)
			if slices.Contains(moves[from], to) {
				if err != nil || got != to {
					t.Errorf("%s → %s: %v, %v", from, to, got, err)
				}
				continue
			}
			var m *MoveError
			if got != from || ClassOf(err) != IllegalState || !errors.As(err, &m) || m.From != from || m.To != to {
				t.Errorf("%s → %s: %v, %v", from, to, got, err)
			}
		}
	}
}

func TestStatesEndWhereTheDiagramSays(t *testing.T) {
	for _, s := range States {
		if s != Deleted && s != Failed && len(moves[s]) == 0 {
			t.Errorf("%s is a dead end", s)
		}
		if s != Deleted && s != Failed && !slices.Contains(moves[s], Failed) {
			t.Errorf("%s cannot fail", s)
		}
		if s.Final() == s.Live() && s != Stopped {
			t.Errorf("%s is final %v and live %v", s, s.Final(), s.Live())
		}
	}
	if len(moves[Deleted]) != 0 {
		t.Error("something follows deleted")
	}
}

func TestSandboxIDsNameTheirNodeAndAreLabels(t *testing.T) {
	seen := map[SandboxID]bool{}
	for _, node := range []NodeID{"a", "bench", "abcdefghijklmnop"} {
		for range 200 {
			id := NewSandboxID(node)
			if seen[id] {
				t.Fatalf("%s twice", id)
			}
			seen[id] = true
			if len(id) > 63 || strings.ContainsAny(string(id), "-._") || id[0] != 's' {
				t.Errorf("%s is no label", id)
			}
			back, n, err := ParseSandboxID(string(id))
			if err != nil || back != id || n != node || id.Node() != node {
				t.Errorf("%s: %v, %v, %v", id, back, n, err)
			}
		}
	}
}

func FuzzParseSandboxID(f *testing.F) {
	f.Add("sfabcdefpuhamfz4sxa4tu3jo3wr")
	f.Add("../../etc")
	f.Fuzz(func(t *testing.T, s string) {
		id, node, err := ParseSandboxID(s)
		if err != nil {
			if ClassOf(err) != Invalid || id != "" {
				t.Errorf("%q: %v, %v", s, id, err)
			}
			return
		}
		if strings.ContainsAny(s, "/.-\x00") || string(id) != s || !strings.Contains(s, string(node)) {
			t.Errorf("%q was taken as %s on %s", s, id, node)
		}
	})
}

func TestClassSurvivesWrapping(t *testing.T) {
	err := fmt.Errorf("outer: %w", E(NoSpace, "write file", "/x", errors.New("disk quota exceeded")))
	if ClassOf(err) != NoSpace || !errors.Is(err, NoSpace.Err()) || errors.Is(err, NotFound.Err()) {
		t.Errorf("%v has class %s", err, ClassOf(err))
	}
	if got := E(NoSpace, "write file", "/x", errors.New("disk quota exceeded")).Error(); got != "write file /x: disk quota exceeded" {
		t.Error(got)
	}
	for err, want := range map[error]Class{nil: "", context.Canceled: Canceled, context.DeadlineExceeded: Timeout, errors.New("x"): Internal} {
		if got := ClassOf(err); got != want {
			t.Errorf("%v: %s, want %s", err, got, want)
		}
	}
}

// An agent that learns to crash its node earns no mask.
func TestMaskIsForWhatThePlatformDid(t *testing.T) {
	for _, c := range Causes {
		platform := c.Infra() || c == CausePreempted || c == CauseUnknown
		if got := NewResult(c, "run", InducedByPlatform).Mask(); got != platform {
			t.Errorf("%s by the platform: mask %v", c, got)
		}
		if NewResult(c, "run", InducedBySelf).Mask() {
			t.Errorf("%s induced by itself is masked", c)
		}
		if c.Outcome() == "" || (c.Outcome() == OutcomeInfra) != c.Infra() {
			t.Errorf("%s has outcome %q", c, c.Outcome())
		}
	}
}

func TestG16_LifetimesAreBounded(t *testing.T) {
	ok := Spec{Tier: TierContainer, Image: "x"}
	if err := ok.Validate(); err != nil {
		t.Fatal(err)
	}
	for _, d := range []time.Duration{-1, MaxLifetime + 1} {
		for _, l := range []Lifetimes{{Idle: d}, {Lifetime: d}, {Retention: d}} {
			s := ok
			s.Lifetimes = l
			if err := s.Validate(); ClassOf(err) != Invalid {
				t.Errorf("%+v: %v", l, err)
			}
		}
	}
}

func TestSpecsThatCanNeverWorkNameTheField(t *testing.T) {
	for field, spoil := range map[string]func(*Spec){
		"tier":    func(s *Spec) { s.Tier = "vm" },
		"image":   func(s *Spec) { s.Image = "" },
		"layers":  func(s *Spec) { s.Layers = make([]LayerRef, MaxLayers+1) },
		"network": func(s *Spec) { s.Network = "all" },
		"allow":   func(s *Spec) { s.Allow = []NetworkRule{{CIDR: "1.2.3.4"}} },
		"allow 1": func(s *Spec) { s.Network, s.Allow = NetworkAllow, []NetworkRule{{Domain: "a.b"}, {Domain: "a b"}} },
		"allow 0": func(s *Spec) { s.Network, s.Allow = NetworkAllow, []NetworkRule{{Mirror: "pypi", Domain: "a.b"}} },
		"llow 0":  func(s *Spec) { s.Network, s.Allow = NetworkAllow, []NetworkRule{{Mirror: "cargo"}} },
		"low 0": func(s *Spec) {
			s.Network, s.Allow = NetworkAllow, []NetworkRule{{Mirror: "npm", Ports: []string{"80"}}}
		},
		"mirror_deny":   func(s *Spec) { s.Network, s.MirrorDeny = NetworkMirror, []string{"requests"} },
		"irror_deny":    func(s *Spec) { s.Network, s.MirrorDeny = NetworkMirror, []string{"pypi:"} },
		"rror_deny":     func(s *Spec) { s.Network, s.MirrorDeny = NetworkMirror, make([]string, MaxDenied+1) },
		"cutoff":        func(s *Spec) { s.Network, s.Cutoff = NetworkOpen, time.Unix(1, 0) },
		"utoff":         func(s *Spec) { s.Network, s.Cutoff = NetworkMirror, time.Unix(1<<40, 0) },
		"oom":           func(s *Spec) { s.OOM = "nobody" },
		"name":          func(s *Spec) { s.Name = strings.Repeat("x", MaxNameBytes+1) },
		"limits.cpu":    func(s *Spec) { s.Limits.CPU = math.NaN() },
		"limits.memory": func(s *Spec) { s.Limits.Memory = -1 },
		"limits.pids":   func(s *Spec) { s.Limits.Pids = 1 },
		"limits.disk":   func(s *Spec) { s.Limits.Disk = 1 },
		"env":           func(s *Spec) { s.Env = map[string]string{"A=B": ""} },
		"labels":        func(s *Spec) { s.Labels = map[string]string{"": "x"} },
		"command":       func(s *Spec) { s.Command = []string{"a\x00b"} },
		"workdir":       func(s *Spec) { s.Workdir = "here" },
		"mounts":        func(s *Spec) { s.Mounts = []HostMount{{Source: "x", Target: "/y"}} },
	} {
		s := Spec{Tier: TierContainer, Image: "x"}
		spoil(&s)
		var e *Error
		if err := s.Validate(); !errors.As(err, &e) || e.Class != Invalid || !strings.Contains(e.Object, field) {
			t.Errorf("%s: %v", field, err)
		}
	}
}

func TestLimitsHaveAMost(t *testing.T) {
	for _, l := range []Limits{{CPU: math.Inf(1)}, {CPU: math.Inf(-1)}, {CPU: math.NaN()}, {CPU: 1e300}, {CPUWeight: math.MaxInt32},
		{Memory: math.MaxInt64}, {Memory: MaxBytes + 1}, {Memory: math.MinInt64}, {Disk: math.MaxInt64}, {Disk: math.MinInt64},
		{Pids: math.MaxInt64}, {Pids: MaxPids + 1}, {Output: MaxOutput + 1}, {Output: -1}} {
		s := Spec{Tier: TierContainer, Image: "x", Limits: l}
		if err := s.Validate(); ClassOf(err) != Invalid {
			t.Errorf("%+v: %v", l, err)
		}
	}
	s := Spec{Tier: TierContainer, Image: "x", Limits: Limits{CPU: MaxCPU, CPUWeight: MaxCPUWeight, Memory: MaxBytes, Disk: MaxBytes,
		Pids: MaxPids, Output: MaxOutput}}
	if err := s.Validate(); err != nil {
		t.Error(err)
	}
}

func TestEveryTextOfASpecIsBounded(t *testing.T) {
	put := map[string]func(*Spec, string){
		"image":       func(s *Spec, v string) { s.Image = LayerRef(v) },
		"layers":      func(s *Spec, v string) { s.Layers = []LayerRef{LayerRef(v)} },
		"name":        func(s *Spec, v string) { s.Name = v },
		"command":     func(s *Spec, v string) { s.Command = []string{"sh", v} },
		"env":         func(s *Spec, v string) { s.Env = map[string]string{"A": v} },
		"env ":        func(s *Spec, v string) { s.Env = map[string]string{v: "x"} },
		"user":        func(s *Spec, v string) { s.User = v },
		"workdir":     func(s *Spec, v string) { s.Workdir = "/" + v },
		"hostname":    func(s *Spec, v string) { s.Hostname = v },
		"profile":     func(s *Spec, v string) { s.Profile = v },
		"mounts":      func(s *Spec, v string) { s.Mounts = []HostMount{{Source: "/" + v, Target: "/x"}} },
		"mounts ":     func(s *Spec, v string) { s.Mounts = []HostMount{{Source: "/x", Target: "/" + v}} },
		"labels":      func(s *Spec, v string) { s.Labels = map[string]string{"k": v} },
		"labels ":     func(s *Spec, v string) { s.Labels = map[string]string{v: "x"} },
		"call_id":     func(s *Spec, v string) { s.CallID = v },
		"rollout_key": func(s *Spec, v string) { s.RolloutKey = v },
		"tier":        func(s *Spec, v string) { s.Tier = Tier(v) },
		"network":     func(s *Spec, v string) { s.Network = NetworkMode(v) },
		"allow":       func(s *Spec, v string) { s.Network, s.Allow = NetworkAllow, []NetworkRule{{Domain: v}} },
		"allow ":      func(s *Spec, v string) { s.Network, s.Allow = NetworkAllow, []NetworkRule{{CIDR: v}} },
		"allow  ": func(s *Spec, v string) {
			s.Network, s.Allow = NetworkAllow, []NetworkRule{{Domain: "a.b", Protocol: v}}
		},
		"allow   ": func(s *Spec, v string) {
			s.Network, s.Allow = NetworkAllow, []NetworkRule{{Domain: "a.b", Ports: []string{v}}}
		},
		"allow    ": func(s *Spec, v string) {
			s.Network, s.Allow = NetworkAllow, []NetworkRule{{Mirror: v}}
		},
		"mirror_deny": func(s *Spec, v string) { s.Network, s.MirrorDeny = NetworkMirror, []string{"pypi:" + v} },
		"oom":         func(s *Spec, v string) { s.OOM = OOMPolicy(v) },
	}
	for field, set := range put {
		for name, v := range map[string]string{"a NUL": "a\x00b", "2 MiB": strings.Repeat("x", 2<<20)} {
			s := Spec{Tier: TierContainer, Image: "x"}
			set(&s, v)
			var e *Error
			if err := s.Validate(); !errors.As(err, &e) || e.Class != Invalid || e.Object != strings.TrimSpace(field) {
				t.Errorf("%s of %s: %v", field, name, err)
			}
		}
	}
	many := Spec{Tier: TierContainer, Image: "x", Command: make([]string, 1<<20)}
	if err := many.Validate(); ClassOf(err) != Invalid {
		t.Errorf("a million empty arguments: %v", err)
	}
	for _, l := range [][]LayerRef{{"a", "b", "a"}, {"x"}} {
		s := Spec{Tier: TierContainer, Image: "x", Layers: l}
		if err := s.Validate(); ClassOf(err) != Invalid {
			t.Errorf("%v on x: %v", l, err)
		}
	}
}

func TestNamesAreUsableAndNoIDs(t *testing.T) {
	for name, ok := range map[string]bool{"dev": true, "a.b_c-9": true, "../x": false, "a:b": false, "BAD name!": false, "-x": false,
		string(NewSandboxID("abc")): false} {
		s := Spec{Tier: TierContainer, Image: "x", Name: name}
		if err := s.Validate(); (err == nil) != ok {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func TestHostNamesAreShortenedToLabels(t *testing.T) {
	for in, want := range map[string]string{
		"": "sandbox", "a_b c": "a-b-c", "--x": "x", "x.": "x", strings.Repeat("y", 200): strings.Repeat("y", 63), "ü": "sandbox",
	} {
		if got := ShortHostname(in); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
}

func TestAWayToBeginIsOfMicroVMs(t *testing.T) {
	for _, c := range []struct {
		tier Tier
		boot Boot
		ok   bool
	}{{TierMicroVM, BootClone, true}, {TierMicroVM, BootCold, true}, {TierContainer, BootClone, true}, {TierContainer, BootCold, false},
		{TierFullVM, BootCold, false}, {TierMicroVM, "warm", false}} {
		s := Spec{Tier: c.tier, Boot: c.boot, Image: "base:1"}
		if err := s.Validate(); (err == nil) != c.ok || err != nil && (ClassOf(err) != Invalid || !strings.Contains(err.Error(), "boot")) {
			t.Errorf("%s %q: %v", c.tier, c.boot, err)
		}
	}
}

func TestAnIsolationIsOfContainers(t *testing.T) {
	for _, c := range []struct {
		tier      Tier
		isolation Isolation
		isolated  string // "": it is invalid
	}{{TierContainer, "", "namespaces"}, {TierContainer, IsolationGVisor, "gvisor"}, {TierMicroVM, "", "vm"}, {TierFullVM, "", "vm"}, {TierFunction, "", "namespaces"},
		{TierMicroVM, IsolationGVisor, ""}, {TierContainer, "kata", ""}} {
		s := Spec{Tier: c.tier, Isolation: c.isolation, Image: "base:1"}
		err := s.Validate()
		if (err == nil) != (c.isolated != "") || err == nil && s.Isolated() != c.isolated {
			t.Errorf("%s %q: %v, isolated by %s", c.tier, c.isolation, err, s.Isolated())
		}
	}
}

func TestAnErrorSaysNothingTwice(t *testing.T) {
	inner := Errorf(NotFound, "find", "x", "no %s", "trace")
	for _, c := range []struct {
		err  error
		want string
	}{
		{E(NotFound, "find", "x", inner), "find x: no trace"},
		{E(NotFound, "find", "y", inner), "find y: find x: no trace"},
		{E(NotFound, "read", "x", inner), "read x: find x: no trace"},
		{E(Unavailable, "find", "x", inner), "find x: find x: no trace"}, // both classes are to be found
		{E(NotFound, "find", "x", E(NotFound, "find", "x", nil)), "find x: not_found"},
	} {
		if c.err.Error() != c.want || !errors.Is(c.err, NotFound.Err()) {
			t.Errorf("%v, want %s", c.err, c.want)
		}
	}
}
