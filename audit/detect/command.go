package detect

import (
	"path"
	"strings"

	"github.com/opendsec/dsec"
)

// command is a program that was started, as the rules look at it.
type command struct {
	name   string   // of its file; "python3.11" is "python3"
	exe    string   // its file; "": not known
	args   []string // without the first
	script string   // what `sh -c` and the like were given
	parent string   // name of the program that started it; "": not known
	exec   string   // id of the command it belongs to
}

var shells = set("sh bash dash zsh ksh ash busybox rbash mksh")

func set(words string) map[string]bool {
	m := map[string]bool{}
	for _, w := range strings.Fields(words) {
		m[w] = true
	}
	return m
}

func commandOf(r dsec.AuditRecord) command {
	c := command{exec: r.Exec}
	if name, gone := strings.CutPrefix(r.Exe, "~"); gone {
		c.name = bare(path.Base(name)) // as asked for, or the command name
	} else if r.Exe != "" {
		c.exe, c.name = r.Exe, bare(path.Base(r.Exe))
	}
	if len(r.Args) > 0 {
		c.args = r.Args[1:]
		// A file may serve many names, and a script's interpreter is not what was meant. But
		// who is called something else and gets a script is a shell.
		if called := bare(path.Base(r.Args[0])); shells[c.name] && called != c.name && !shells[strings.TrimPrefix(called, "-")] && r.Args[0] != "" && (c.name == "busybox" || inline(c.args) == "") {
			c.name = called
		}
	}
	if shells[c.name] || isPython(c.name) || c.name == "perl" || c.name == "node" || c.name == "ruby" {
		c.script = inline(c.args)
	}
	return c
}

// bare takes a version off: "python3.11" is the same program as "python3".
func bare(name string) string {
	if rest, ok := strings.CutPrefix(name, "python3."); ok && rest != "" {
		return "python3"
	}
	return strings.TrimSuffix(name, " (deleted)")
}

func isPython(name string) bool { return name == "python" || name == "python3" }

// inline is the text after -c or -e; "": there is none.
func inline(args []string) string {
	for i, a := range args {
		switch {
		case len(a) < 2 || a[0] != '-':
			return ""
		case a[1] != '-' && (strings.HasSuffix(a, "c") || a == "-e" || a == "-E") && i+1 < len(args):
			return args[i+1]
		}
	}
	return ""
}

// module is what `python -m` runs, and what it is given.
func (c command) module() (string, []string) {
	if !isPython(c.name) {
		return "", nil
	}
	for i, a := range c.args {
		if a == "-m" && i+1 < len(c.args) {
			return c.args[i+1], c.args[i+2:]
		}
		if !strings.HasPrefix(a, "-") {
			// A script of the name, started by its interpreter.
			if base := path.Base(a); base == "pip" || base == "pip3" || base == "pytest" || base == "py.test" {
				return strings.TrimSuffix(base, "3"), c.args[i+1:]
			}
			break
		}
	}
	return "", nil
}

// line is the command as a person would read it.
func (c command) line() string {
	return strings.TrimSpace(c.name + " " + strings.Join(c.args, " "))
}

// has reports whether one of the arguments is one of these.
func (c command) has(any ...string) bool {
	for _, a := range c.args {
		for _, w := range any {
			if a == w {
				return true
			}
		}
	}
	return false
}

// mentions returns the first of these texts that an argument holds.
func (c command) mentions(texts ...string) string {
	all := strings.Join(c.args, " ")
	for _, t := range texts {
		if strings.Contains(all, t) {
			return t
		}
	}
	return ""
}

// operands are the arguments that are no options.
func (c command) operands() (out []string) {
	for _, a := range c.args {
		if !strings.HasPrefix(a, "-") {
			out = append(out, a)
		}
	}
	return out
}

// installer reports whether a program changes the system as its work is.
func installer(c command) bool {
	switch c.name {
	case "dpkg", "dpkg-deb", "apt", "apt-get", "dpkg-divert", "dpkg-trigger", "update-alternatives", "ldconfig", "useradd", "usermod", "groupadd", "adduser",
		"pip", "pip3", "update-ca-certificates", "py3compile", "npm", "virtualenv", "uv":
		return true
	}
	m, _ := c.module()
	return m == "pip" || m == "venv" || m == "ensurepip" || m == "virtualenv"
}
