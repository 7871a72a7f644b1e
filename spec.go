package dsec

import (
	"strings"
	"time"
)

// Tier is an isolation mechanism; it is the only thing a caller changes to get
// another one.
type Tier string

// The tiers.
const (
	TierContainer Tier = "container"
	TierMicroVM   Tier = "microvm"
	TierFullVM    Tier = "fullvm"
	TierFunction  Tier = "function"
)

// Isolation is what stands between a sandbox and the kernel of its machine, where a tier
// has more than one way. It is never a weaker one than was asked for.
type Isolation string

// The isolations.
const (
	IsolationDefault Isolation = ""       // what the tier gives by itself
	IsolationGVisor  Isolation = "gvisor" // of containers: a kernel in user space answers the system calls
)

// Boot is how a microVM begins.
type Boot string

// The ways to begin.
const (
	BootClone Boot = ""     // as a copy of a machine that has booted: at once, and sharing its memory
	BootCold  Boot = "cold" // by its own kernel: slower, with memory of its own, which it gives back as it gets idle
)

// Isolated says in a word what is between a sandbox and the kernel of its machine:
// "namespaces", "gvisor" or "vm".
func (s *Spec) Isolated() string {
	switch {
	case s.Isolation != IsolationDefault:
		return string(s.Isolation)
	case s.Tier == TierMicroVM, s.Tier == TierFullVM:
		return "vm"
	}
	return "namespaces"
}

// OOMPolicy says what an out-of-memory kill inside a command ends.
type OOMPolicy string

// The policies.
const (
	OOMExec    OOMPolicy = "exec"    // that command (137, oom=true); the sandbox lives; the default
	OOMSandbox OOMPolicy = "sandbox" // the whole sandbox, cause oom
)

// Limits bound one sandbox. Zero means the node's default, never "unlimited".
type Limits struct {
	CPU       float64 `json:"cpu"`        // cores; ceil(CPU) are visible
	CPUWeight int     `json:"cpu_weight"` // 1..10000, default 100
	Memory    int64   `json:"memory"`     // bytes
	Pids      int64   `json:"pids"`       // processes and threads
	Disk      int64   `json:"disk"`       // bytes of the writable layer
	Output    int64   `json:"output"`     // bytes of kept output over all execs
	// Bandwidth is of its network, in bytes a second, each way; zero is what the
	// machine can.
	Bandwidth int64 `json:"bandwidth,omitempty"`
}

// Lifetimes end a sandbox that nobody ends. Zero means the node's default;
// Negative values are invalid.
type Lifetimes struct {
	Idle      time.Duration `json:"idle"`      // without a running exec, an attached client or a renewal: stop
	Lifetime  time.Duration `json:"lifetime"`  // 0: no cap
	Retention time.Duration `json:"retention"` // how long a stopped disk is kept
	// KeepFailed: the disk of a sandbox that did not end well is packed before it
	// goes, and kept so long; 0: it is not. No default of the node's.
	KeepFailed time.Duration `json:"keep_failed,omitempty"`
}

// LayerRef names a layer: a digest ("sha256:…") or a tag ("name:tag").
type LayerRef string

// HostMount shows a host directory, read-only, inside a sandbox. Only paths
// under a root that the node's owner allowed are accepted.
type HostMount struct {
	Source string `json:"source"`
	Target string `json:"target"`
}

