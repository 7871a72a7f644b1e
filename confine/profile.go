package confine

import (
	"fmt"
	"slices"
	"strings"

	"github.com/opendsec/dsec"
)

// Profiles lists all.
var Profiles = []Profile{Build, Debug, Pwn, Desktop, Nested}

// ParseProfile accepts the name of a profile; "" is Build.
func ParseProfile(name string) (Profile, error) {
	if name == "" {
		return Build, nil
	}
	if p := Profile(name); slices.Contains(Profiles, p) {
		return p, nil
	}
	return "", dsec.Errorf(dsec.Invalid, "choose profile", dsec.Quote(name), "want one of %v", Profiles)
}

// Explain says whether a call is allowed and if not, why and what to do.
func Explain(p Profile, a Arch, nr uint32, args [6]uint64) Refusal {
	m, err := machineOf(a)
	if err != nil {
		return Refusal{Call: fmt.Sprintf("call %d", nr), Errno: "SIGSYS", Reason: err.Error(), Profile: p}
	}
	name, known := m.name[nr]
	switch {
	case m.x32 && nr >= x32Bit:
		return refused(p, fmt.Sprintf("x32 call %d", nr&^x32Bit), refuse(eNOSYS, "programs of the x32 calling convention do not run", "build for x86-64"))
	case !known:
		return refused(p, fmt.Sprintf("call %d", nr), unknown)
	}
	r := rulesOf(p)[name]
	for _, c := range r.clauses {
		if c.holds(args) {
			return refused(p, strings.TrimSpace(name+" "+c.label), c.action)
		}
	}
	return refused(p, name, r.otherwise)
}

func refused(p Profile, call string, a action) Refusal {
	if a.allow {
		return Refusal{Call: call, Profile: p}
	}
	return Refusal{Call: call, Errno: a.errno.String(), Reason: a.reason, Way: a.way, Profile: p}
}

func (c clause) holds(args [6]uint64) bool {
	for _, t := range c.tests {
		v := uint32(args[t.arg]) & t.mask
		if (t.any && v == 0) || (!t.any && v != t.value) {
			return false
		}
	}
	return true
}

// Text is one line: the call, the profile and the way out.
func (r Refusal) Text() string {
	if r.Errno == "" {
		return fmt.Sprintf("%s is allowed by profile %s", r.Call, r.Profile)
	}
	return fmt.Sprintf("%s is refused with %s by profile %s: %s; %s", r.Call, r.Errno, r.Profile, r.Reason, r.Way)
}

// Refusals lists everything a profile refuses on an architecture, for the
// documentation and dsec doctor, ordered by name.
func Refusals(p Profile, a Arch) []Refusal {
	m, err := machineOf(a)
	if err != nil {
		return nil
	}
	var all []Refusal
	for name, r := range rulesOf(p) {
		if _, ok := m.number[name]; !ok {
			continue
		}
		for _, c := range r.clauses {
			if !c.action.allow {
				all = append(all, refused(p, name+" "+c.label, c.action))
			}
		}
		if !r.otherwise.allow {
			call := name
			if r.clauses != nil {
				call += " with anything else"
			}
			all = append(all, refused(p, call, r.otherwise))
		}
	}
	slices.SortFunc(all, func(a, b Refusal) int { return strings.Compare(a.Call, b.Call) })
	return all
}
