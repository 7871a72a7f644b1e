package audit

import (
	"path"
	"strings"
)

// Pattern is one of a Watchlist, or of what a task declares. It is read once: paths are compared
// with it for each file that is written or made in any sandbox.
type Pattern []element

// element is one of a pattern. Most are a name, or one with a star at either end.
type element struct {
	kind kind
	text string
}

type kind int

const (
	exact kind = iota
	anyName
	prefix  // text*
	suffix  // *text
	general // as path.Match has it
	deep    // any number of elements
)

const special = "*?[\\"

func newElement(s string) element {
	switch {
	case s == "**":
		return element{kind: deep}
	case s == "*":
		return element{kind: anyName}
	case !strings.ContainsAny(s, special):
		return element{exact, s}
	case s[0] == '*' && !strings.ContainsAny(s[1:], special):
		return element{suffix, s[1:]}
	case s[len(s)-1] == '*' && !strings.ContainsAny(s[:len(s)-1], special):
		return element{prefix, s[:len(s)-1]}
	}
	return element{general, s}
}

func (e element) match(name string) bool {
	switch e.kind {
	case exact:
		return e.text == name
	case anyName:
		return true
	case prefix:
		return strings.HasPrefix(name, e.text)
	case suffix:
		return strings.HasSuffix(name, e.text)
	}
	ok, _ := path.Match(e.text, name) // checked by whoever took the pattern
	return ok
}

// NewPattern reads one that was checked.
func NewPattern(text string) (p Pattern) {
	for _, e := range Elements(text) {
		p = append(p, newElement(e))
	}
	return p
}

// Elements are those of a path, or of a pattern.
func Elements(p string) []string { return strings.Split(strings.Trim(path.Clean(p), "/"), "/") }

// Match has a "**" take as little as possible, and one element more when what follows does not
// fit. Only the last one need be asked for more: what those before it took leaves it the most to
// choose from. So the work is bounded by the product of the lengths, whatever the path.
func (p Pattern) Match(elements []string) bool {
	i, k := 0, 0         // in p and elements
	more, from := -1, -1 // behind the last "**", and where what it takes ends
	for {
		switch {
		case i == len(p) && k == len(elements):
			return true
		case i < len(p) && p[i].kind == deep:
			if i++; i == len(p) {
				return k < len(elements)
			}
			more, from = i, k
			if i == len(p)-1 && p[i].kind != deep { // the last of a path is far away
				k = max(k, len(elements)-1)
				from = k
			}
		case i < len(p) && k < len(elements) && p[i].match(elements[k]):
			i, k = i+1, k+1
		case more >= 0 && from < len(elements):
			from++
			i, k = more, from
		default:
			return false
		}
	}
}

// Above reports whether a directory, by its elements, is on the way to what the pattern names,
// as far as that is certain: what is below "**" may be anywhere.
func (p Pattern) Above(dir []string) bool {
	if len(p) == 0 || p[0].kind == deep {
		return false
	}
	for i, name := range dir {
		if i < len(p) && p[i].kind == deep {
			return true
		}
		if i >= len(p)-1 || !p[i].match(name) {
			return false
		}
	}
	return true
}