// Spec is what a caller asks for. It is pure data: the same on any machine.
type Spec struct {
	Name       string            `json:"name,omitempty"` // optional, unique among live sandboxes of a project
	Tier       Tier              `json:"tier"`
	Isolation  Isolation         `json:"isolation,omitempty"` // "" is what the tier gives by itself
	Boot       Boot              `json:"boot,omitempty"`      // of a microvm
	Image      LayerRef          `json:"image"`               // the base
	Layers     []LayerRef        `json:"layers,omitempty"`    // workspace, then toolkits, bottom to top
	Command    []string          `json:"command,omitempty"`   // main process; its end ends the sandbox; none: it idles
	Env        map[string]string `json:"env,omitempty"`       // added to the image's
	User       string            `json:"user,omitempty"`      // default of commands: name or "uid[:gid]"; the image's if empty
	Workdir    string            `json:"workdir,omitempty"`   // default of commands; the image's if empty
	Hostname   string            `json:"hostname,omitempty"`  // shortened to 63 bytes; the id if empty
	Network    NetworkMode       `json:"network,omitempty"`
	Allow      []NetworkRule     `json:"allow,omitempty"`       // of the network mode allow-list
	Cutoff     time.Time         `json:"cutoff,omitzero"`       // what is newer the mirror hides, but of Debian; zero: nothing
	MirrorDeny []string          `json:"mirror_deny,omitempty"` // what the mirror refuses: "pypi:requests"
	Limits     Limits            `json:"limits"`
	Lifetimes  Lifetimes         `json:"lifetimes"`
	Profile    string            `json:"profile,omitempty"`      // what it may ask of the kernel: "build" (default), "debug", "pwn", "desktop", "nested"
	NoNewPrivs bool              `json:"no_new_privs,omitempty"` // refuse setuid and file capabilities inside
	OOM        OOMPolicy         `json:"oom,omitempty"`
	Mounts     []HostMount       `json:"mounts,omitempty"`
	Phases     []Phase           `json:"phases,omitempty"` // it begins in the first; none: what a spec says holds all its life
	Labels     map[string]string `json:"labels,omitempty"`
	CallID     string            `json:"call_id,omitempty"`     // idempotency key
	RolloutKey string            `json:"rollout_key,omitempty"` // groups what belongs to one rollout
	Checkpoint string            `json:"checkpoint,omitempty"`  // digest of what it goes on from ("sha256:…"); see GoesOnFrom
	Watch      []string          `json:"watch,omitempty"`       // paths whose writes are evidence: "/tests/**", "**/answer.txt"; added to those always watched
}

// Caps on what comes from outside.
const (
	MaxLayers     = 64
	MaxLabels     = 64
	MaxEnvBytes   = 256 << 10
	MaxNameBytes  = 128
	MaxLabelBytes = 4 << 10
	MaxMounts     = 32
	MaxRefBytes   = 256  // of the name of a layer
	MaxUserBytes  = 256  // of "name" or "uid:gid"
	MaxKeyBytes   = 256  // of a call id and of a rollout key
	MaxHostBytes  = 255  // of a host name, which is shortened
	MaxWordBytes  = 64   // of a choice
	MaxPathBytes  = 4095 // as the kernel has it
	MaxSpecBytes  = 1 << 20
	MaxLifetime   = 30 * 24 * time.Hour
	MaxBatch      = 10_000 // sandboxes of one call
	MaxForks      = 1000   // copies of one call

	MaxCPU       = 4096    // cores
	MaxCPUWeight = 10000   // as the kernel has it
	MinMemory    = 4 << 20 // bytes: with less not even a shell runs
	MinDisk      = 1 << 20 // bytes
	MaxBytes     = 1 << 50 // of a limit: a petabyte is more than any node has
	MaxPids      = 4 << 20 // as the kernel has it
	MaxOutput    = 1 << 30 // bytes of kept output, which are on the node's own disk
	MinBandwidth = 4 << 10 // bytes a second: with less not even a name is found in time
	MaxBandwidth = 1 << 36 // bytes a second
)

// NetworkPolicy is the one it begins with.
func (s *Spec) NetworkPolicy() *NetworkPolicy {
	p := s.PolicyIn(0)
	return &p
}

// Validate reports the first thing in s that can never work, as an Invalid
// error that names the field. It touches nothing outside s.
func (s *Spec) Validate() error {
	bad := func(field, format string, args ...any) error {
		return Errorf(Invalid, "validate spec", field, format, args...)
	}
	switch s.Tier {
	case TierContainer, TierMicroVM, TierFullVM, TierFunction:
	default:
		return bad("tier", "unknown tier %s, want container, microvm or fullvm", Quote(string(s.Tier)))
	}
	switch {
	case s.Isolation == IsolationDefault:
	case s.Isolation != IsolationGVisor:
		return bad("isolation", "unknown isolation %s, want gvisor or none", Quote(string(s.Isolation)))
	case s.Tier != TierContainer:
		return bad("isolation", "gvisor is a way to isolate containers, not the tier %s", s.Tier)
	}
	if err := s.validateBoot(); err != nil {
		return err
	}
	if s.Image == "" {
		return bad("image", "is required")
	}
	if err := s.validateTexts(); err != nil {
		return err
	}
	if len(s.Layers) > MaxLayers {
		return bad("layers", "%d layers, at most %d", len(s.Layers), MaxLayers)
	}
	if err := CheckWatch(s.Watch); err != nil {
		return err
	}
	if err := (&NetworkPolicy{s.Network, s.Allow, s.Cutoff, s.MirrorDeny}).Validate(); err != nil {
		return err
	}
	if s.Network == NetworkOpen && (!s.Cutoff.IsZero() || len(s.MirrorDeny) > 0) {
		return bad("cutoff", "with the network mode %s everything can be had elsewhere: want %s or %s", NetworkOpen, NetworkMirror, NetworkAllow)
	}
	switch s.OOM {
	case "", OOMExec, OOMSandbox:
	default:
		return bad("oom", "unknown policy %s", Quote(string(s.OOM)))
	}
	if s.Name != "" && !validName(s.Name) {
		return bad("name", "%s, want at most %d letters, digits and ._-, a letter or digit first, and no sandbox id", Quote(s.Name), MaxNameBytes)
	}
	if err := s.Limits.validate(); err != nil {
		return err
	}
	if err := s.Lifetimes.validate(); err != nil {
		return err
	}
	if err := s.validateMaps(); err != nil {
		return err
	}
	return s.validatePhases()
}

