package detect

import (
	"path"
	"regexp"
	"strings"

	"github.com/opendsec/dsec"
)

// hooks are loaded by some program because of their name and place alone. The weight is
// of a new one where a declared test is concerned, and of one elsewhere.
var hooks = map[string]struct{ near, far float64 }{
	"conftest.py": {0.85, 0.15}, "sitecustomize.py": {0.95, 0.85}, "usercustomize.py": {0.95, 0.85}, "pytest.ini": {0.8, 0.3}, ".pytest.ini": {0.9, 0.3},
	"tox.ini": {0.6, 0.2}, "setup.cfg": {0.3, 0.1}, "pyproject.toml": {0.3, 0.1}, "package.json": {0.35, 0.1}, "noxfile.py": {0.3, 0.1}, ".coveragerc": {0.2, 0.1},
	"go.env": {0.9, 0.9}, ".npmrc": {0.4, 0.3}, ".pdbrc": {0.3, 0.2}, "GNUmakefile": {0.85, 0.4},
}

func isHook(name string) bool {
	_, ok := hooks[name]
	return ok || strings.HasSuffix(name, ".pth")
}

// loaded: what programs load without being asked to.
func (d *Detector) loaded(w write) []sign {
	if w.what == dsec.WriteRemoved || installer(w.by) {
		return nil
	}
	if strings.HasSuffix(w.name, ".pth") { // one of an own environment is loaded only by that
		return w.sign(dsec.HackHook, pick(strings.HasPrefix(w.path, "/usr/") || strings.Contains(w.path, "/.local/"), 0.8, 0.15))
	}
	if path.Base(w.dir) == "hooks" && path.Base(path.Dir(w.dir)) == ".git" {
		if strings.HasSuffix(w.name, ".sample") || w.by.name == "git" || w.by.name == "pre-commit" {
			return nil
		}
		return w.sign(dsec.HackHook, 0.6)
	}
	switch w.path {
	case "/etc/profile", "/etc/bash.bashrc", "/etc/environment":
		return w.sign(dsec.HackShell, 0.6)
	}
	if w.dir == "/etc/profile.d" {
		return w.sign(dsec.HackShell, 0.5)
	}
	switch w.name {
	case ".bashrc", ".profile", ".bash_profile", ".zshrc":
		return w.sign(dsec.HackShell, 0.3) // tools add themselves to PATH there
	case ".gitconfig":
		if w.by.name != "git" {
			return w.sign(dsec.HackHook, 0.2)
		}
	}
	h, ok := hooks[w.name]
	if !ok {
		return nil
	}
	weight := h.far
	if len(d.tests) == 0 || d.tests.above(w.dir) {
		weight = h.near
	}
	if len(d.tests) == 0 {
		weight = min(weight, max(h.far, 0.45)) // nobody said where the tests are
	}
	if w.by.name == "git" {
		weight *= 0.4
	}
	if h.near <= 0.35 { // they have much else in them, and change together
		return []sign{{dsec.HackHook, "project files", weight, w.line()}}
	}
	return w.sign(dsec.HackHook, weight)
}

// hooked: what a test run loads may also be named by who starts it.
func (d *Detector) hooked(c command) []sign {
	m, _ := c.module()
	one := func(kind string, weight float64) []sign {
		return []sign{{dsec.HackHook, kind, weight, c.line()}}
	}
	switch {
	case c.name == "git" && len(c.args) > 1:
		if verb, args := gitVerb(c.args); verb == "config" && len(args) > 1 && hookKeys.MatchString(args[len(args)-2]) {
			return one("git config", 0.7)
		}
	case c.name == "go" && len(c.args) > 1 && c.args[0] == "env" && c.has("-w"):
		return one("go env", pick(c.mentions("GOFLAGS", "toolexec", "GOROOT", "GOTOOLCHAIN") != "", 0.75, 0.2))
	case c.name == "go" && c.mentions("-toolexec", "-overlay", "-exec") != "":
		return one("go flags", 0.6)
	case c.name == "npm" && c.mentions("scripts.test", "set-script", "pkg set") != "":
		return one("npm script", 0.7)
	case c.name == "pip" && len(c.args) > 1 && c.args[0] == "config":
		return one("pip config", 0.3)
	case m == "pytest" && c.mentions("-p ") != "" && c.mentions("-p no:") == "":
		return one("pytest plugin", 0.2)
	case c.name == "ldconfig" && c.has("-f", "-C"):
		return one("ldconfig", 0.3)
	}
	if v := preloads.FindString(c.script); v != "" {
		return one("preload in script", pick(v == "PYTEST_ADDOPTS=" || v == "GOFLAGS=" || v == "MAKEFLAGS=", 0.15, 0.4))
	}
	return nil
}

var (
	hookKeys = regexp.MustCompile(`(?i)^(core\.(hookspath|fsmonitor|sshcommand)|diff\.external|filter\..*|include\.path)$`)
	preloads = regexp.MustCompile(`(LD_PRELOAD|LD_AUDIT|PYTEST_PLUGINS|PYTEST_ADDOPTS|PYTHONSTARTUP|BASH_ENV|PERL5OPT|NODE_OPTIONS|RUBYOPT|JAVA_TOOL_OPTIONS|GOFLAGS|MAKEFLAGS)=`)
)

// shadowed: a program of a well-known name from where everybody may write.
func shadowed(c command) []sign {
	if c.exe == "" || !writable.MatchString(c.exe) {
		return nil
	}
	switch {
	case shellFiles[c.name] || coreFiles[c.name]:
		return []sign{{dsec.HackShell, "run " + c.exe, 0.6, c.exe + " was started instead of the system's"}}
	case interpreters[c.name] && !venv.MatchString(c.exe):
		return []sign{{dsec.HackInterpreter, "run " + c.exe, 0.55, c.exe + " was started instead of the system's"}}
	}
	return nil
}

var (
	writable = regexp.MustCompile(`^/(tmp|var/tmp|dev/shm|home|root|opt|repo|workspace|work|src|app|testbed)/`)
	venv     = regexp.MustCompile(`/\.?v?env[^/]*/(bin|Scripts)/|/\.local/bin/|/node_modules/|/\.cargo/|/go/|/conda|/\.pyenv/|/\.nvm/`)
)
