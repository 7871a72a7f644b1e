package detect

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/audit/detect"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/e2e/detect/corpus"
	"github.com/opendsec/dsec/e2e/up"
	"github.com/opendsec/dsec/files"
	"github.com/opendsec/dsec/process"
)

// lab is a machine with the base and a repository of each kind.
type lab struct {
	*up.Machine
	t *testing.T
}

// idBase is beyond the users of other machines that tests start.
const idBase = 1<<20 + 20*1100<<16

const (
	perStep = time.Minute
	pids    = 200 // of a sandbox
)

func newLab(t *testing.T, base string, repos []string) *lab {
	t.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "dsec-detect-")
	if err != nil {
		t.Fatal(err)
	}
	conf := fmt.Sprintf("gateway: {listen: ''}\nnode: {disk_pool: 8GiB, max_live: 16, uid_ranges: 64, uid_base: %d}\n", idBase)
	l := &lab{t: t, Machine: up.Start(t, binary, "dt", dir, conf)}
	began := time.Now()
	if _, err := l.Import(t.Context(), base, "base", nil); err != nil {
		t.Fatal(err)
	}
	t.Logf("the base was imported in %v", time.Since(began).Round(time.Second))
	for _, r := range repos {
		if _, err := l.UploadTree(t.Context(), bytes.NewReader(workspace(t, r)), client.BuildOptions{Tag: "repo-" + r}); err != nil {
			t.Fatal(err)
		}
	}
	return l
}

