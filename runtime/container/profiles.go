package container

import (
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/confine"
	"github.com/opendsec/dsec/internal/hold"
)

// profile is the one of that name, if this tier and this machine give it as it
// is; the machine is looked at each time, because its settings change.
func (r *Runtime) profile(name string) (confine.Profile, error) {
	p, err := confine.ParseProfile(name)
	if err != nil {
		return p, err
	}
	if err := confine.Require(p, dsec.TierContainer); err != nil {
		return p, err
	}
	if p.Gives(confine.CoreDumps) || p.Gives(confine.UserNamespaces) {
		return p, r.machine().On(p)
	}
	return p, nil
}

// machine reads what profiles need to know; what cannot be read is taken as the
// kernel's default.
func (r *Runtime) machine() confine.Machine {
	setting := func(name string) string {
		b, err := os.ReadFile("/proc/sys/" + name)
		if err != nil {
			return ""
		}
		return strings.TrimSpace(string(b))
	}
	m := confine.Machine{CorePattern: setting("kernel/core_pattern"),
		Unprivileged: setting("kernel/unprivileged_userns_clone") != "0"}
	if setting("kernel/apparmor_restrict_unprivileged_userns") == "1" { // our profile says that they are allowed, if it can
		m.Unprivileged = m.Unprivileged && r.mac.loader != nil && r.mac.loader.Userns()
	}
	m.UserNamespaces, _ = strconv.ParseUint(setting("user/max_user_namespaces"), 10, 64)
	return m
}

// sysctls of a sandbox's own namespaces: what needs privilege only because a
// machine is shared, and the most namespaces that are made inside.
var sysctls = append([]hold.Sysctl{
	{Path: "net/ipv4/ping_group_range", Value: "0 65535"}, // with profiles that have such sockets
	{Path: "net/ipv4/ip_unprivileged_port_start", Value: "0"},
}, nestedMax()...)

func nestedMax() (list []hold.Sysctl) {
	most := confine.NestedMax()
	for _, name := range slices.Sorted(maps.Keys(most)) {
		list = append(list, hold.Sysctl{Path: "user/" + name, Value: strconv.Itoa(most[name])})
	}
	return list
}

// offered are the profiles that this tier gives.
func offered() (list []confine.Profile) {
	for _, p := range confine.Profiles {
		if confine.Require(p, dsec.TierContainer) == nil {
			list = append(list, p)
		}
	}
	return list
}
