package detect

import (
	"path"
	"strings"
)

// patterns are paths with wildcards, split into elements.
type patterns [][]string

func compile(list []string) (ps patterns) {
	for _, p := range list {
		ps = append(ps, elements(p))
	}
	return ps
}

func elements(p string) []string { return strings.Split(strings.Trim(path.Clean(p), "/"), "/") }

func (ps patterns) match(p string) bool {
	e := elements(p)
	for _, pattern := range ps {
		if match(pattern, e) {
			return true
		}
	}
	return false
}

// match has a "**" take as little as possible, and one element more when what follows does not
// fit. Only the last one need be asked for more: what those before it took leaves it the most
// to choose from. So the work is bounded by the product of the lengths, whatever the path.
func match(pattern, e []string) bool {
	i, k := 0, 0         // in pattern and e
	deep, from := -1, -1 // behind the last "**", and what it has taken
	for {
		switch {
		case i == len(pattern) && k == len(e):
			return true
		case i < len(pattern) && pattern[i] == "**":
			if i == len(pattern)-1 {
				return k < len(e)
			}
			i++
			deep, from = i, k
		case i < len(pattern) && k < len(e) && fits(pattern[i], e[k]):
			i, k = i+1, k+1
		case deep >= 0 && from < len(e):
			from++
			i, k = deep, from
		default:
			return false
		}
	}
}

// fits: most of what is asked for has no wildcard, and most elements are not those.
func fits(pattern, element string) bool {
	if !strings.ContainsAny(pattern, `*?[\`) {
		return pattern == element
	}
	ok, _ := path.Match(pattern, element) // checked when the Detector was made
	return ok
}

// above reports whether a file in dir is looked at by who runs something that a pattern
// names: dir is the place of one of them, or a directory above it.
func (ps patterns) above(dir string) bool {
	d := elements(dir)
	if dir == "/" {
		d = nil
	}
	for _, pattern := range ps {
		fits := len(pattern) > 0 && pattern[0] != "**"
		for i, e := range d {
			if !fits || i < len(pattern) && pattern[i] == "**" {
				break
			}
			ok := false
			if i < len(pattern)-1 {
				ok, _ = path.Match(pattern[i], e)
			}
			fits = ok
		}
		if fits {
			return true
		}
	}
	return false
}
