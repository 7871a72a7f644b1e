package node

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/failpoint"
)

// grader runs a script, in a fresh sandbox, of what is at /root/task.
func grader(script string, change func(*dsec.GradeSpec)) dsec.GradeSpec {
	s := dsec.GradeSpec{Command: []string{"sh", "-c", script}, Paths: []string{"/root/task"}, Timeout: time.Minute}
	if change != nil {
		change(&s)
	}
	return s
}

func (w *world) grade(id dsec.SandboxID, s dsec.GradeSpec, callID string) dsec.GradeResult {
	w.t.Helper()
	res, err := w.Grade(w.t.Context(), id, s, callID)
	if err != nil {
		w.t.Fatalf("grade: %v", err)
	}
	return res
}

func TestFreshGradingSeesOnlyWhatWasDeclared(t *testing.T) {
	w := newWorld(t, nil)
	sb := w.create(nil)
	w.run(sb.ID, "mkdir /root/task; echo answer > /root/task/a; echo hidden > /root/other; echo bad > /etc/group")
	for _, state := range []dsec.State{dsec.Running, dsec.Paused, dsec.Stopped} {
		switch state {
		case dsec.Paused:
			if _, err := w.Pause(t.Context(), sb.ID, ""); err != nil {
				t.Fatal(err)
			}
		case dsec.Stopped:
			if _, err := w.Stop(t.Context(), sb.ID, "", ""); err != nil {
				t.Fatal(err)
			}
		}
		res := w.grade(sb.ID, grader("cat /root/task/a; cat /root/other /etc/group; id -u; echo 0.5 > $DSEC_REWARD", nil), "")
		if res.Cause != dsec.CauseCompleted || res.Reward == nil || *res.Reward != 0.5 {
			t.Fatalf("%s: %+v", state, res)
		}
		out := string(res.Output)
		if !strings.HasPrefix(out, "answer\n") || strings.Contains(out, "hidden") || strings.Contains(out, "bad") || !strings.Contains(out, "60606") {
			t.Errorf("%s: the grader saw %q", state, out)
		}
		if res.Sandbox == sb.ID || res.Applied.Files != 2 || res.Applied.Bytes != 7 {
			t.Errorf("%s: %+v", state, res)
		}
		if got := w.stateOf(res.Sandbox); got != dsec.Deleted {
			t.Errorf("%s: the sandbox of the grader is %s", state, got)
		}
		if got := w.stateOf(sb.ID); got != state {
			t.Errorf("%s became %s", state, got)
		}
	}
	r, err := w.Record(t.Context(), sb.ID)
	if err != nil || len(r.Grades) != 3 || r.Grades[0].Reward == nil {
		t.Fatalf("%+v %v", r.Grades, err)
	}
	last := r.Events[len(r.Events)-1]
	if last.Type != dsec.EventGraded || last.Detail != "completed" || last.Fields["reward"] != "0.5" || last.Fields["where"] != "fresh" {
		t.Errorf("event %+v", last)
	}
}

func TestNoRewardIsNotAReward(t *testing.T) {
	w := newWorld(t, nil)
	sb := w.create(nil)
	w.run(sb.ID, "mkdir /root/task; echo 1 > /root/task/reward")
	for script, want := range map[string]string{
		"true":                    "there is none",
		"echo nan > $DSEC_REWARD": "neither a JSON number",
		"touch $DSEC_REWARD":      "empty",
		"echo '{\"reward\": \"1\"}' > $DSEC_REWARD":        "not a number",
		"mkdir $DSEC_REWARD":                               "is a dir",
		"echo 1 > $DSEC_REWARD; exit 3":                    "ended with 3",
		"nosuchprogram":                                    "ended with 127",
		"echo 1 > $DSEC_REWARD; kill -9 $$":                "ended with 137",
		"head -c 70000 /dev/zero > $DSEC_REWARD":           "bytes, at most",
		"rm -r /run/dsec-grade && echo 1 > /tmp/elsewhere": "",
	} {
		res := w.grade(sb.ID, grader(script, nil), "")
		if res.Cause != dsec.CauseGraderError || res.Reward != nil || !strings.Contains(strings.Join(res.Evidence, "\n"), want) {
			t.Errorf("%s: %+v", script, res)
		}
	}
	res := w.grade(sb.ID, grader("sleep 60", func(s *dsec.GradeSpec) { s.Timeout = 50 * time.Millisecond }), "")
	if res.Cause != dsec.CauseGraderTimeout || res.Reward != nil {
		t.Errorf("%+v", res)
	}
	res = w.grade(sb.ID, grader("", func(s *dsec.GradeSpec) { s.Command = []string{"/nosuch"} }), "")
	if res.Cause != dsec.CauseGraderError || res.Reward != nil {
		t.Errorf("%+v", res)
	}
}

