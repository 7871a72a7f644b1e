package dsec

import (
	"encoding/json"
	"math"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"
)

func TestARewardIsOneFiniteNumber(t *testing.T) {
	for text, want := range map[string]float64{"1": 1, " 0.25\n": 0.25, "-3e2": -300, "0": 0, `{"reward": 0.5, "passed": 3}`: 0.5, `{"x": {"reward": 2}, "reward": 1}`: 1} {
		r, details, err := ParseReward([]byte(text))
		if err != nil || r != want || (details != nil) != strings.HasPrefix(text, "{") {
			t.Errorf("%q: %v %s %v", text, r, details, err)
		}
	}
	for _, text := range []string{"", " \n", "nan", "NaN", "Infinity", "1e999", "null", "true", `"1"`, "[1]", "1 2", "0x1", "1,", "{}", `{"reward": "1"}`,
		`{"reward": null}`, `{"reward": 1, "reward": 0}`, `{"reward": 1e999}`, `{"reward": 1} x`, `{"reward": 1`, `{"Reward": 1}`, "\xff", "1" + strings.Repeat("0", MaxReward)} {
		if r, _, err := ParseReward([]byte(text)); err == nil {
			t.Errorf("%.40q is a reward: %v", text, r)
		}
	}
}

func FuzzParseReward(f *testing.F) {
	for _, s := range []string{"1", "-0.5e3", `{"reward": 1, "a": [1, {}]}`, "nan", `{"reward": 1, "reward": 2}`, "{", ""} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		r, details, err := ParseReward(b)
		if err != nil {
			return
		}
		if math.IsNaN(r) || math.IsInf(r, 0) {
			t.Fatalf("%q: %v", b, r)
		}
		if details != nil && !json.Valid(details) {
			t.Fatalf("%q: details %q", b, details)
		}
	})
}

func TestGradeResultIsAsItWasWritten(t *testing.T) {
	b, err := os.ReadFile("testdata/grade.json")
	if err != nil {
		t.Fatal(err)
	}
	half := 0.5
	want := GradeResult{Reward: &half, Details: json.RawMessage(`{"reward":0.5,"passed":3}`), Cause: CauseCompleted, Where: GradeFresh, Sandbox: "nodea-01",
		Output: []byte("3 passed\n"), Evidence: []string{"not taken: \"/repo/f\": a device, pipe or socket"},
		Applied: Applied{Files: 2, Bytes: 10, Removed: 1, Refused: 1}, Time: time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC), Wall: time.Second}
	var got GradeResult
	if err := json.Unmarshal(b, &got); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v %v", got, err)
	}
	again, err := json.Marshal(want)
	if err != nil || string(again)+"\n" != string(b) {
		t.Errorf("%s", again)
	}
}

func TestGradeSpecSaysWhatIsWrong(t *testing.T) {
	good := func() GradeSpec {
		return GradeSpec{Command: []string{"/bin/true"}, Paths: []string{"/repo/x"}, Files: map[string][]byte{"/grader/run": []byte("x")}}
	}
	if s := good(); s.Validate() != nil {
		t.Fatal(s.Validate())
	}
	for field, change := range map[string]func(*GradeSpec){
		"where":      func(s *GradeSpec) { s.Where = "elsewhere" },
		"command":    func(s *GradeSpec) { s.Command = nil },
		"timeout":    func(s *GradeSpec) { s.Timeout = MaxGradeTime + 1 },
		"paths":      func(s *GradeSpec) { s.Paths = []string{"/repo/../etc"} },
		"paths ":     func(s *GradeSpec) { s.Paths = []string{"/"} },
		"paths  ":    func(s *GradeSpec) { s.Paths = []string{RewardPath} },
		"paths   ":   func(s *GradeSpec) { s.Paths = make([]string, MaxGradePaths+1) },
		"exclude":    func(s *GradeSpec) { s.Exclude = []string{"/a/["} },
		"files":      func(s *GradeSpec) { s.Files["/big"] = make([]byte, MaxGradeFiles) },
		"files ":     func(s *GradeSpec) { s.Files[RewardPath] = nil },
		"verify":     func(s *GradeSpec) { s.Verify = []string{"/x"} },
		"where ":     func(s *GradeSpec) { s.Where = GradeSame },
		"limits.cpu": func(s *GradeSpec) { s.Limits.CPU = -1 },
		"network":    func(s *GradeSpec) { s.Network = "wide" },
		"workdir":    func(s *GradeSpec) { s.Workdir = "x" },
	} {
		s := good()
		change(&s)
		err := s.Validate()
		if ClassOf(err) != Invalid || !strings.Contains(err.Error(), strings.TrimSpace(field)) {
			t.Errorf("%s: %v", field, err)
		}
	}
}
