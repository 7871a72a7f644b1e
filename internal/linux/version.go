package linux

import (
	"fmt"
	"sync"

	"golang.org/x/sys/unix"
)

// Version is a kernel's, as far as features depend on it.
type Version struct{ Major, Minor int }

// AtLeast compares.
func (v Version) AtLeast(major, minor int) bool {
	return v.Major > major || (v.Major == major && v.Minor >= minor)
}

func (v Version) String() string { return fmt.Sprintf("%d.%d", v.Major, v.Minor) }

// Kernel returns the running kernel's version; zero if it does not parse.
// Features are tried, not derived from it; it explains why a try did not work.
var Kernel = sync.OnceValue(func() Version {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return Version{}
	}
	return parseVersion(unix.ByteSliceToString(u.Release[:]))
})

func parseVersion(release string) (v Version) {
	if n, err := fmt.Sscanf(release, "%d.%d", &v.Major, &v.Minor); err != nil || n != 2 {
		return Version{}
	}
	return v
}
