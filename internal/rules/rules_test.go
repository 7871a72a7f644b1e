package rules

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

func TestHouseRules(t *testing.T) {
	files, err := Load("../..")
	if err != nil {
		t.Fatal(err)
	}
	if len(files) < 20 {
		t.Fatalf("found only %d files: the walk is broken", len(files))
	}
	for name, rule := range map[string]func([]File) []string{
		"package docs": PackageDocs, "sizes": Sizes, "error texts": Texts, "no init": NoInit, "imports": Imports,
	} {
		t.Run(name, func(t *testing.T) {
			for _, b := range rule(files) {
				t.Error(b)
			}
		})
	}
}

func TestImportRuleKnowsWrongFromRight(t *testing.T) {
	for _, c := range []struct {
		from, to string
		ok       bool
	}{
		{".", "strings", true},
		{".", "golang.org/x/sys/unix", false},
		{"runtime", Module + "/process", true},
		{"process", Module + "/runtime", false},
		{"runtime/container", Module + "/node", false},
		{"runtime/container", Module + "/internal/hold", true},
		{"node", Module + "/runtime/container", false},
		{"node", Module + "/runtime", true},
		{"gateway", Module + "/node", false},
		{"scheduler", Module, true},
		{"scheduler", Module + "/runtime", false},
		{"cmd/dsec", Module + "/runtime/container", true},
		{"runtime/container", Module + "/image/erofs", true},
		{"runtime/container", Module + "/confine/apparmor", true},
		{"layer", Module + "/api/dsec/v1", false},
		{"layer/ondemand/ondemandtest", Module + "/blob/bucket", true},
		{"layer/ondemand/ondemandtest", Module + "/runtime/container", false},
		{"layer/store", Module + "/blob/bucket", false},
		{"guest", Module + "/process", true},
		{"guest", Module + "/runtime", false},
		{"guest/agent", Module + "/guest", true},
		{"guest/agent", Module + "/confine", true},
		{"guest/agent", Module + "/internal/linux", true},
		{"guest/agent", Module + "/api/dsec/v1", false},
		{"guest/agent", Module + "/netpolicy", false},
		{"guest/agent", Module + "/node", false},
		{"runtime/microvm", Module + "/guest", true},
		{"runtime/microvm", Module + "/guest/agent", false},
	} {
		if why := importRule(c.from, c.to); (why == "") != c.ok {
			t.Errorf("%s → %s: %q, want ok %v", c.from, c.to, why, c.ok)
		}
	}
}

// TestNothingOfTheWorkshopIsCommitted keeps paths of the machine it was built
// on out of the repository.
func TestNothingOfTheWorkshopIsCommitted(t *testing.T) {
	out, err := exec.Command("git", "-C", "../..", "ls-files", "-z").Output()
	if err != nil {
		t.Skipf("not a git checkout: %v", err)
	}
	forbidden := regexp.MustCompile(`/wo` + `rk/|/tmp/ba` + `sh_`)
	for _, name := range strings.Split(strings.TrimRight(string(out), "\x00"), "\x00") {
		text, err := os.ReadFile(filepath.Join("../..", name))
		if err != nil {
			continue // deleted, not yet committed
		}
		if m := forbidden.Find(text); m != nil {
			t.Errorf("%s mentions %s", name, m)
		}
	}
}