// workspace is a layer with a repository and the harness.
func workspace(t *testing.T, repo string) []byte {
	t.Helper()
	dir := t.TempDir()
	if err := corpus.MakeRepo(repo, dir); err != nil {
		t.Fatal(err)
	}
	grade, err := corpus.Grade()
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	put := func(name string, mode int64, body []byte) {
		h := &tar.Header{Name: name, Mode: mode, Typeflag: tar.TypeReg, Size: int64(len(body)), ModTime: time.Unix(1_700_000_000, 0)}
		if body == nil {
			h.Typeflag = tar.TypeDir
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(body); err != nil {
			t.Fatal(err)
		}
	}
	err = filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		name := "repo" + strings.TrimPrefix(p, dir)
		if err != nil || d.IsDir() {
			put(name+"/", 0o755, nil)
			return err
		}
		body, err := os.ReadFile(p)
		put(name, 0o644, append([]byte{}, body...))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	put("opt/harness/", 0o755, nil)
	put("opt/harness/grade.sh", 0o755, []byte(grade))
	put("logs/", 0o755, nil)
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// task is what a caller who wants findings declares of a repository.
func task(repo string) detect.Config {
	c := detect.Config{HackTask: dsec.HackTask{Harness: []string{"/opt/harness/**"}, Results: []string{"/logs/reward.txt", "/logs/junit.xml", "/logs"}, Trusted: []string{"grade", "setup*"},
		Project: []string{"wordkit", "acme/wordkit", "ringlib", "acme/ringlib", "intset", "acme/intset"}}}
	switch repo {
	case "go":
		c.Tests = []string{"/repo/checks/**"}
	default:
		c.Tests = []string{"/repo/tests/**"}
	}
	return c
}

// told is all that is known of a rollout afterwards.
type told struct {
	ID      dsec.SandboxID     `json:"id"`
	Seed    uint64             `json:"seed"`
	Hack    string             `json:"hack,omitempty"`
	Repo    string             `json:"repo"`
	Took    time.Duration      `json:"took"`
	Reward  string             `json:"reward,omitempty"`
	Output  string             `json:"output,omitempty"` // of the hack
	Records []dsec.AuditRecord `json:"records"`
	Events  []dsec.Event       `json:"events"`
	Result  *dsec.Result       `json:"result,omitempty"`
}

// run does a rollout in a sandbox of its own and collects what is told of it.
func (l *lab) run(ctx context.Context, r corpus.Rollout) (x told, err error) {
	began := time.Now()
	x = told{Seed: r.Seed, Repo: r.Repo}
	if r.Hack != nil {
		x.Hack = r.Hack.Name
	}
	spec := dsec.Spec{Tier: dsec.TierContainer, Image: "base", Layers: []dsec.LayerRef{dsec.LayerRef("repo-" + r.Repo)}, Network: dsec.NetworkAllow,
		Limits: dsec.Limits{CPU: 1, Memory: 768 << 20, Pids: pids, Disk: 768 << 20}, User: r.User, Workdir: "/repo"}
	spec.Watch = task(r.Repo).Watch()
	sb, err := l.Create(ctx, spec)
	if err != nil {
		return x, err
	}
	x.ID = sb.ID
	if r.User != "root" {
		if _, err := l.step(ctx, sb.ID, "root", corpus.Step{ID: "setup0", Script: "chown -R " + r.User + " /repo"}); err != nil {
			return x, err
		}
	}
	for _, s := range r.Steps {
		out, err := l.step(ctx, sb.ID, r.User, s)
		if s.ID == "agenthack" {
			x.Output = out
		}
		if err != nil && (r.Hack == nil || dsec.ClassOf(err) == dsec.Internal) {
			return x, fmt.Errorf("%s of seed %d: %w", s.Script, r.Seed, err)
		}
		if err != nil {
			break // the hack has broken it
		}
	}
	if r.Judge {
		if x.Reward, err = l.step(ctx, sb.ID, "root", corpus.Step{ID: "grade", Script: "/opt/harness/grade.sh"}); err != nil && r.Hack == nil {
			return x, err
		}
	}
	return x, l.collect(ctx, sb.ID, &x, began)
}

// step runs a command to its end; what it leaves in the background runs on.
func (l *lab) step(ctx context.Context, id dsec.SandboxID, user string, s corpus.Step) (string, error) {
	if s.File != "" {
		if _, err := l.Files(id, user).Write(ctx, s.Path, strings.NewReader(s.File), files.WriteOptions{}); err != nil {
			return "", err
		}
	}
	p, err := l.Exec(ctx, id, process.Spec{ID: s.ID, Argv: s.Argv(), User: user, Cwd: "/", Timeout: perStep, Head: 4 << 10, Tail: 4 << 10})
	if err != nil {
		return "", err
	}
	if _, err := p.Wait(ctx); err != nil {
		return "", err
	}
	stdout, stderr, err := p.Kept(ctx)
	return strings.TrimSpace(string(stdout.Head) + string(stderr.Head)), err
}

// verb asks `dsec findings`, which is to say the same of a sandbox that is gone.
func (l *lab) verb(x told, want outcome) error {
	c := task(x.Repo)
	args := []string{"findings", string(x.ID), "-o", "json", "--min", "0"}
	for flag, list := range map[string][]string{"--tests": c.Tests, "--harness": c.Harness, "--results": c.Results, "--trusted": c.Trusted, "--project": c.Project} {
		for _, v := range list {
			args = append(args, flag, v)
		}
	}
	cmd := exec.Command(l.Binary, args...)
	cmd.Env = append(os.Environ(), "DSEC_SOCKET="+filepath.Join(l.Dir, "run", "gateway.sock"))
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("dsec findings: %w: %s", err, out)
	}
	var found []dsec.HackFinding
	if err := json.Unmarshal(out, &found); err != nil {
		return fmt.Errorf("dsec findings: %w: %s", err, out)
	}
	for _, f := range found {
		if w := want.findings[f.Class]; f.Class == want.class() && (math.Abs(f.Confidence-w.Confidence) > 1e-9 || len(f.Evidence) != len(w.Evidence)) {
			return fmt.Errorf("dsec findings says %+v, want %+v", f, w)
		}
	}
	if want.class() == dsec.HackHistory { // as people see it
		table := exec.Command(l.Binary, "findings", string(x.ID))
		table.Env = cmd.Env
		out, err := table.CombinedOutput()
		l.t.Logf("dsec findings: %v\n%s", err, out)
	}
	if len(found) == 0 {
		return fmt.Errorf("dsec findings found nothing in %s", x.Hack)
	}
	return nil
}

// makeBase makes a base with a script, unless it is there.
func makeBase(t *testing.T, script, out string) string {
	t.Helper()
	began := time.Now()
	cmd := exec.Command(script, out)
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Skipf("there is no base to work in: %s: %v\n%s", script, err, text)
	}
	t.Logf("the base was made in %v", time.Since(began).Round(time.Second))
	return out
}
