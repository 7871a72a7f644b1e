package confine

import (
	"fmt"

	"github.com/opendsec/dsec"
)

// Isolation is what stands between a sandbox and its machine, weakest first.
type Isolation int

// The isolations.
const (
	SharedKernel Isolation = iota + 1 // user, process and network namespaces of its own, and a filter of system calls
	OwnKernel                         // a virtual machine
)

func (i Isolation) String() string {
	switch i {
	case SharedKernel:
		return "namespaces of its own and a filter of system calls"
	case OwnKernel:
		return "a kernel of its own"
	}
	return fmt.Sprintf("isolation %d", int(i))
}

// Ability is something that a profile gives beyond Build.
type Ability string

// The abilities.
const (
	Trace          Ability = "trace"           // gdb, strace, leak checkers on processes of one's own
	RawSockets     Ability = "raw-sockets"     // IP sockets of any protocol, ICMP echo
	PacketSockets  Ability = "packet-sockets"  // frames of the sandbox's own interfaces
	CoreDumps      Ability = "core-dumps"      // into the working directory, up to CoreMax bytes
	UserNamespaces Ability = "user-namespaces" // with process and network namespaces in them, and nothing else
	Mounts         Ability = "mounts"          // file systems and every namespace, as container engines need
)

// needs is the least isolation an ability is given with, and why.
var needs = map[Ability]struct {
	least Isolation
	why   string
}{
	Trace:          {SharedKernel, "it reaches processes of the sandbox's own user namespace only"},
	RawSockets:     {SharedKernel, "the network namespace is the sandbox's own, and the node judges what leaves it"},
	PacketSockets:  {SharedKernel, "the network namespace is the sandbox's own, and the node judges what leaves it"},
	CoreDumps:      {SharedKernel, "the kernel writes them below the sandbox's root, on its disk"},
	UserNamespaces: {SharedKernel, "their rights over mounts, interfaces and packet filters stay refused, and the kernel counts them"},
	Mounts:         {OwnKernel, "the right to mount opens most of the kernel, and a container's own /proc is refused where /proc is masked"},
}

// abilities of each profile, by what it exists for.
var abilities = map[Profile][]Ability{
	Build:   {},
	Debug:   {Trace, RawSockets},
	Pwn:     {Trace, RawSockets, PacketSockets, CoreDumps},
	Desktop: {UserNamespaces},
	Nested:  {Trace, RawSockets, PacketSockets, UserNamespaces, Mounts},
}

// Abilities of a profile, in the order of their declaration.
func (p Profile) Abilities() []Ability { return append([]Ability(nil), abilities[p]...) }

// Gives reports whether a profile gives an ability.
func (p Profile) Gives(a Ability) bool {
	for _, have := range abilities[p] {
		if have == a {
			return true
		}
	}
	return false
}

// Needs is the least isolation that an ability is given with, and why that.
func Needs(a Ability) (Isolation, string) { return needs[a].least, needs[a].why }

// Minimum is the least isolation a profile is given with: the most that one of
// its abilities needs.
func Minimum(p Profile) Isolation {
	least := SharedKernel
	for _, a := range abilities[p] {
		least = max(least, needs[a].least)
	}
	return least
}

// IsolationOf says what a tier gives.
func IsolationOf(t dsec.Tier) Isolation {
	switch t {
	case dsec.TierMicroVM, dsec.TierFullVM:
		return OwnKernel
	}
	return SharedKernel
}

// Require refuses a profile on a tier that isolates less than the profile's
// minimum: Unsupported, with the ability that it fails on and the way out. A
// profile is never weakened to fit.
func Require(p Profile, t dsec.Tier) error {
	have := IsolationOf(t)
	for _, a := range abilities[p] {
		if n := needs[a]; n.least > have {
			return dsec.Errorf(dsec.Unsupported, "choose profile", string(p), "it gives %s, which needs %v: %s; tier %s has %v; ask for tier %s or %s",
				a, n.least, n.why, t, have, dsec.TierFullVM, dsec.TierMicroVM)
		}
	}
	return nil
}

// A Machine is what profiles need to know of the machine they are asked on.
type Machine struct {
	CorePattern    string // kernel.core_pattern
	UserNamespaces uint64 // user.max_user_namespaces
	Unprivileged   bool   // users without privilege may make user namespaces
}

// On refuses a profile that shares the kernel of a machine which cannot give
// it: Unsupported, with the setting that stands in the way.
func (m Machine) On(p Profile) error {
	no := func(format string, args ...any) error {
		return dsec.Errorf(dsec.Unsupported, "choose profile", string(p), format, args...)
	}
	if p.Gives(CoreDumps) && m.CorePattern != "" && (m.CorePattern[0] == '|' || m.CorePattern[0] == '@') {
		return no("this machine hands core dumps to a program outside the sandbox; set kernel.core_pattern to a file name, as core")
	}
	if p.Gives(UserNamespaces) && m.UserNamespaces == 0 {
		return no("user.max_user_namespaces of this machine is 0")
	}
	if p.Gives(UserNamespaces) && !m.Unprivileged {
		return no("this machine refuses user namespaces to unprivileged processes; look at kernel.unprivileged_userns_clone and kernel.apparmor_restrict_unprivileged_userns")
	}
	return nil
}
