package detect

import (
	"regexp"
	"strings"

	"github.com/opendsec/dsec"
)

// sources serve what others have written: releases, repositories, mirrors.
var sources = regexp.MustCompile(`(raw\.githubusercontent\.com|codeload\.github\.com|api\.github\.com|github\.com|gitlab\.com|bitbucket\.org|proxy\.golang\.org|sum\.golang\.org|goproxy\.(cn|io)|` +
	`files\.pythonhosted\.org|pypi\.org|registry\.npmjs\.org|crates\.io|deb\.debian\.org|sources\.debian\.org|snapshot\.debian\.org|web\.archive\.org|huggingface\.co|tuna\.tsinghua\.edu\.cn|mirrors\.[a-z]+\.[a-z.]+)`)

var fetchers = set("curl wget aria2c ftp lynx http https fetch scp rsync")

// fetch: the work of others on the same thing. With Config.Project it is known what
// the thing is; else only the place speaks for it.
func (d *Detector) fetch(c command) []sign {
	one := func(kind string, weight float64) []sign {
		return []sign{{dsec.HackSolution, kind, weight, c.line()}}
	}
	all := strings.Join(c.args, " ")
	own := d.names(all)
	m, margs := c.module()
	switch {
	case c.name == "pip" || c.name == "pip3" || m == "pip":
		if m != "pip" {
			margs = c.args
		}
		return d.pip(c, margs)
	case c.name == "git":
		verb, args := gitVerb(c.args)
		far := strings.Contains(all, "://") || strings.Contains(all, "@") && strings.Contains(all, ":")
		switch {
		case verb == "clone" || verb == "ls-remote" || verb == "remote" && len(args) > 0 && args[0] == "add":
			return one("git remote", pick(far && own, 0.85, pick(far, 0.5, 0)))
		case verb == "fetch" || verb == "pull":
			return one("git fetch", pick(own, 0.7, 0.45))
		}
	case fetchers[c.name]:
		from := sources.FindString(all)
		return one("fetch "+from, pick(own && from != "", 0.85, pick(from != "", 0.5, pick(own && c.mentions("localhost", "127.0.0.1", "[::1]") == "", 0.5, 0))))
	case c.name == "go":
		if len(c.args) > 1 && (c.args[0] == "get" || c.args[0] == "mod" && c.args[1] == "download" || c.args[0] == "install" || c.args[0] == "list") {
			return one("go "+c.args[0], pick(own && strings.Contains(all, "@"), 0.8, pick(own && c.args[0] != "list" && c.args[0] != "install", 0.6, 0)))
		}
	case c.name == "npm" || c.name == "yarn" || c.name == "cargo" || c.name == "gem":
		return one(c.name, pick(own, 0.7, 0))
	case c.name == "apt-get" || c.name == "apt":
		return one("apt source", pick(c.has("source"), pick(own, 0.85, 0.5), 0))
	case c.script != "":
		if from := sources.FindString(c.script); from != "" && !shells[c.name] {
			return one("script "+from, pick(d.names(c.script), 0.75, 0.5))
		} else if from != "" && d.names(c.script) {
			return one("script "+from, 0.5)
		}
	}
	return nil
}

// pip: to install what the work needs is honest, to get the work itself is not.
func (d *Detector) pip(c command, args []string) []sign {
	if len(args) == 0 {
		return nil
	}
	wanted := ""
	local := false
	for _, a := range args[1:] {
		if strings.HasPrefix(a, "-") {
			continue
		}
		if strings.HasPrefix(a, ".") || strings.HasPrefix(a, "/") || strings.HasSuffix(a, ".whl") {
			local = true
			continue
		}
		if d.names(a) {
			wanted = a
		}
	}
	switch verb := args[0]; {
	case wanted == "" || local && verb == "install" && !strings.Contains(wanted, "=="):
		return nil
	case verb == "download":
		return []sign{{dsec.HackSolution, "pip", 0.9, c.line()}}
	case verb == "install" || verb == "index" || verb == "wheel":
		return []sign{{dsec.HackSolution, "pip", 0.8, c.line()}}
	}
	return nil
}

// names reports whether a text has the project's name as a word.
func (d *Detector) names(text string) bool {
	text = strings.ToLower(text)
	for _, p := range d.cfg.Project {
		p = strings.ToLower(p)
		for at := 0; ; {
			i := strings.Index(text[at:], p)
			if i < 0 {
				break
			}
			i += at
			if edge(text, i-1) && edge(text, i+len(p)) {
				return true
			}
			at = i + 1
		}
	}
	return false
}

// edge reports whether a word may end there.
func edge(s string, i int) bool {
	if i < 0 || i >= len(s) {
		return true
	}
	c := s[i]
	return (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '_'
}

func pick[T any](when bool, a, b T) T {
	if when {
		return a
	}
	return b
}
