package user

import (
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/config"
)

// specFlags are the flags that describe a sandbox.
type specFlags struct {
	spec    dsec.Spec
	tier    string
	layers  []string
	env     []string
	labels  []string
	mounts  []string
	network string
	allow   []string
	cutoff  string
	oom     string
	phases  string
	memory  limitFlag
	disk    limitFlag
	output  bytesFlag

	bandwidth limitFlag
}

func (s *specFlags) register(c *cobra.Command) {
	f, p := c.Flags(), &s.spec
	f.StringVar(&p.Name, "name", "", "name, unique among the live sandboxes of the project")
	f.StringVar((*string)(&p.Isolation), "isolation", "", "what a container has between itself and the kernel, besides namespaces: gvisor")
	f.StringVar(&s.tier, "tier", string(dsec.TierContainer), "container, microvm (a kernel of its own) or fullvm (a whole machine from a disk image)")
	f.StringVar((*string)(&p.Boot), "boot", "", "how a microvm begins: cold boots its own kernel, for a machine that lives long and gives idle memory back (default: a copy of one that has booted)")
	f.StringArrayVar(&s.layers, "layer", nil, "layer above the image, bottom to top (repeat)")
	f.StringArrayVarP(&s.env, "env", "e", nil, "NAME=VALUE of every command (repeat)")
	f.StringVarP(&p.User, "user", "u", "", "user of commands: name, uid or uid:gid (default: the image's)")
	f.StringVarP(&p.Workdir, "workdir", "w", "", "directory of commands, made if missing (default: the image's)")
	f.StringVar(&p.Hostname, "hostname", "", "host name (default: the id)")
	f.StringVar(&s.network, "network", string(dsec.NetworkNone), "none (loopback only), allow-list (what --allow names), mirror-only (the node's mirror of packages) or open")
	f.StringArrayVar(&s.allow, "allow", nil, "of --network allow-list: "+allowHelp)
	f.StringVar(&s.cutoff, "cutoff", "", "the mirror of packages hides what is newer: 2025-01-31 (that day and all after it) or 2025-01-31T12:00:00Z")
	f.StringArrayVar(&p.MirrorDeny, "mirror-deny", nil, "name that the mirror refuses, like pypi:requests (repeat)")
	f.Float64Var(&p.Limits.CPU, "cpu", 0, "cores, like 0.5 (default 1)")
	s.memory.least, s.disk.least = dsec.MinMemory, dsec.MinDisk
	f.Var(&s.memory, "memory", "memory, like 512MiB (default 1GiB)")
	f.Int64Var(&p.Limits.Pids, "pids", 0, "processes and threads (default 512)")
	f.Var(&s.disk, "disk", "writable disk, like 10GiB (default 4GiB)")
	f.Var(&s.output, "kept-output", "kept output of all commands, like 16MiB (default 64MiB)")
	s.bandwidth.least = dsec.MinBandwidth
	f.Var(&s.bandwidth, "bandwidth", "of the network, each way, in bytes a second, like 10MiB (default: what the machine can)")
	f.DurationVar(&p.Lifetimes.Idle, "idle", 0, "stop after so long without a command or client, like 30m (default 1h)")
	f.DurationVar(&p.Lifetimes.Lifetime, "lifetime", 0, "stop after so long, like 8h (default: never)")
	f.DurationVar(&p.Lifetimes.Retention, "retention", 0, "delete a sandbox so long after it stopped, disk and all (default 1h)")
	f.DurationVar(&p.Lifetimes.KeepFailed, "keep-on-failure", 0, "pack the disk before it goes, if the sandbox does not end well, and keep it so long, like 24h")
	f.StringVar(&s.phases, "phases", "", "file with a JSON list of phases, - is stdin; see dsec phase --help")
	f.StringVar(&p.Profile, "profile", "", "system calls: build, debug, pwn, desktop or nested, see dsec profile (default build)")
	f.BoolVar(&p.NoNewPrivs, "no-new-privs", false, "refuse setuid programs inside")
	f.StringVar(&s.oom, "oom", "", "what out of memory ends: exec or sandbox (default exec)")
	f.StringArrayVar(&s.mounts, "mount", nil, "SOURCE:TARGET, read-only, below a root the node allows (repeat)")
	f.StringArrayVar(&p.Watch, "watch", nil, "path whose writes are evidence, like /tests/** or **/answer.txt, see audit (repeat)")
	f.StringArrayVarP(&s.labels, "label", "l", nil, "NAME=VALUE (repeat)")
	f.StringVar(&p.RolloutKey, "rollout", "", "key that groups what belongs to one rollout")
	f.StringVar(&p.CallID, "call-id", "", "key that makes the call idempotent")
}

