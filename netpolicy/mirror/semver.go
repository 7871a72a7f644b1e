package mirror

import (
	"cmp"
	"strings"
)

// semver is a version as semver.org has it, without what does not order.
type semver struct {
	core [3]string // decimal, without leading zeros
	pre  string    // after the first "-"; "": a release
}

// parseSemver reads "1.2.3-rc.1+build".
func parseSemver(s string) (v semver, ok bool) {
	s, _, _ = strings.Cut(s, "+")
	s, pre, has := strings.Cut(s, "-")
	if has && pre == "" {
		return v, false
	}
	v.pre = pre
	parts := strings.Split(s, ".")
	if len(parts) != 3 {
		return v, false
	}
	for i, p := range parts {
		if p == "" || !isDigits(p) || len(p) > 1 && p[0] == '0' {
			return v, false
		}
		v.core[i] = p
	}
	return v, true
}

func isDigits(s string) bool { return strings.Trim(s, "0123456789") == "" }

// compare is below 0 if v comes before w.
func (v semver) compare(w semver) int {
	for i := range v.core {
		if c := compareDigits(v.core[i], w.core[i]); c != 0 {
			return c
		}
	}
	switch {
	case v.pre == w.pre:
		return 0
	case v.pre == "":
		return 1
	case w.pre == "":
		return -1
	}
	a, b := strings.Split(v.pre, "."), strings.Split(w.pre, ".")
	for i := range min(len(a), len(b)) {
		if c := comparePre(a[i], b[i]); c != 0 {
			return c
		}
	}
	return cmp.Compare(len(a), len(b))
}

func compareDigits(a, b string) int { return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(a, b)) }

// comparePre: numbers come before words.
func comparePre(a, b string) int {
	an, bn := a != "" && isDigits(a), b != "" && isDigits(b)
	switch {
	case an && bn:
		return compareDigits(a, b)
	case an:
		return -1
	case bn:
		return 1
	}
	return cmp.Compare(a, b)
}
