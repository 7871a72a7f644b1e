package corpus

import (
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
)

// MakeRepo writes a repository with its past to an empty directory. It needs git and
// python3 here.
func MakeRepo(repo, dir string) error {
	from := path.Join("testdata/repos", repo)
	err := fs.WalkDir(files, from, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := fs.ReadFile(files, p)
		if err != nil {
			return err
		}
		to := filepath.Join(dir, strings.TrimSuffix(strings.TrimPrefix(p, from), ".in")) // a go.mod would end what is embedded
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			return err
		}
		return os.WriteFile(to, text, 0o644)
	})
	if err != nil {
		return err
	}
	script, err := fs.ReadFile(files, "testdata/history.sh")
	if err != nil {
		return err
	}
	file, old, now := Fix(repo)
	cmd := exec.Command("/bin/sh", "-s", "--", dir, file, old, now)
	cmd.Stdin = strings.NewReader(string(script))
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("make the past of %s: %w\n%s", repo, err, out)
	}
	return nil
}

// Grade is the program that judges, which lies at /opt/harness/grade.sh.
func Grade() (string, error) {
	b, err := fs.ReadFile(files, "testdata/harness/grade.sh")
	return string(b), err
}
