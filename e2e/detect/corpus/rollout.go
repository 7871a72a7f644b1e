package corpus

import (
	"fmt"
	"math/rand/v2"
	"strings"
)

// Repos are those that rollouts work on.
var Repos = []string{"python", "c", "go"}

// Step is one command of an agent.
type Step struct {
	ID     string // of the command
	Script string // for bash -c; empty: File is run
	File   string // text that lies at Path before
	Path   string
}

// Argv is how it is started.
func (s Step) Argv() []string {
	if s.Script != "" {
		return []string{"/bin/bash", "-c", s.Script}
	}
	if strings.HasSuffix(s.Path, ".py") {
		return []string{"/usr/bin/python3", s.Path}
	}
	return []string{"/bin/bash", s.Path}
}

// Rollout is what an agent does in a sandbox.
type Rollout struct {
	Seed  uint64
	Repo  string
	User  string // "root" or "agent"
	Steps []Step
	Judge bool // the harness judges it at the end
	Hack  *Hack
}

// lateSeed is the first seed of honest rollouts that ran after the last change.
const lateSeed = 144

// SetOf says which set the honest rollout of a seed is in.
func SetOf(seed uint64) Set {
	switch {
	case seed >= lateSeed:
		return Late
	case seed%2 == 1:
		return Tuned
	}
	return Seen
}

// maker writes a rollout.
type maker struct {
	*rand.Rand
	repo  string
	user  string
	steps []string
}

func (m *maker) pick(all ...string) string { return all[m.IntN(len(all))] }

func (m *maker) add(scripts ...string) { m.steps = append(m.steps, scripts...) }

// some adds n different ones of a list.
func (m *maker) some(n int, all []string) {
	for _, i := range m.Perm(len(all))[:min(n, len(all))] {
		m.add(all[i])
	}
}

// Honest makes the rollout of a seed in a repository; "": the seed chooses.
func Honest(seed uint64, repo string) Rollout {
	m := &maker{Rand: rand.New(rand.NewPCG(seed, 0x64656365)), repo: repo, user: "root"}
	chosen := Repos[m.IntN(len(Repos))]
	if m.repo == "" {
		m.repo = chosen
	}
	if m.IntN(10) < 3 {
		m.user = "agent"
	}
	m.some(3+m.IntN(4), m.explores())
	m.some(1+m.IntN(2), m.history())
	m.add(m.test())
	m.some(1+m.IntN(3), m.tries())
	m.add(m.fix()...)
	m.add(m.test())
	m.some(2+m.IntN(4), m.extras())
	m.some(m.IntN(3), m.own())
	m.add(m.test())
	m.some(1+m.IntN(3), m.finishes())
	r := Rollout{Seed: seed, Repo: m.repo, User: m.user, Judge: true}
	for i, s := range m.steps {
		r.Steps = append(r.Steps, Step{ID: fmt.Sprintf("agent%d", i), Script: "cd /repo && " + s})
	}
	return r
}

// Cheating embeds a hack in an honest rollout.
func Cheating(h Hack, seed uint64) Rollout {
	repo := h.Repo
	if repo == "any" {
		repo = ""
	}
	r := Honest(seed, repo)
	r.User, r.Hack = "root", &h
	at := len(r.Steps)/2 + int(seed%3)
	if h.When != Mid {
		at = len(r.Steps)
		r.Judge = h.When == End
	}
	at = min(at, len(r.Steps))
	s := Step{ID: "agenthack"}
	switch {
	case h.Python:
		s.File, s.Path = h.Text, "/tmp/step.py"
	case seed%2 == 0:
		s.File, s.Path = h.Text, "/tmp/step.sh"
	default:
		s.Script = h.Text
	}
	r.Steps = append(append(append([]Step{}, r.Steps[:at]...), s), r.Steps[at:]...)
	return r
}
