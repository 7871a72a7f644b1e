package corpus

import (
	"bufio"
	"embed"
	"fmt"
	"io/fs"
	"path"
	"strconv"
	"strings"

	"github.com/opendsec/dsec"
)

//go:embed all:testdata
var files embed.FS

// When a hack is run in the rollout around it.
const (
	Mid  = "mid"  // among the commands of the agent
	End  = "end"  // after them, before the harness judges
	Last = "last" // after which nothing can be run
)

// Hack is a program that cheats.
type Hack struct {
	Name   string // of its file, without the ending
	Class  dsec.HackClass
	Does   string
	Source string // where the idea is from
	Repo   string // "any", or the repository it needs
	When   string
	Text   string
	Python bool // else bash
	Number int  // in its class, from 1
	Late   bool // it was written after the detectors were tuned
}

// Set is what a part of the corpus was used for.
type Set int

// The sets.
const (
	Tuned Set = iota // detectors were tuned with it
	Seen             // it was to be kept apart, but its first results were looked at and led to changes too
	Late             // it was made, or run, after that; 2 of the 3 hacks that were missed then have led to changes since
	Sets             // how many there are
)

// Set says which one it is in.
func (h Hack) Set() Set {
	switch {
	case h.Late:
		return Late
	case h.Number%2 == 1:
		return Tuned
	}
	return Seen
}

// Hacks reads all of them, in order.
func Hacks() (all []Hack, err error) {
	const dir = "testdata/hacks"
	entries, err := fs.ReadDir(files, dir)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		text, err := fs.ReadFile(files, path.Join(dir, e.Name()))
		if err != nil {
			return nil, err
		}
		h, err := parse(e.Name(), string(text))
		if err != nil {
			return nil, fmt.Errorf("read hack %s: %w", e.Name(), err)
		}
		all = append(all, h)
	}
	return all, nil
}

// parse reads the header; the file is named CLASS-NUMBER-NAME.
func parse(file, text string) (h Hack, err error) {
	h = Hack{Name: strings.TrimSuffix(file, path.Ext(file)), Text: text, Python: path.Ext(file) == ".py"}
	parts := strings.SplitN(h.Name, "-", 3)
	if len(parts) != 3 {
		return h, fmt.Errorf("its name is not CLASS-NUMBER-NAME")
	}
	if h.Number, err = strconv.Atoi(parts[1]); err != nil {
		return h, err
	}
	set := ""
	fields := map[string]*string{"set": &set, "does": &h.Does, "source": &h.Source, "repo": &h.Repo, "when": &h.When}
	lines := bufio.NewScanner(strings.NewReader(text))
	for lines.Scan() {
		l, ok := strings.CutPrefix(lines.Text(), "# ")
		if !ok {
			if strings.HasPrefix(lines.Text(), "#!") {
				continue
			}
			break
		}
		key, value, _ := strings.Cut(l, ": ")
		if key == "class" {
			h.Class = dsec.HackClass(value)
		} else if at := fields[key]; at != nil {
			*at = value
		}
	}
	h.Late = set == "late"
	if string(h.Class) != parts[0] || h.Does == "" || h.Source == "" || h.Repo == "" || h.When == "" {
		return h, fmt.Errorf("want class (as in its name), does, source, repo and when in its header")
	}
	return h, nil
}
