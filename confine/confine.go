// Package confine says what a sandbox may do to the kernel: which system
// calls, capabilities and resource limits its processes have, and which parts
// of /proc they see. It is data and a compiler: pure, no I/O.
//
// A profile is a default-deny list. "build" is what building and testing
// software needs; "debug" adds tracing of one's own processes, and sockets whose
// buffers are charged to nobody; "pwn" adds to that packet sockets and core
// dumps; "desktop" is "build" with the namespaces that Chromium's own sandbox
// makes; "nested" is for engines of containers in a virtual machine. What a
// profile gives is its Abilities, each of which Needs an isolation; Require
// refuses a profile where a tier has less. A refusal is an errno a program can handle:
// EPERM or EACCES where the call exists and is forbidden, ENOSYS where programs
// fall back to something older. Explain names the call, the profile and the way
// out. Refusals that no honest program meets are of interest: Noticing has them
// told to a listener.
package confine

// Profile names a set of rules.
type Profile string

// The profiles.
const (
	Build   Profile = "build"
	Debug   Profile = "debug"
	Pwn     Profile = "pwn"
	Desktop Profile = "desktop"
	Nested  Profile = "nested"
)

// Arch is a kernel architecture.
type Arch string

// The architectures.
const (
	AMD64 Arch = "amd64"
	ARM64 Arch = "arm64"
)

// Refusal explains one refused call.
type Refusal struct {
	Call    string // name of the system call, or "ioctl TIOCSTI"
	Errno   string // "EPERM", "ENOSYS", or "" if it is allowed
	Reason  string // why it is refused
	Way     string // what to do instead
	Profile Profile
}

// Rlimit is one resource limit; Resource is the kernel's number.
type Rlimit struct {
	Resource int
	Soft     uint64
	Hard     uint64
}

// Caps is a set of capabilities, bit n for capability n.
type Caps uint64
