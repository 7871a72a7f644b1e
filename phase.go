package dsec

import (
	"path"
	"slices"
	"strings"
	"time"
)

// Phase is a stage of a sandbox's life with rights of its own. A sandbox begins
// in the first phase of its spec and moves on when it is told to; each move kills
// what runs. docs/formats/phases.md says exactly what each field means.
type Phase struct {
	Name    string         `json:"name"`
	Network *NetworkPolicy `json:"network,omitempty"` // nil: the sandbox's own, see Spec.PolicyIn

	// Rights of the commands that begin in it.
	Users            []string `json:"users,omitempty"`             // who they may run as, as the image names them or "uid"; none: anybody
	User             string   `json:"user,omitempty"`              // who they run as if nobody is named; "": the sandbox's
	DropCapabilities []string `json:"drop_capabilities,omitempty"` // "kill", "setuid", … of those the profile leaves, or "all"
	NoNewPrivs       bool     `json:"no_new_privs,omitempty"`      // setuid and file capabilities give nothing
	Writable         []string `json:"writable,omitempty"`          // only below these, /dev and /proc; none: anywhere
	Executables      []string `json:"executables,omitempty"`       // files that may be started, or directories of such; none: any

	// Files, for everybody inside.
	Hide     []string `json:"hide,omitempty"`      // not there in this phase
	Reveal   []string `json:"reveal,omitempty"`    // not there in any phase before this one
	ReadOnly []string `json:"read_only,omitempty"` // neither changed nor moved

	EndServices bool `json:"end_services,omitempty"` // a move to it ends services, too

	Limits PhaseLimits `json:"limits"`
	Back   []string    `json:"back,omitempty"` // earlier phases it may go back to
}

// PhaseLimits lower limits of the sandbox; zero means as they are.
type PhaseLimits struct {
	CPU    float64 `json:"cpu,omitempty"`    // cores
	Memory int64   `json:"memory,omitempty"` // bytes
	Pids   int64   `json:"pids,omitempty"`   // processes and threads
}

// PhaseState is the phase in force.
type PhaseState struct {
	Name       string    `json:"name"`
	Generation uint64    `json:"generation"` // 1 at creation; grows with each move
	Since      time.Time `json:"since"`
	// Moving names the phase that a move has begun to and not ended: nothing runs
	// inside, and nothing can be started, until the same move is asked for again.
	Moving string `json:"moving,omitempty"`
}

// Caps on what phases may have.
const (
	MaxPhases     = 16
	MaxPhasePaths = 64 // of each list
	MaxPhaseUsers = 16
)

// CapabilityNames are those a phase may drop, by the kernel's numbers.
var CapabilityNames = map[string]int{"chown": 0, "dac_override": 1, "fowner": 3, "fsetid": 4, "kill": 5, "setgid": 6, "setuid": 7,
	"setpcap": 8, "net_bind_service": 10, "net_admin": 12, "net_raw": 13, "sys_chroot": 18, "sys_ptrace": 19, "sys_admin": 21, "sys_resource": 24,
	"mknod": 27, "audit_write": 29, "setfcap": 31}

// PhaseIndex finds a phase by its name; -1: there is none.
func (s *Spec) PhaseIndex(name string) int {
	return slices.IndexFunc(s.Phases, func(p Phase) bool { return p.Name == name })
}

// HiddenIn lists what is not there in the i-th phase: what it hides, and what a
// later one reveals and no earlier one, nor itself, has.
func (s *Spec) HiddenIn(i int) []string {
	hidden := slices.Clone(s.Phases[i].Hide)
	for j := i + 1; j < len(s.Phases); j++ {
		for _, p := range s.Phases[j].Reveal {
			shown := slices.ContainsFunc(s.Phases[:i+1], func(e Phase) bool { return slices.Contains(e.Reveal, p) })
			if !shown && !slices.Contains(hidden, p) {
				hidden = append(hidden, p)
			}
		}
	}
	slices.Sort(hidden)
	return hidden
}

// PolicyIn is what may be reached in the i-th phase: what it says, else what the
// sandbox has without phases. What the mirror hides is the same in all.
func (s *Spec) PolicyIn(i int) NetworkPolicy {
	p := NetworkPolicy{Mode: s.Network, Allow: s.Allow}
	if i < len(s.Phases) && s.Phases[i].Network != nil {
		p = *s.Phases[i].Network
	}
	p.Cutoff, p.MirrorDeny = s.Cutoff, s.MirrorDeny
	return p
}