func (s *Spec) validateBoot() error {
	switch {
	case s.Boot == BootClone, s.Boot == BootCold && s.Tier == TierMicroVM:
		return nil
	case s.Boot == BootCold:
		return Errorf(Invalid, "validate spec", "boot", "%s is a way to begin of the tier %s, not %s", s.Boot, TierMicroVM, s.Tier)
	}
	return Errorf(Invalid, "validate spec", "boot", "unknown way to begin %s", Quote(string(s.Boot)))
}

// validName keeps names apart from ids and usable in paths and command lines.
func validName(s string) bool {
	if len(s) > MaxNameBytes || s[0] == '.' || s[0] == '-' || s[0] == '_' {
		return false
	}
	for i := 0; i < len(s); i++ {
		c := s[i]
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '.' && c != '_' && c != '-' {
			return false
		}
	}
	_, _, err := ParseSandboxID(s)
	return err != nil
}

// text is a string of a spec.
type text struct {
	field, value string
	most         int
}

func (s *Spec) texts() []text {
	all := []text{{"image", string(s.Image), MaxRefBytes}, {"user", s.User, MaxUserBytes}, {"workdir", s.Workdir, MaxPathBytes},
		{"hostname", s.Hostname, MaxHostBytes}, {"profile", s.Profile, MaxWordBytes}, {"checkpoint", s.Checkpoint, MaxRefBytes}, {"call_id", s.CallID, MaxKeyBytes},
		{"rollout_key", s.RolloutKey, MaxKeyBytes}}
	for _, l := range s.Layers {
		all = append(all, text{"layers", string(l), MaxRefBytes})
	}
	for _, r := range s.Allow {
		all = append(all, text{"allow", r.Domain, MaxHostBytes}, text{"allow", r.CIDR, MaxWordBytes}, text{"allow", r.Protocol, MaxWordBytes}, text{"allow", r.Mirror, MaxWordBytes})
		for _, p := range r.Ports {
			all = append(all, text{"allow", p, MaxWordBytes})
		}
	}
	for i := range s.Phases {
		all = append(all, s.Phases[i].texts()...)
	}
	for _, d := range s.MirrorDeny {
		all = append(all, text{"mirror_deny", d, 2 * MaxHostBytes})
	}
	for _, m := range s.Mounts {
		all = append(all, text{"mounts", m.Source, MaxPathBytes}, text{"mounts", m.Target, MaxPathBytes})
	}
	for _, w := range s.Watch {
		all = append(all, text{"watch", w, MaxWatchBytes})
	}
	for _, a := range s.Command {
		all = append(all, text{"command", a, MaxSpecBytes})
	}
	for k, v := range s.Labels {
		all = append(all, text{"labels", k, MaxLabelBytes}, text{"labels", v, MaxLabelBytes})
	}
	for k, v := range s.Env {
		all = append(all, text{"env", k, MaxEnvBytes}, text{"env", v, MaxEnvBytes})
	}
	return all
}

// validateTexts bounds each string and the sum of all: what is asked for is
// written down, listed and kept for a long time. No string has a NUL, at which
// the kernel would end it.
func (s *Spec) validateTexts() error {
	total := 0
	for _, t := range s.texts() {
		if len(t.value) > t.most {
			return Errorf(Invalid, "validate spec", t.field, "%d bytes, at most %d", len(t.value), t.most)
		}
		if strings.Contains(t.value, "\x00") {
			return Errorf(Invalid, "validate spec", t.field, "%s holds a NUL byte", Quote(t.value))
		}
		if total += len(t.value) + 8; total > MaxSpecBytes { // 8: what is kept with each
			return Errorf(Invalid, "validate spec", t.field, "more than %d bytes in all", MaxSpecBytes)
		}
	}
	seen := map[LayerRef]bool{s.Image: true}
	for _, l := range s.Layers {
		if seen[l] {
			return Errorf(Invalid, "validate spec", "layers", "%s is given twice", Quote(string(l)))
		}
		seen[l] = true
	}
	return nil
}

