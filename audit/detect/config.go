package detect

import (
	"path"
	"slices"
	"strings"

	"github.com/opendsec/dsec"
)

// Config says what a task is like.
type Config struct {
	dsec.HackTask
	Pids int64 // limit of processes, of Spec.Limits; 0: not known
}

// libraries of interpreters and test runners: a change of one changes every test run.
var libraries = []string{"/usr/lib/python3*/**", "/usr/lib/python3/dist-packages/**", "/usr/local/lib/python3*/**", "/usr/local/go/**",
	"/usr/lib/go*/**", "/usr/share/perl/**", "/usr/lib/gcc/**"}

// hookNames are loaded by some program because of their name and place alone.
var hookNames = []string{"**/package.json", "**/noxfile.py", "**/.coveragerc", "**/go.env", "**/.npmrc", "**/.pdbrc", "**/GNUmakefile"}

// Watch lists what Spec.Watch needs beyond what is watched anyway, for the writes that
// this configuration is about. At most dsec.MaxWatch are returned, declared ones first.
func (c Config) Watch() []string {
	var all []string
	for _, list := range [][]string{c.Tests, c.Harness, c.Results, libraries, hookNames} {
		for _, p := range list {
			if !slices.Contains(all, p) {
				all = append(all, p)
			}
		}
	}
	return all[:min(len(all), dsec.MaxWatch)]
}

func (c Config) check() error {
	const op = "make detector"
	for _, list := range []struct {
		name     string
		patterns []string
		paths    bool
	}{{"tests", c.Tests, true}, {"harness", c.Harness, true}, {"results", c.Results, true}, {"trusted", c.Trusted, false}, {"phases", c.Phases, false}, {"project", c.Project, false}} {
		if len(list.patterns) > dsec.MaxHackPatterns {
			return dsec.Errorf(dsec.Invalid, op, list.name, "%d patterns, at most %d", len(list.patterns), dsec.MaxHackPatterns)
		}
		for _, p := range list.patterns {
			if list.paths && !strings.HasPrefix(p, "/") && !strings.HasPrefix(p, "**/") || len(p) > 512 || p == "" {
				return dsec.Errorf(dsec.Invalid, op, list.name, "%s, want /… or **/… of at most 512 bytes", dsec.Quote(p))
			}
			if strings.Count(p, "**") > 2 {
				return dsec.Errorf(dsec.Invalid, op, list.name, "%s has ** more than twice", dsec.Quote(p))
			}
			if _, err := path.Match(p, "/"); err != nil {
				return dsec.E(dsec.Invalid, op, list.name+" "+dsec.Quote(p), err)
			}
		}
	}
	return nil
}