// PhasesNetwork says whether moves change the network: some phase has a policy.
func (s *Spec) PhasesNetwork() bool {
	return slices.ContainsFunc(s.Phases, func(p Phase) bool { return p.Network != nil })
}

// HasLink says whether it ever reaches beyond itself: such a sandbox is made with
// a network, even if that is closed at first.
func (s *Spec) HasLink() bool {
	for i := range max(1, len(s.Phases)) {
		if m := s.PolicyIn(i).Mode; m != "" && m != NetworkNone {
			return true
		}
	}
	return false
}

// LimitsIn are the limits in the i-th phase.
func (s *Spec) LimitsIn(i int) Limits {
	l := s.Limits
	if i >= len(s.Phases) {
		return l
	}
	p := s.Phases[i].Limits
	if p.CPU > 0 {
		l.CPU = p.CPU
	}
	if p.Memory > 0 {
		l.Memory = p.Memory
	}
	if p.Pids > 0 {
		l.Pids = p.Pids
	}
	return l
}

// MayMove says why one phase may not follow another, as an IllegalState error.
func (s *Spec) MayMove(object, from, to string) error {
	const op = "set phase of sandbox"
	i, j := s.PhaseIndex(from), s.PhaseIndex(to)
	switch {
	case len(s.Phases) == 0:
		return Errorf(IllegalState, op, object, "it was made without phases")
	case j < 0:
		return Errorf(Invalid, op, object, "it has no phase %s", Quote(to))
	case i < 0 || j > i || slices.Contains(s.Phases[i].Back, to):
		return nil
	}
	return Errorf(IllegalState, op, object, "from %s there is no way back to %s", Quote(from), Quote(to))
}

func (s *Spec) validatePhases() error {
	bad := func(field, format string, args ...any) error {
		return Errorf(Invalid, "validate spec", field, format, args...)
	}
	if len(s.Phases) > MaxPhases {
		return bad("phases", "%d, at most %d", len(s.Phases), MaxPhases)
	}
	if len(s.Phases) > 0 && len(s.Command) > 0 {
		return bad("phases", "a sandbox with phases has no main process, whose end with the first move would be its own")
	}
	for i := range s.Phases {
		p := &s.Phases[i]
		at := "phases " + Quote(p.Name)
		if p.Name == "" || len(p.Name) > MaxWordBytes || !isWord(p.Name) {
			return bad(at, "a name is 1 to %d letters, digits, _ and -", MaxWordBytes)
		}
		if s.PhaseIndex(p.Name) != i {
			return bad(at, "there are two")
		}
		for _, b := range p.Back {
			if j := s.PhaseIndex(b); j < 0 || j >= i {
				return bad(at, "back to %s, which is no earlier phase", Quote(b))
			}
		}
		if err := p.validate(at, s); err != nil {
			return err
		}
		if err := s.validatePaths(i, at); err != nil {
			return err
		}
	}
	return nil
}

// texts are all of a phase, which count towards what a spec may hold.
func (p *Phase) texts() []text {
	var all []text
	for _, l := range [][]string{{p.Name, p.User}, p.Users, p.DropCapabilities, p.Writable, p.Executables, p.Hide, p.Reveal, p.ReadOnly, p.Back} {
		for _, v := range l {
			all = append(all, text{"phases", v, MaxPathBytes})
		}
	}
	if p.Network == nil {
		return all
	}
	for _, r := range p.Network.Allow {
		for _, v := range append([]string{r.Domain, r.CIDR, r.Mirror, r.Protocol}, r.Ports...) {
			all = append(all, text{"phases", v, MaxHostBytes})
		}
	}
	return all
}

func isWord(s string) bool {
	return strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-") == ""
}

