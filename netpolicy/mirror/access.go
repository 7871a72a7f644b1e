package mirror

import (
	"strings"

	"github.com/opendsec/dsec"
)

// AccessOf is what a policy gives of the mirror; ok is false for one that gives
// nothing.
func AccessOf(p dsec.NetworkPolicy) (a Access, ok bool) {
	a = Access{Services: p.MirrorServices(), Cutoff: p.Cutoff}
	for _, d := range p.MirrorDeny {
		service, name, _ := strings.Cut(d, ":")
		if a.Deny == nil {
			a.Deny = map[string][]string{}
		}
		a.Deny[service] = append(a.Deny[service], name)
	}
	return a, len(a.Services) > 0
}
