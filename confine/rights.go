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
	capNetRaw         = 13
	capSysChroot      = 18
	capSysPtrace      = 19
	capMknod          = 27
	capAuditWrite     = 29
	capSetfcap        = 31
)

// Capabilities is the bounding set of a profile's processes, and the permitted
// and effective set of its root user. All hold in the sandbox's own user
// namespace only: package managers, sudo, ping and setcap need them; none can
// mount, trace across users, configure the network or reach the machine.
func Capabilities(p Profile) Caps {
	var c Caps
	for _, n := range []int{capChown, capDACOverride, capFowner, capFsetid, capKill, capSetgid, capSetuid, capSetpcap,
		capNetBindService, capNetRaw, capSysChroot, capMknod, capAuditWrite, capSetfcap} {
		c |= 1 << n
	}
	if p == Debug {
		c |= 1 << capSysPtrace
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

// Rlimits of a sandbox's processes. Number, memory and disk are limited by
// control groups and quotas, so only what those do not cover is here. Whoever
// sets them stays Within its own hard limits.
func Rlimits() []Rlimit {
	return []Rlimit{
		// 1 and not 0: with 0 the kernel still starts a core handler, outside.
		{limitCore, 1, 1},
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

// OOMScoreAdj is what a sandbox's processes get, so that the machine's own
// are never the ones to go. It can be raised without privilege, not lowered.
const OOMScoreAdj = 500