// validate looks at what a phase says by itself.
func (p *Phase) validate(at string, s *Spec) error {
	bad := func(format string, args ...any) error { return Errorf(Invalid, "validate spec", at, format, args...) }
	if p.Network != nil {
		if err := p.Network.Validate(); err != nil {
			return E(Invalid, "validate spec", at, err)
		}
		if !p.Network.Cutoff.IsZero() || len(p.Network.MirrorDeny) > 0 {
			return bad("cutoff and mirror_deny are the sandbox's")
		}
		if p.Network.Mode == NetworkOpen && (!s.Cutoff.IsZero() || len(s.MirrorDeny) > 0) {
			return bad("with the network mode %s nothing of the mirror is hidden", NetworkOpen)
		}
	}
	for _, c := range p.DropCapabilities {
		if _, ok := CapabilityNames[c]; !ok && c != "all" {
			return bad("unknown capability %s", Quote(c))
		}
	}
	if len(p.Users) > MaxPhaseUsers || len(p.DropCapabilities) > 2*len(CapabilityNames) {
		return bad("more than %d users or too many capabilities", MaxPhaseUsers)
	}
	for _, u := range append([]string{p.User}, p.Users...) {
		if strings.Contains(u, ":") || len(u) > MaxUserBytes || strings.Contains(u, "\x00") {
			return bad("user %s, want a name or a uid", Quote(u))
		}
	}
	if len(p.Users) > 0 && !slices.Contains(p.Users, p.User) {
		return bad("the default user %s is not among users", Quote(p.User))
	}
	l, most := p.Limits, s.Limits
	whole := Limits{CPU: l.CPU, Memory: l.Memory, Pids: l.Pids}
	if err := whole.validate(); err != nil {
		return E(Invalid, "validate spec", at, err)
	}
	if l.CPU > most.CPU && most.CPU > 0 || l.Memory > most.Memory && most.Memory > 0 || l.Pids > most.Pids && most.Pids > 0 {
		return bad("a limit is above the sandbox's")
	}
	return nil
}

// systemPaths are file systems of the kernel's, not of a disk.
var systemPaths = []string{"/dev", "/proc", "/sys"}

// validatePaths looks at the paths of the i-th phase, and at each against those
// that mean something else.
func (s *Spec) validatePaths(i int, at string) error {
	bad := func(format string, args ...any) error { return Errorf(Invalid, "validate spec", at, format, args...) }
	p := &s.Phases[i]
	for _, l := range []struct {
		name  string
		paths []string
		disk  bool
	}{{"hide", p.Hide, true}, {"reveal", p.Reveal, true}, {"read_only", p.ReadOnly, true}, {"writable", p.Writable, false}, {"executables", p.Executables, false}} {
		if len(l.paths) > MaxPhasePaths {
			return bad("%d paths in %s, at most %d", len(l.paths), l.name, MaxPhasePaths)
		}
		for k, f := range l.paths {
			switch {
			case !strings.HasPrefix(f, "/") || path.Clean(f) != f || f == "/" || len(f) > MaxPathBytes || strings.Contains(f, "\x00"):
				return bad("%s in %s is not an absolute, clean path below the root", Quote(f), l.name)
			case slices.Contains(l.paths[:k], f):
				return bad("%s is twice in %s", Quote(f), l.name)
			case l.disk && slices.ContainsFunc(systemPaths, func(q string) bool { return within(f, q) }):
				return bad("%s in %s is not on the disk", Quote(f), l.name)
			case l.disk && slices.ContainsFunc(s.Mounts, func(m HostMount) bool { return overlap(f, path.Clean(m.Target)) }):
				return bad("%s in %s meets a host mount", Quote(f), l.name)
			}
		}
	}
	hidden := s.HiddenIn(i)
	for k, h := range hidden {
		if slices.Contains(p.Reveal, h) {
			return bad("%s is hidden and revealed", Quote(h))
		}
		if j := slices.IndexFunc(hidden[:k], func(q string) bool { return within(h, q) }); j >= 0 {
			return bad("%s is below %s, which is hidden too", Quote(h), Quote(hidden[j]))
		}
		for _, list := range [][]string{p.ReadOnly, p.Writable} {
			if j := slices.IndexFunc(list, func(q string) bool { return within(q, h) }); j >= 0 {
				return bad("%s is hidden, and %s has a right", Quote(h), Quote(list[j]))
			}
		}
	}
	return nil
}

// within: a is b or below it.
func within(a, b string) bool { return a == b || strings.HasPrefix(a, strings.TrimSuffix(b, "/")+"/") }

func overlap(a, b string) bool { return within(a, b) || within(b, a) }
