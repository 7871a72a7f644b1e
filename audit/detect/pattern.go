package detect

import (
	"github.com/opendsec/dsec/audit"
)

// patterns are paths with wildcards.
type patterns []audit.Pattern

func compile(list []string) (ps patterns) {
	for _, p := range list {
		ps = append(ps, audit.NewPattern(p))
	}
	return ps
}

func (ps patterns) match(p string) bool {
	e := audit.Elements(p)
	for _, pattern := range ps {
		if pattern.Match(e) {
			return true
		}
	}
	return false
}

// above reports whether a file in dir is looked at by who runs something that a pattern
// names: dir is the place of one of them, or a directory above it.
func (ps patterns) above(dir string) bool {
	d := audit.Elements(dir)
	if dir == "/" {
		d = nil
	}
	for _, pattern := range ps {
		if pattern.Above(d) {
			return true
		}
	}
	return false
}
