package files

import (
	"path"
	"strings"

	"github.com/opendsec/dsec"
)

const maxGlobs = 256

// glob is a pattern by components. "**" stands for any number of them.
type glob []string

// Glob is a pattern of whole paths, for others than the file service.
type Glob struct{ g glob }

// CompileGlob reads a pattern by components; "**" stands for any number of them.
func CompileGlob(pattern string) (Glob, error) {
	all, err := compileGlobs("read glob", []string{pattern})
	if err != nil {
		return Glob{}, err
	}
	return Glob{all[0]}, nil
}

// Match tells whether a path, relative to the root, is one of them.
func (g Glob) Match(rel string) bool { return g.g.match(strings.Split(rel, "/")) }

// compileGlobs checks patterns; a leading slash is that of the directory.
func compileGlobs(op string, patterns []string) ([]glob, error) {
	if len(patterns) > maxGlobs {
		return nil, dsec.Errorf(dsec.Invalid, op, "", "%d globs, at most %d", len(patterns), maxGlobs)
	}
	var out []glob
	for _, p := range patterns {
		if len(p) >= maxPath {
			return nil, invalid(op, p, "glob longer than %d bytes", maxPath-1)
		}
		g := glob(strings.Split(strings.Trim(strings.TrimPrefix(p, "./"), "/"), "/"))
		for _, part := range g {
			if _, err := path.Match(part, ""); err != nil || part == "" {
				return nil, invalid(op, p, "malformed glob")
			}
		}
		out = append(out, g)
	}
	return out, nil
}

// matchAny reports whether one of the globs matches; without any, everything
// does.
func matchAny(globs []glob, rel string) bool {
	if len(globs) == 0 {
		return true
	}
	parts := strings.Split(rel, "/")
	for _, g := range globs {
		if g.match(parts) {
			return true
		}
	}
	return false
}

// match keeps for each prefix of the pattern whether it matches the parts seen
// so far, so that no pattern takes more than parts × pattern steps.
func (g glob) match(parts []string) bool {
	at := make([]bool, len(g)+1)
	at[0] = true
	g.skipStars(at)
	for _, part := range parts {
		next := make([]bool, len(g)+1)
		for i, pattern := range g {
			if !at[i] {
				continue
			}
			if pattern == "**" {
				next[i] = true
			} else if ok, _ := path.Match(pattern, part); ok {
				next[i+1] = true
			}
		}
		at = next
		g.skipStars(at)
	}
	return at[len(g)]
}

// skipStars lets each "**" stand for nothing.
func (g glob) skipStars(at []bool) {
	for i, pattern := range g {
		if at[i] && pattern == "**" {
			at[i+1] = true
		}
	}
}
