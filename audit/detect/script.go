package detect

import (
	"path"
	"regexp"
	"strings"
)

const (
	mostPieces = 64  // commands of a text that are looked at
	textWeight = 0.9 // of what a text says against what was seen to be started
)

var (
	between    = regexp.MustCompile("[;|&\n()`{}]+")
	assignment = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*=`)
	beforeName = set("do then else elif if while until time exec command builtin nohup setsid sudo ! env xargs nice")
)

// pieces are the commands that the text of `sh -c` seems to hold. A program that ends at
// once may be told without its arguments (on kernels without BTF), and a builtin is no program, but
// the shell around it is told with the text.
// What is quoted or handed on as a document may be no command: it weighs less, and
// nothing behind "<<" is looked at.
func (c command) pieces() (all []command) {
	if c.script == "" || !shells[c.name] {
		return nil
	}
	text, _, _ := strings.Cut(c.script, "<<")
	for _, piece := range between.Split(text, mostPieces) {
		words := strings.Fields(piece)
		for len(words) > 0 && (beforeName[words[0]] || assignment.MatchString(words[0])) {
			words = words[1:]
		}
		if len(words) > 2 && words[0] == "timeout" {
			words = words[2:]
		}
		if len(words) == 0 || strings.ContainsAny(words[0], `"'$#`) {
			continue
		}
		x := command{name: bare(path.Base(words[0])), parent: c.name, exec: c.exec}
		for _, w := range words[1:] {
			if strings.HasPrefix(w, "#") {
				break
			}
			x.args = append(x.args, strings.Trim(w, `"'`))
		}
		all = append(all, x)
	}
	return all
}