// build makes the spec of an image.
func (s *specFlags) build(image string) (dsec.Spec, error) {
	p := s.spec
	p.Tier, p.Image, p.Network, p.OOM = dsec.Tier(s.tier), dsec.LayerRef(image), dsec.NetworkMode(s.network), dsec.OOMPolicy(s.oom)
	p.Limits.Memory, p.Limits.Disk, p.Limits.Output = int64(s.memory.bytesFlag), int64(s.disk.bytesFlag), int64(s.output)
	p.Limits.Bandwidth = int64(s.bandwidth.bytesFlag)
	p.Allow = parseRules(s.allow)
	var err error
	if p.Cutoff, err = parseCutoff(s.cutoff); err != nil {
		return p, err
	}
	for _, l := range s.layers {
		p.Layers = append(p.Layers, dsec.LayerRef(l))
	}
	if p.Env, err = pairs("env", s.env); err != nil {
		return p, err
	}
	if p.Labels, err = pairs("label", s.labels); err != nil {
		return p, err
	}
	if p.Phases, err = readPhases(s.phases); err != nil {
		return p, err
	}
	for _, m := range s.mounts {
		from, to, ok := strings.Cut(m, ":")
		if !ok {
			return p, dsec.Errorf(dsec.Invalid, "read flag", "--mount", "%s is not SOURCE:TARGET", dsec.Quote(m))
		}
		p.Mounts = append(p.Mounts, dsec.HostMount{Source: from, Target: to})
	}
	return p, p.Validate()
}

// parseCutoff reads a time, or a day, whose begin in UTC is the last moment that is
// seen.
func parseCutoff(s string) (time.Time, error) {
	if s == "" {
		return time.Time{}, nil
	}
	for _, layout := range []string{time.DateOnly, time.RFC3339Nano} {
		if t, err := time.Parse(layout, s); err == nil {
			return t.UTC(), nil
		}
	}
	return time.Time{}, dsec.Errorf(dsec.Invalid, "read flag", "--cutoff", "%s, want 2025-01-31 or 2025-01-31T12:00:00Z", dsec.Quote(s))
}

// pairs reads NAME=VALUE.
func pairs(flag string, list []string) (map[string]string, error) {
	if len(list) == 0 {
		return nil, nil
	}
	m := map[string]string{}
	for _, s := range list {
		k, v, ok := strings.Cut(s, "=")
		if !ok || k == "" {
			return nil, dsec.Errorf(dsec.Invalid, "read flag", "--"+flag, "%s is not NAME=VALUE", dsec.Quote(s))
		}
		m[k] = v
	}
	return m, nil
}

// bytesFlag is a size on the command line.
type bytesFlag int64

func (b *bytesFlag) String() string {
	if *b == 0 {
		return ""
	}
	return size(int64(*b))
}

func (b *bytesFlag) Type() string { return "size" }

func (b *bytesFlag) Set(s string) error {
	n, err := config.Bytes(s, 0)
	*b = bytesFlag(n)
	return err
}

// limitFlag is a size that is no use below some least.
type limitFlag struct {
	bytesFlag
	least int64
}

// Set guesses what a bare number means to who comes from elsewhere.
func (l *limitFlag) Set(s string) error {
	if err := l.bytesFlag.Set(s); err != nil {
		return err
	}
	if n := int64(l.bytesFlag); n > 0 && n < l.least && strings.Trim(s, "0123456789") == "" {
		return fmt.Errorf("%d bytes, want at least %s: did you mean %dMiB?", n, size(l.least), n)
	}
	return nil
}

// argvOf is the command after the first argument, which is what the options go
// before; name says what that is. What follows -- is taken as it is.
func argvOf(c *cobra.Command, args []string, name string) ([]string, error) {
	argv := args[1:]
	switch {
	case len(argv) == 0 || c.ArgsLenAtDash() >= 0:
	case argv[0] == "--":
		return argv[1:], nil
	case strings.HasPrefix(argv[0], "-"):
		return nil, dsec.Errorf(dsec.Invalid, "run command", dsec.Quote(argv[0]), "options go before the %s; if it is the command, put -- before it", name)
	}
	return argv, nil
}

// commandFlags are the flags that describe a command.
type commandFlags struct {
	interactive bool
	tty         bool
	timeout     time.Duration
}

func (f *commandFlags) register(c *cobra.Command) {
	c.Flags().BoolVarP(&f.interactive, "interactive", "i", false, "pass stdin on")
	c.Flags().BoolVarP(&f.tty, "tty", "t", false, "give the command a terminal")
	c.Flags().DurationVar(&f.timeout, "timeout", 0, "end the command after so long, like 90s")
	c.Flags().SetInterspersed(false) // what follows the first argument is the command's
}