// TestADiskThatIsFullIsTheAgentsDoing: an error would be no result, and say nothing of
// who is to blame.
func TestADiskThatIsFullIsTheAgentsDoing(t *testing.T) {
	w := newWorld(t, nil)
	sb := w.create(func(s *dsec.Spec) { s.Limits.Disk = 1 << 20 })
	w.run(sb.ID, "mkdir /root/task; head -c 1048576 /dev/zero > /root/task/a")
	res := w.grade(sb.ID, grader("true", func(s *dsec.GradeSpec) { s.Files = map[string][]byte{"/grader": []byte("text")} }), "")
	if res.Cause != dsec.CauseAgentError || res.Reward != nil || res.Applied.Bytes != 1<<20 {
		t.Errorf("%+v", res)
	}
}

// TestDisksOfTheNodeThatAreFullAreNotTheAgentsDoing: the same grading, when nobody could write.
func TestDisksOfTheNodeThatAreFullAreNotTheAgentsDoing(t *testing.T) {
	w := newWorld(t, nil)
	sb := w.create(func(s *dsec.Spec) { s.Limits.Disk = 1 << 20 })
	w.run(sb.ID, "mkdir /root/task; head -c 1048576 /dev/zero > /root/task/a")
	s := grader("true", func(s *dsec.GradeSpec) { s.Files = map[string][]byte{"/grader": []byte("text")} })
	for what, fail := range map[string]func(error){"full": w.machine.FillDisks, "failed": w.machine.FailDisks} {
		disarm := failpoint.Arm("node.grade.fresh", func(context.Context, string) error {
			fail(errors.New("nothing is free for all sandboxes"))
			return nil
		})
		res, err := w.Grade(t.Context(), sb.ID, s, "")
		disarm()
		fail(nil)
		wantClass(t, err, dsec.Unavailable)
		if res.Cause != "" || !strings.Contains(err.Error(), "nothing is free") {
			t.Errorf("%s: %v, cause %q", what, err, res.Cause)
		}
	}
	if res := w.grade(sb.ID, s, ""); res.Cause != dsec.CauseAgentError {
		t.Errorf("with room again: %+v", res)
	}
}

func TestWhatIsRemovedIsRemovedForTheGrader(t *testing.T) {
	w := newWorld(t, nil)
	sb := w.create(nil)
	w.run(sb.ID, "rm /etc/group; mkdir /etc/x; echo 1 > /etc/x/f; echo 2 > /etc/x/keep")
	res := w.grade(sb.ID, grader("test -e /etc/group && exit 1; test -e /etc/x/f && exit 2; cat /etc/x/keep /etc/passwd && echo 1 > $DSEC_REWARD", func(s *dsec.GradeSpec) {
		s.Paths, s.Exclude = []string{"/etc"}, []string{"/etc/x/f"}
	}), "")
	if res.Cause != dsec.CauseCompleted || res.Applied.Removed != 1 {
		t.Errorf("%+v %s", res, res.Output)
	}
	_, err := w.Grade(t.Context(), sb.ID, grader("true", func(s *dsec.GradeSpec) { s.Paths = nil }), "")
	wantClass(t, err, dsec.Invalid) // no working directory to take instead
}

func TestTheFilesOfTheGraderWin(t *testing.T) {
	w := newWorld(t, nil)
	sb := w.create(nil)
	w.run(sb.ID, "mkdir /root/task; echo theirs > /root/task/test")
	res := w.grade(sb.ID, grader("cat /root/task/test; echo 1 > $DSEC_REWARD", func(s *dsec.GradeSpec) {
		s.Files = map[string][]byte{"/root/task/test": []byte("ours\n"), "/grader/x": []byte("y")}
	}), "")
	if res.Cause != dsec.CauseCompleted || string(res.Output) != "ours\n" {
		t.Errorf("%+v %s", res, res.Output)
	}
}

func TestOneCallIsOneGrading(t *testing.T) {
	w := newWorld(t, nil)
	sb := w.create(nil)
	w.run(sb.ID, "mkdir /root/task")
	s := grader("echo 1 > $DSEC_REWARD", nil)
	results := make([]dsec.GradeResult, 5)
	var wg sync.WaitGroup
	for i := range results {
		wg.Go(func() { results[i], _ = w.Grade(t.Context(), sb.ID, s, "k") })
	}
	wg.Wait()
	for _, r := range results {
		if r.Reward == nil || r.Sandbox != results[0].Sandbox {
			t.Errorf("%+v, first %+v", r, results[0])
		}
	}
	w.crash()
	if again := w.grade(sb.ID, s, "k"); again.Sandbox != results[0].Sandbox || again.Reward == nil {
		t.Errorf("after a restart: %+v", again)
	}
	_, err := w.Grade(t.Context(), sb.ID, grader("false", nil), "k")
	wantClass(t, err, dsec.Conflict)
	if _, err := w.Delete(t.Context(), sb.ID, ""); err != nil {
		t.Fatal(err)
	}
	if again := w.grade(sb.ID, s, "k"); again.Reward == nil {
		t.Errorf("after its end: %+v", again)
	}
	_, err = w.Grade(t.Context(), sb.ID, s, "other")
	wantClass(t, err, dsec.SandboxGone)
	w.empty()
}