func (s *Spec) validateMaps() error {
	bad := func(field, format string, args ...any) error {
		return Errorf(Invalid, "validate spec", field, format, args...)
	}
	total := 0
	for k, v := range s.Env {
		if k == "" || strings.Contains(k, "=") {
			return bad("env", "variable %s is not representable", Quote(k))
		}
		total += len(k) + len(v) + 2
	}
	if total > MaxEnvBytes {
		return bad("env", "%d bytes, at most %d", total, MaxEnvBytes)
	}
	if len(s.Labels) > MaxLabels {
		return bad("labels", "%d labels, at most %d", len(s.Labels), MaxLabels)
	}
	for k, v := range s.Labels {
		if k == "" || len(k)+len(v) > MaxLabelBytes {
			return bad("labels", "label %s is empty or longer than %d bytes", Quote(k), MaxLabelBytes)
		}
	}
	if s.Workdir != "" && !strings.HasPrefix(s.Workdir, "/") {
		return bad("workdir", "%s is not absolute", Quote(s.Workdir))
	}
	if len(s.Mounts) > MaxMounts {
		return bad("mounts", "%d mounts, at most %d", len(s.Mounts), MaxMounts)
	}
	for _, m := range s.Mounts {
		if !strings.HasPrefix(m.Source, "/") || !strings.HasPrefix(m.Target, "/") {
			return bad("mounts", "%s:%s is not absolute", Quote(m.Source), Quote(m.Target))
		}
	}
	return nil
}

func (l *Limits) validate() error {
	bad := func(field, format string, args ...any) error {
		return Errorf(Invalid, "validate spec", "limits."+field, format, args...)
	}
	switch {
	case !(l.CPU >= 0 && l.CPU <= MaxCPU) || (l.CPU > 0 && l.CPU < 0.01): // so that NaN is refused
		return bad("cpu", "%g cores, want 0.01 to %d", l.CPU, MaxCPU)
	case l.CPUWeight < 0 || l.CPUWeight > MaxCPUWeight:
		return bad("cpu_weight", "%d, want 1 to %d", l.CPUWeight, MaxCPUWeight)
	case l.Memory < 0 || l.Memory > MaxBytes || (l.Memory > 0 && l.Memory < MinMemory):
		return bad("memory", "%d bytes, want 4 MiB to 1 PiB", l.Memory)
	case l.Pids < 0 || l.Pids > MaxPids || (l.Pids > 0 && l.Pids < 4):
		return bad("pids", "%d, want 4 to %d", l.Pids, MaxPids)
	case l.Disk < 0 || l.Disk > MaxBytes || (l.Disk > 0 && l.Disk < MinDisk):
		return bad("disk", "%d bytes, want 1 MiB to 1 PiB", l.Disk)
	case l.Output < 0 || l.Output > MaxOutput:
		return bad("output", "%d bytes, want 0 to 1 GiB", l.Output)
	case l.Bandwidth < 0 || l.Bandwidth > MaxBandwidth || (l.Bandwidth > 0 && l.Bandwidth < MinBandwidth):
		return bad("bandwidth", "%d bytes a second, want %d to %d", l.Bandwidth, MinBandwidth, MaxBandwidth)
	}
	return nil
}

func (l *Lifetimes) validate() error {
	for _, f := range []struct {
		name string
		d    time.Duration
	}{{"idle", l.Idle}, {"lifetime", l.Lifetime}, {"retention", l.Retention}, {"keep_failed", l.KeepFailed}} {
		if f.d < 0 || f.d > MaxLifetime {
			return Errorf(Invalid, "validate spec", "lifetimes."+f.name, "%v, want 0 to %v", f.d, MaxLifetime)
		}
	}
	return nil
}

// ShortHostname returns a host name the kernel accepts: at most 63 bytes, DNS
// label characters only.
func ShortHostname(s string) string {
	b := make([]byte, 0, 63)
	for i := 0; i < len(s) && len(b) < 63; i++ {
		c := s[i]
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', c == '.':
		case len(b) == 0:
			continue
		default:
			c = '-'
		}
		b = append(b, c)
	}
	if len(b) == 0 {
		return "sandbox"
	}
	return strings.TrimRight(string(b), "-.")
}
