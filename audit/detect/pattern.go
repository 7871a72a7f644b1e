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

// match tries "**" with every number of elements; there are at most two of them.
func match(pattern, e []string) bool {
	for i, p := range pattern {
		if p == "**" {
			if i == len(pattern)-1 {
				return len(e) > i
			}
			for k := i; k <= len(e); k++ {
				if match(pattern[i+1:], e[k:]) {
					return true
				}
			}
			return false
		}
		if i >= len(e) {
			return false
		}
		if ok, _ := path.Match(p, e[i]); !ok {
			return false
		}
	}
	return len(e) == len(pattern)
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
