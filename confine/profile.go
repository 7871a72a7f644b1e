package confine

// Program compiles a profile to the bytes of an array of struct sock_filter,
// for seccomp(2) or PR_SET_SECCOMP; the number of instructions is len/8.
func Program(p Profile, a Arch) ([]byte, error) { return nil, nil }

// ParseProfile accepts the name of a profile; "" is Build.
func ParseProfile(name string) (Profile, error) { return Build, nil }

// Explain says whether a call is allowed and if not, why and what to do.
func Explain(p Profile, a Arch, nr uint32, args [6]uint64) Refusal { return Refusal{} }

// Capabilities is the bounding set of a profile's processes, and the permitted and effective
// set of its root user.
func Capabilities(p Profile) Caps { return 0 }

// Rlimits of a sandbox's processes. The hard limits never exceed the node's own.
func Rlimits() []Rlimit { return nil }

// OOMScoreAdj is what a sandbox's processes get.
const OOMScoreAdj = 500

// MaskedPaths are hidden: files by /dev/null, directories by an empty
// read-only tmpfs. A path that does not exist is no error.
func MaskedPaths() []string { return nil }

// ReadOnlyPaths are remounted read-only.
func ReadOnlyPaths() []string { return nil }
