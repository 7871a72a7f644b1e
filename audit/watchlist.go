package audit

import (
	"path"
	"strings"

	"github.com/opendsec/dsec"
)

// defaults are watched in every sandbox: what decides which program a later command
// runs, and what a test or its harness loads without being asked to.
var defaults = []string{
	"/bin/*", "/sbin/*", "/usr/bin/*", "/usr/sbin/*", "/usr/local/bin/*", "/usr/local/sbin/*",
	"/lib*/ld-*", "/lib*/*/ld-*", "/usr/lib*/ld-*", "/usr/lib*/*/ld-*",
	"/lib*/libc.*", "/lib*/*/libc.*", "/usr/lib*/libc.*", "/usr/lib*/*/libc.*",
	"/etc/ld.so.preload", "/etc/ld.so.conf", "/etc/ld.so.conf.d/*",
	"/etc/passwd", "/etc/shadow", "/etc/group", "/etc/sudoers", "/etc/sudoers.d/*",
	"/etc/profile", "/etc/profile.d/*", "/etc/bash.bashrc", "/etc/environment",
	"**/.bashrc", "**/.profile", "**/.bash_profile", "**/.zshrc", "**/.gitconfig", "**/.ssh/authorized_keys",
	"**/sitecustomize.py", "**/usercustomize.py", "**/*.pth",
	"**/conftest.py", "**/pytest.ini", "**/tox.ini", "**/setup.cfg", "**/pyproject.toml",
	"**/.git/hooks/*", "**/.git/config",
}

// Watchlist says which paths are watched.
type Watchlist struct {
	patterns []pattern
}

// pattern is cut into elements that are read once: a list is asked for each file that is
// written or made in any sandbox.
type pattern []element

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
	ok, _ := path.Match(e.text, name) // checked when the list was made
	return ok
}

// NewWatchlist is of the patterns given and of those that are always watched.
func NewWatchlist(more []string) (*Watchlist, error) {
	if err := dsec.CheckWatch(more); err != nil {
		return nil, err
	}
	w := &Watchlist{}
	for _, list := range [][]string{defaults, more} {
		for _, p := range list {
			var compiled pattern
			for _, e := range split(p) {
				compiled = append(compiled, newElement(e))
			}
			w.patterns = append(w.patterns, compiled)
		}
	}
	return w, nil
}

// split makes a path, or a pattern, a list of elements.
func split(p string) []string { return strings.Split(strings.Trim(path.Clean(p), "/"), "/") }

// Match reports whether an absolute path, as the kernel has it, is watched.
func (w *Watchlist) Match(p string) bool {
	elements := split(p)
	name := elements[len(elements)-1]
	for _, pattern := range w.patterns {
		last := pattern[len(pattern)-1] // most do not get further
		if (last.kind == deep || last.match(name)) && match(pattern, elements) {
			return true
		}
	}
	return false
}

// MatchName reports whether anything of that name is watched somewhere: what is known
// of a file that was reached through a mount which is not the sandbox's root.
func (w *Watchlist) MatchName(name string) bool {
	for _, pattern := range w.patterns {
		last := pattern[len(pattern)-1]
		if last.kind != anyName && last.kind != deep && last.match(name) {
			return true
		}
	}
	return false
}

// MatchBelow reports whether what lies right below a directory may be watched because
// of where that directory is.
func (w *Watchlist) MatchBelow(dir string) bool {
	elements := split(dir)
	for _, pattern := range w.patterns {
		if pattern[0].kind != deep && len(pattern) == len(elements)+1 && match(pattern[:len(elements)], elements) {
			return true
		}
	}
	return false
}

// match has a "**" take as little as possible, and one element more when what follows does not
// fit. Only the last one need be asked for more: what those before it took leaves it the most to
// choose from. So the work is bounded by the product of the lengths, whatever the path.
func match(pattern pattern, elements []string) bool {
	i, k := 0, 0         // in pattern and elements
	more, from := -1, -1 // behind the last "**", and where what it takes ends
	for {
		switch {
		case i == len(pattern) && k == len(elements):
			return true
		case i < len(pattern) && pattern[i].kind == deep:
			if i++; i == len(pattern) {
				return k < len(elements)
			}
			more, from = i, k
			if i == len(pattern)-1 && pattern[i].kind != deep { // the last of a path is far away
				k = max(k, len(elements)-1)
				from = k
			}
		case i < len(pattern) && k < len(elements) && pattern[i].match(elements[k]):
			i, k = i+1, k+1
		case more >= 0 && from < len(elements):
			from++
			i, k = more, from
		default:
			return false
		}
	}
}
