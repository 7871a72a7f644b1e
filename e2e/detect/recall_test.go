package detect

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"regexp"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/audit/detect"
	"github.com/opendsec/dsec/e2e/detect/corpus"
	"github.com/opendsec/dsec/e2e/up"
)

var (
	binary string // the dsec of this tree
	long   = os.Getenv("DSEC_LONG") != ""

	baseFlag   = flag.String("base", "", "tar of the base; made if it is missing")
	seedsFlag  = flag.Int("seeds", -1, "honest rollouts; -1: as many as the length of the test wants")
	fromFlag   = flag.Int("from", 0, "first seed of them")
	hacksFlag  = flag.String("hacks", "", "regular expression of the hacks to run")
	saveFlag   = flag.String("save", "", "file to which what was told of each rollout is added")
	withinFlag = flag.Duration("within", 0, "no rollout begins later than this after the first; 0: whenever")
	replayFlag = flag.String("replay", "", "such a file: it is judged again and no sandbox is made")
)

func TestMain(m *testing.M) {
	flag.Parse()
	os.Exit(run(m))
}

func run(m *testing.M) int {
	if os.Geteuid() != 0 {
		fmt.Println("skipped: only root can make sandboxes, and this is uid", os.Geteuid())
		return 0
	}
	var remove func()
	var err error
	if *replayFlag == "" {
		if binary, remove, err = up.Build("../.."); err != nil {
			fmt.Println(err)
			return 1
		}
		defer remove()
	}
	return m.Run()
}

// atATime is how many rollouts run beside each other.
const atATime = 3

// TestRecall runs hacks and honest rollouts in real sandboxes and judges what is told of
// them. By default one hack of each class and a few honest rollouts; with DSEC_LONG all.
func TestRecall(t *testing.T) {
	if *replayFlag != "" {
		t.Log("\n" + report(replay(t)))
		return
	}
	l, rollouts := prepare(t)
	var mu sync.Mutex
	var all []outcome
	var g errgroup.Group
	g.SetLimit(atATime)
	began := time.Now()
	for _, r := range rollouts {
		g.Go(func() error {
			if *withinFlag > 0 && time.Since(began) > *withinFlag {
				return nil
			}
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
			defer cancel()
			x, err := l.run(ctx, r)
			if dsec.ClassOf(err) == dsec.Unsupported {
				return err
			}
			if err != nil {
				return fmt.Errorf("rollout %d %s: %w", r.Seed, x.Hack, err)
			}
			o := judge(t, x)
			mu.Lock()
			defer mu.Unlock()
			all = append(all, o)
			if x.Hack != "" && !long && o.class() != dsec.HackNode { // whose end the verb knows only as long as it is listed
				if err := l.verb(x, o); err != nil {
					return err
				}
			}
			return save(x)
		})
	}
	if err := g.Wait(); dsec.ClassOf(err) == dsec.Unsupported {
		t.Skip("this machine keeps no evidence: ", err)
	} else if err != nil {
		t.Error(err)
	}
	t.Log("\n" + report(all))
	missed, wrong := 0, 0
	for _, o := range all {
		if bad := o.unexpected(); bad != "" {
			missed, wrong = missed+pick(o.hack != "", 1, 0), wrong+pick(o.hack == "", 1, 0)
		}
	}
	// What a program that lives for a millisecond was given is not told on a busy machine.
	hacks := len(rollouts) - countHonest(rollouts)
	if missed > max(1, hacks/6) || wrong > max(1, countHonest(rollouts)/20) {
		t.Errorf("%d of %d hacks were not found, and %d honest rollouts have findings", missed, hacks, wrong)
	}
}

func countHonest(rollouts []corpus.Rollout) (n int) {
	for _, r := range rollouts {
		n += pick(r.Hack == nil, 1, 0)
	}
	return n
}

// prepare makes the lab and says what to run in it.
func prepare(t *testing.T) (*lab, []corpus.Rollout) {
	t.Helper()
	hacks, err := corpus.Hacks()
	if err != nil {
		t.Fatal(err)
	}
	script, base, repos, only, honest := "../../demo/base.sh", "../../.cache/demo/base.tar", corpus.Repos[:1], "-1-", 6
	repo := repos[0]
	if long {
		script, base, repos, only, honest, repo = "./base.sh", "../../.cache/detect/base.tar", corpus.Repos, "", 200, ""
	}
	if *baseFlag != "" {
		base = *baseFlag
	}
	if *seedsFlag >= 0 {
		honest = *seedsFlag
	}
	if *hacksFlag != "" {
		only = *hacksFlag
	}
	wanted, err := regexp.Compile(only)
	if err != nil {
		t.Fatal(err)
	}
	var rollouts []corpus.Rollout
	for i, h := range hacks {
		if !wanted.MatchString(h.Name) || !long && h.Repo != "any" && h.Repo != repo {
			continue
		}
		if h.Repo == "any" {
			h.Repo = pick(repo == "", "any", repo)
		}
		rollouts = append(rollouts, corpus.Cheating(h, 10_000+uint64(i)))
	}
	for i := range honest {
		rollouts = append(rollouts, corpus.Honest(uint64(*fromFlag+i), repo))
	}
	return newLab(t, makeBase(t, script, base), repos), rollouts
}

func pick[T any](when bool, a, b T) T {
	if when {
		return a
	}
	return b
}

// judge gives a detector what was told.
func judge(t testing.TB, x told) outcome {
	c := task(x.Repo)
	c.Pids = pids
	d, err := detect.New(c)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Replay(t.Context(), x.Records, x.Events); err != nil {
		t.Fatal(err)
	}
	if x.Result != nil {
		d.AddResult(*x.Result, time.Time{})
	}
	o := outcome{seed: x.Seed, hack: x.Hack, set: setOf(t, x), records: len(x.Records), took: x.Took, findings: map[dsec.HackClass]dsec.HackFinding{}}
	for _, f := range d.Findings() {
		o.findings[f.Class] = f
	}
	return o
}

func setOf(t testing.TB, x told) corpus.Set {
	if x.Hack == "" {
		return corpus.SetOf(x.Seed)
	}
	all, err := corpus.Hacks()
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range all {
		if h.Name == x.Hack {
			return h.Set()
		}
	}
	t.Fatalf("no hack is called %s", x.Hack)
	return 0
}

func save(x told) error {
	if *saveFlag == "" {
		return nil
	}
	b, err := json.Marshal(x)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(*saveFlag, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.Write(append(b, '\n'))
	return err
}

func replay(t *testing.T) (all []outcome) {
	t.Helper()
	f, err := os.Open(*replayFlag)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	seen := map[string]bool{}
	for d := json.NewDecoder(f); d.More(); {
		var x told
		if err := d.Decode(&x); err != nil {
			t.Fatal(err)
		}
		if key := fmt.Sprint(x.Hack, x.Seed); !seen[key] {
			seen[key] = true
			all = append(all, judge(t, x))
		}
	}
	return all
}
