package user

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/dsec/v1/dsecv1connect"
)

// graded answers each grading with a result, and remembers what was asked.
type graded struct {
	disks
	answer *dsecv1.GradeResponse
	asked  *dsecv1.GradeRequest
}

func (g *graded) Grade(_ context.Context, r *dsecv1.GradeRequest) (*dsecv1.GradeResponse, error) {
	g.asked = r
	return g.answer, nil
}

func TestGradeTellsARewardFromNone(t *testing.T) {
	g, zero := &graded{}, 0.0
	mux := http.NewServeMux()
	mux.Handle(dsecv1connect.NewSandboxesHandler(g))
	serve(t, mux)
	file := filepath.Join(t.TempDir(), "grade.py")
	if err := os.WriteFile(file, []byte("text"), 0o600); err != nil {
		t.Fatal(err)
	}
	args := []string{"work", "--path", "/repo/a", "--exclude", "/repo/**/conftest.py", "--file", file + ":/grader/grade.py", "--layer", "tests:1",
		"--memory", "64MiB", "-e", "A=b", "--", "python3", "/grader/grade.py", "-q"}

	g.answer = &dsecv1.GradeResponse{Reward: &zero, Cause: "completed", Where: "fresh", Sandbox: "new", Details: []byte(`{"reward":0,"n":2}`), Output: []byte("said\x1b[2J\n")}
	out, _, err := said(t, Grade, args...)
	if err != nil || !strings.Contains(out, "reward       0\n") || !strings.Contains(out, "said?[2J\n") {
		t.Errorf("%v\n%q", err, out)
	}
	if a := g.asked; strings.Join(a.Command, " ") != "python3 /grader/grade.py -q" || a.Paths[0] != "/repo/a" || a.Exclude[0] != "/repo/**/conftest.py" ||
		string(a.Files[0].Data) != "text" || a.Files[0].Path != "/grader/grade.py" || a.Layers[0] != "tests:1" || a.Limits.Memory != 64<<20 || a.Env["A"] != "b" || a.CallId == "" {
		t.Errorf("asked %v", a)
	}
	out, _, err = said(t, Grade, append([]string{"-o", "json"}, args...)...)
	var got struct {
		Reward  *float64
		Details struct{ N int }
	}
	if jerr := json.Unmarshal([]byte(out), &got); err != nil || jerr != nil || got.Reward == nil || got.Details.N != 2 {
		t.Errorf("%v %v\n%s", err, jerr, out)
	}

	g.answer = &dsecv1.GradeResponse{Cause: "grader_error", Where: "fresh", Evidence: []string{"reward: there is none"}}
	out, _, err = said(t, Grade, args...)
	if !errors.Is(err, exitNoReward) || !strings.Contains(out, "reward       none\n") || !strings.Contains(out, "there is none") {
		t.Errorf("%v\n%q", err, out)
	}
}
