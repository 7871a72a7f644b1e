package audit

import (
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
	patterns []Pattern
}

// NewWatchlist is of the patterns given and of those that are always watched.
func NewWatchlist(more []string) (*Watchlist, error) {
	if err := dsec.CheckWatch(more); err != nil {
		return nil, err
	}
	w := &Watchlist{}
	for _, list := range [][]string{defaults, more} {
		for _, p := range list {
			w.patterns = append(w.patterns, NewPattern(p))
		}
	}
	return w, nil
}

// Match reports whether an absolute path, as the kernel has it, is watched.
func (w *Watchlist) Match(p string) bool {
	elements := Elements(p)
	name := elements[len(elements)-1]
	for _, pattern := range w.patterns {
		last := pattern[len(pattern)-1] // most do not get further
		if (last.kind == deep || last.match(name)) && pattern.Match(elements) {
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
	elements := Elements(dir)
	for _, pattern := range w.patterns {
		if pattern[0].kind != deep && len(pattern) == len(elements)+1 && pattern[:len(elements)].Match(elements) {
			return true
		}
	}
	return false
}
