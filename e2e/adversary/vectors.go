package adversary

import (
	"fmt"
	"strings"

	"github.com/opendsec/dsec"
)

// Vector is one technique: what it tries, what stops it, and how that is seen.
type Vector struct {
	Name  string // of the technique, as the program has it
	Class string
	What  string
	Wall  string // what stops it
	// Answers are what a sandbox's root and its user see: an errno or a text that
	// the program says. For a technique that works, what it says then.
	Root, User string
	Control    string // why there is no control; empty: there is one
	Limit      string // why it works all the same; see the known limits in SECURITY.md
	// Recorded is the type of event that the attempt leaves in the record of the
	// sandbox beside the beginning and the end of its command; empty: none.
	Recorded dsec.EventType
	// Evidence is the kind of audit record that names the attempt's command, beside those of
	// the programs it started; empty: none.
	Evidence dsec.AuditKind
}

// group is vectors that one wall stops. A row of them is
//
//	name | what it tries | answer of root [; of the user] [| !why there is no control] [| ?why it works] [| +recorded] [| @evidence]
type group struct {
	class, wall, rows string
}

// Vectors lists all, in the order of the document.
func Vectors() ([]Vector, error) {
	var all []Vector
	for _, g := range groups {
		for row := range strings.SplitSeq(strings.TrimSpace(g.rows), "\n") {
			v, err := g.vector(row)
			if err != nil {
				return nil, err
			}
			all = append(all, v)
		}
	}
	return all, nil
}

func (g group) vector(row string) (Vector, error) {
	part := strings.Split(row, " | ")
	if len(part) < 3 {
		return Vector{}, fmt.Errorf("read vector %q: want name, what, answers", row)
	}
	v := Vector{Name: part[0], What: part[1], Class: g.class, Wall: g.wall}
	v.Root, v.User, _ = strings.Cut(part[2], "; ")
	if v.User == "" {
		v.User = v.Root
	}
	for _, more := range part[3:] {
		switch {
		case strings.HasPrefix(more, "!"):
			v.Control = more[1:]
		case strings.HasPrefix(more, "?"):
			v.Limit = more[1:]
		case strings.HasPrefix(more, "+"):
			v.Recorded = dsec.EventType(more[1:])
		case strings.HasPrefix(more, "@"):
			v.Evidence = dsec.AuditKind(more[1:])
		default:
			return Vector{}, fmt.Errorf("read vector %q: want !, ?, + or @ before %q", row, more)
		}
	}
	return v, nil
}

// Document is docs/security-vectors.md without the tests of other packages.
func Document(all []Vector) string {
	var b strings.Builder
	class, wall := "", ""
	for _, v := range all {
		if v.Class != class {
			class, wall = v.Class, ""
			fmt.Fprintf(&b, "\n## %s\n", class)
		}
		if v.Wall != wall {
			wall = v.Wall
			fmt.Fprintf(&b, "\nStopped by: %s.\n\n| technique | what it tries | root; user see |\n|---|---|---|\n", wall)
		}
		answer := v.Root
		if v.User != v.Root {
			answer += "; " + v.User
		}
		if v.Limit != "" {
			answer = "**works**: " + v.Limit
		}
		if v.Recorded != "" {
			answer += ", event " + string(v.Recorded)
		}
		if v.Evidence != "" {
			answer += ", audit " + string(v.Evidence)
		}
		if v.Control != "" {
			answer += " (no control: " + v.Control + ")"
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", v.Name, v.What, answer)
	}
	return b.String()
}
