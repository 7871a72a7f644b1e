package debian

import (
	"cmp"
	"strings"
)

// Compare orders versions as dpkg does: by epoch, upstream version, revision.
func Compare(a, b string) int {
	ae, au, ar := splitVersion(a)
	be, bu, br := splitVersion(b)
	return cmp.Or(comparePart(ae, be), comparePart(au, bu), comparePart(ar, br))
}

func splitVersion(v string) (epoch, upstream, revision string) {
	if e, rest, ok := strings.Cut(v, ":"); ok {
		epoch, v = e, rest
	}
	if i := strings.LastIndexByte(v, '-'); i >= 0 {
		return epoch, v[:i], v[i+1:]
	}
	return epoch, v, ""
}

// comparePart compares runs of other characters and of digits in turns. A tilde
// is less than the end, and letters are less than all else.
func comparePart(a, b string) int {
	for a != "" || b != "" {
		for (a != "" && !isDigit(a[0])) || (b != "" && !isDigit(b[0])) {
			if c := cmp.Compare(weight(a), weight(b)); c != 0 {
				return c
			}
			a, b = a[1:], b[1:] // equal weights mean that both have a character
		}
		var an, bn string
		an, a = digits(a)
		bn, b = digits(b)
		if c := cmp.Or(cmp.Compare(len(an), len(bn)), strings.Compare(an, bn)); c != 0 {
			return c
		}
	}
	return 0
}

func isDigit(c byte) bool { return c >= '0' && c <= '9' }

func weight(s string) int {
	switch {
	case s == "" || isDigit(s[0]):
		return 0
	case s[0] == '~':
		return -1
	case s[0] >= 'a' && s[0] <= 'z', s[0] >= 'A' && s[0] <= 'Z':
		return int(s[0])
	}
	return int(s[0]) + 256
}

func digits(s string) (number, rest string) {
	n := 0
	for n < len(s) && isDigit(s[n]) {
		n++
	}
	return strings.TrimLeft(s[:n], "0"), s[n:]
}
