package rules

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// caseIDs are the behaviours of docs/cases.md that this version promises.
func caseIDs(t *testing.T) []string {
	text, err := os.ReadFile("../../docs/cases.md")
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	for _, m := range regexp.MustCompile(`(?m)^\| ([A-Z][0-9]+) \|`).FindAllStringSubmatch(string(text), -1) {
		ids = append(ids, m[1])
	}
	if len(ids) < 50 {
		t.Fatalf("only %d cases in docs/cases.md", len(ids))
	}
	return ids
}

// TestEveryCaseHasATestOfItsName wants TestA5_… in Go or test_a5_… in Python.
func TestEveryCaseHasATestOfItsName(t *testing.T) {
	name := regexp.MustCompile(`func Test([A-I][0-9]+)_|t\.Run\("([A-I][0-9]+)_|name: "([A-I][0-9]+)_|\{"([A-I][0-9]+)_|def test_([a-iA-I][0-9]+)_`)
	have := map[string]bool{}
	err := filepath.WalkDir("../..", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && path != "../.." && strings.HasPrefix(d.Name(), ".") {
			return filepath.SkipDir
		}
		if d.IsDir() || !(strings.HasSuffix(path, ".go") || strings.HasSuffix(path, ".py")) {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for _, m := range name.FindAllStringSubmatch(string(text), -1) {
			have[strings.ToUpper(m[1]+m[2]+m[3]+m[4]+m[5])] = true
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, id := range caseIDs(t) {
		if !have[id] {
			t.Errorf("case %s has no test of its name", id)
		}
	}
}
