package confine

// The capabilities in use, by the kernel's numbers.
const (
	capChown          = 0
	capDACOverride    = 1
	capFowner         = 3
	capFsetid         = 4
	capKill           = 5
	capSetgid         = 6
	capSetuid         = 7
	capSetpcap        = 8
	capNetBindService = 10
	capNetAdmin       = 12
	capNetRaw         = 13
	capSysChroot      = 18
	capSysPtrace      = 19
	capSysAdmin       = 21
	capSysResource    = 24
	capMknod          = 27
	capAuditWrite     = 29
	capSetfcap        = 31
)

// Capabilities is the bounding set of a profile's processes, and the permitted
// and effective set of its root user. All hold in the sandbox's own user
// namespace only: package managers, sudo, ping and setcap need them. Where the
// kernel is shared, none can mount, configure the network or reach the machine.
func Capabilities(p Profile) Caps {
	var c Caps
	for _, n := range []int{capChown, capDACOverride, capFowner, capFsetid, capKill, capSetgid, capSetuid, capSetpcap,
		capNetBindService, capNetRaw, capSysChroot, capMknod, capAuditWrite, capSetfcap} {
		c |= 1 << n
	}
	if p.Gives(Trace) {
		c |= 1 << capSysPtrace
	}
	if p.Gives(Mounts) {
		c |= 1<<capSysAdmin | 1<<capNetAdmin | 1<<capSysResource
	}
	return c
}

// Has reports whether capability n is in the set.
func (c Caps) Has(n int) bool { return c>>n&1 == 1 }

// Unlimited is RLIM_INFINITY.
const Unlimited = ^uint64(0)

// Numbers of the limits that amd64 and arm64 share.
const (
	limitStack      = 3
	limitCore       = 4
	limitNofile     = 7
	limitMemlock    = 8
	limitMsgqueue   = 12
	limitNice       = 13
	limitRealtime   = 14
	limitSigpending = 11
)

// CoreMax is how much of a process a core dump holds, in bytes.
const CoreMax = 64 << 20

// Rlimits of a profile's processes. Number, memory and disk are limited by
// control groups and quotas, so only what those do not cover is here. Whoever
// sets them stays Within its own hard limits.
func Rlimits(p Profile) []Rlimit {
	// 1 and not 0: with 0 the kernel still starts a core handler, outside.
	core := Rlimit{limitCore, 1, 1}
	if p.Gives(CoreDumps) {
		core = Rlimit{limitCore, CoreMax, CoreMax}
	}
	return []Rlimit{
		core,
		{limitNofile, 16384, 16384},
		{limitStack, 8 << 20, Unlimited},
		{limitMemlock, 8 << 20, 8 << 20},
		{limitMsgqueue, 819200, 819200},
		{limitSigpending, 16384, 16384},
		{limitNice, 0, 0},
		{limitRealtime, 0, 0},
	}
}

// Within lowers a limit to a hard limit that cannot be raised.
func (r Rlimit) Within(hard uint64) Rlimit {
	return Rlimit{r.Resource, min(r.Soft, hard), min(r.Hard, hard)}
}

// NestedMax are the most user, process and network namespaces that one user of
// a sandbox has at one time, by the name of the kernel's setting below
// /proc/sys/user of the sandbox's own user namespace; namespaces made in others
// count in all those around them. Chromium has one of each, and a process
// namespace for each renderer.
func NestedMax() map[string]int {
	return map[string]int{"max_user_namespaces": 32, "max_net_namespaces": 32, "max_pid_namespaces": 256}
}

// OOMScoreAdj is what a sandbox's processes get, so that the machine's own
// are never the ones to go. It can be raised without privilege, not lowered.
const OOMScoreAdj = 500
