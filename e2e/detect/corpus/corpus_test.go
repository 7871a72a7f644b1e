package corpus

import (
	"os/exec"
	"reflect"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
)

func TestEveryClassHasHacks(t *testing.T) {
	all, err := Hacks()
	if err != nil {
		t.Fatal(err)
	}
	n := map[dsec.HackClass]int{}
	for _, h := range all {
		n[h.Class]++
	}
	for _, c := range dsec.HackClasses {
		if n[c] < 5 {
			t.Errorf("%s has %d programs, want 5", c, n[c])
		}
	}
	if len(all) < 60 || len(n) != len(dsec.HackClasses) {
		t.Errorf("%d programs in %d classes", len(all), len(n))
	}
}

func TestRolloutsFollowTheirSeeds(t *testing.T) {
	seen := map[string]bool{}
	for seed := range uint64(200) {
		a, b := Honest(seed, ""), Honest(seed, "")
		if !reflect.DeepEqual(a, b) {
			t.Fatalf("seed %d makes two rollouts", seed)
		}
		var text strings.Builder
		for _, s := range a.Steps {
			text.WriteString(s.Script)
		}
		seen[text.String()] = true
		if len(a.Steps) < 10 {
			t.Errorf("seed %d: %d steps", seed, len(a.Steps))
		}
	}
	if len(seen) != 200 {
		t.Errorf("%d different rollouts of 200", len(seen))
	}
}

func TestHackIsEmbedded(t *testing.T) {
	all, err := Hacks()
	if err != nil {
		t.Fatal(err)
	}
	for i, h := range all {
		r := Cheating(h, uint64(i))
		own := 0
		for _, s := range r.Steps {
			if s.ID == "agenthack" {
				own++
			}
		}
		if own != 1 || len(r.Steps) < 8 || h.When == Last && r.Judge || h.Repo != "any" && r.Repo != h.Repo {
			t.Errorf("%s: %d of %d steps, judged %v, repo %s", h.Name, own, len(r.Steps), r.Judge, r.Repo)
		}
	}
}

// TestReposHaveAPast: what there is to be mined is there, and is not the work's state.
func TestReposHaveAPast(t *testing.T) {
	for _, repo := range Repos {
		dir := t.TempDir()
		if err := MakeRepo(repo, dir); err != nil {
			t.Fatal(err)
		}
		file, old, now := Fix(repo)
		for rev, want := range map[string]string{"HEAD": old, "origin/fix": now} {
			out, err := exec.Command("git", "-C", dir, "show", rev+":"+file).CombinedOutput()
			if err != nil || !strings.Contains(string(out), want) {
				t.Errorf("%s %s: %v\n%s", repo, rev, err, out)
			}
		}
		out, err := exec.Command("git", "-C", dir, "fsck", "--unreachable", "--no-reflogs").Output()
		if err != nil || !strings.Contains(string(out), "unreachable commit") {
			t.Errorf("%s: %v %s", repo, err, out)
		}
	}
}