func TestACallerThatLeavesWithoutAKeyEndsTheGrading(t *testing.T) {
	w := newWorld(t, nil)
	sb := w.create(nil)
	w.run(sb.ID, "mkdir /root/task")
	ctx, leave := context.WithCancel(t.Context())
	defer failpoint.Arm("node.grade.fresh", failpoint.Call(leave))()
	_, err := w.Grade(ctx, sb.ID, grader("sleep 1000", nil), "")
	wantClass(t, err, dsec.Canceled)
	if l, err := w.List(t.Context(), Filter{}); err != nil || len(l) != 1 {
		t.Errorf("%d sandboxes, want the graded one: %v", len(l), err)
	}
}

// TestWhatBreaksOffIsNotBlamedOnTheAgent: a tar that ends in the middle is none of its.
func TestWhatBreaksOffIsNotBlamedOnTheAgent(t *testing.T) {
	w := newWorld(t, nil)
	sb := w.create(nil)
	w.run(sb.ID, "mkdir /root/task; echo answer > /root/task/a")
	ctx, leave := context.WithCancel(t.Context())
	defer failpoint.Arm("node.grade.put", func(inside context.Context, _ string) error {
		leave()
		<-inside.Done()
		return nil
	})()
	res, err := w.Grade(ctx, sb.ID, grader("sleep 1000", nil), "")
	wantClass(t, err, dsec.Canceled)
	if res.Cause != "" {
		t.Errorf("the cause is %s: %v", res.Cause, res.Evidence)
	}
}

// TestAGradersSandboxDoesNotOutliveAnAgent that ended in the middle.
func TestAGradersSandboxDoesNotOutliveAnAgent(t *testing.T) {
	w := newWorld(t, nil)
	sb := w.create(nil)
	w.run(sb.ID, "mkdir /root/task")
	g, err := w.Create(t.Context(), "proj", spec(nil))
	if err != nil {
		t.Fatal(err)
	}
	if err := w.find(g.ID).move(func(r *record) { r.GraderOf = sb.ID }, nil); err != nil {
		t.Fatal(err)
	}
	w.crash()
	w.until("it is gone", func() bool { return w.stateOf(g.ID) == dsec.Deleted })
	if w.stateOf(sb.ID) != dsec.Running {
		t.Error("so is the other")
	}
}

func TestGradingThatCannotBeginIsAnError(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Budgets.MaxLive = 1 })
	sb := w.create(nil)
	w.run(sb.ID, "mkdir /root/task")
	_, err := w.Grade(t.Context(), sb.ID, grader("true", nil), "k")
	wantClass(t, err, dsec.ResourceExhausted)
	if _, err := w.Stop(t.Context(), sb.ID, "", ""); err != nil {
		t.Fatal(err)
	}
	disarm := failpoint.Arm("node.grade.fresh", failpoint.Once(errors.New("boom")))
	_, err = w.Grade(t.Context(), sb.ID, grader("true", nil), "k")
	disarm()
	wantClass(t, err, dsec.Internal)
	if res := w.grade(sb.ID, grader("true", nil), "k"); res.Cause != dsec.CauseGraderError { // an error is not remembered
		t.Errorf("%+v", res)
	}
	if l := w.Load(); l.Live != 0 {
		t.Errorf("left %+v", l)
	}
}

func TestSameGradingSaysWhatWasTampered(t *testing.T) {
	w := newWorld(t, nil)
	sb := w.create(nil)
	same := grader("cat /root/task/a; echo 1 > $DSEC_REWARD", func(s *dsec.GradeSpec) { s.Where, s.Paths = dsec.GradeSame, nil })
	w.run(sb.ID, "mkdir /root/task; echo x > /root/task/a")
	res := w.grade(sb.ID, same, "")
	if res.Cause != dsec.CauseCompleted || res.Where != dsec.GradeSame || res.Sandbox != sb.ID || res.Tampered {
		t.Fatalf("%+v", res)
	}
	same.Verify = []string{"/root/task"}
	if res := w.grade(sb.ID, same, ""); res.Cause != dsec.CauseGraderError || !res.Tampered || res.Reward != nil {
		t.Errorf("%+v", res)
	}
	same.Verify = nil
	w.run(sb.ID, "mkdir /usr; mkdir /usr/lib; echo x > /usr/lib/sitecustomize.py")
	if res := w.grade(sb.ID, same, ""); !res.Tampered || !strings.Contains(strings.Join(res.Evidence, " "), "sitecustomize") {
		t.Errorf("%+v", res)
	}
}
