package lifecycle

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/failpoint"
)

type trace struct{ log []string }

func (tr *trace) step(name string, doErr, undoErr error) Step {
	return Step{Name: name,
		Do: func(context.Context) error { tr.log = append(tr.log, "+"+name); return doErr },
		Undo: func(ctx context.Context) error {
			tr.log = append(tr.log, "-"+name)
			return errors.Join(undoErr, ctx.Err())
		}}
}

func (tr *trace) want(t *testing.T, want string) {
	t.Helper()
	if got := strings.Join(tr.log, " "); got != want {
		t.Fatalf("order %q, want %q", got, want)
	}
}

func TestRunDoesAllInOrderAndTimesThem(t *testing.T) {
	var tr trace
	times, err := Run(t.Context(), "op", tr.step("a", nil, nil), tr.step("b", nil, nil))
	if err != nil || len(times) != 2 || times[0].Name != "a" || times[1].Name != "b" {
		t.Fatalf("%v %v", times, err)
	}
	tr.want(t, "+a +b")
}

func TestErrorUndoesInReverseAndKeepsItsClass(t *testing.T) {
	var tr trace
	full := dsec.E(dsec.NoSpace, "make b", "x", nil)
	stuck := errors.New("stuck")
	times, err := Run(t.Context(), "op", tr.step("a", nil, stuck), tr.step("b", nil, nil), tr.step("c", full, nil))
	tr.want(t, "+a +b +c -b -a")
	if dsec.ClassOf(err) != dsec.NoSpace || !errors.Is(err, stuck) || len(times) != 3 {
		t.Fatalf("%v %v", times, err)
	}
}

func TestCancellationUndoesWithALivingContext(t *testing.T) {
	var tr trace
	ctx, cancel := context.WithCancel(t.Context())
	b := tr.step("b", nil, nil)
	do := b.Do
	b.Do = func(ctx context.Context) error { cancel(); return do(ctx) }
	_, err := Run(ctx, "op", tr.step("a", nil, nil), b, tr.step("c", nil, nil))
	tr.want(t, "+a +b -b -a")
	if dsec.ClassOf(err) != dsec.Canceled || strings.Contains(err.Error(), "undo") {
		t.Fatalf("%v", err)
	}
}

func TestUndoHasALimit(t *testing.T) {
	var left time.Duration
	a := Step{Name: "a", Do: func(context.Context) error { return nil }, Undo: func(ctx context.Context) error {
		d, _ := ctx.Deadline()
		left = time.Until(d)
		return nil
	}}
	_, _ = Run(t.Context(), "op", a, Step{Name: "b", Do: func(context.Context) error { return errors.New("no") }})
	if left <= 0 || left > UndoLimit {
		t.Fatalf("undo had %v", left)
	}
}

func TestPanicUndoesToo(t *testing.T) {
	var tr trace
	func() {
		defer func() { _ = recover() }()
		_, _ = Run(t.Context(), "op", tr.step("a", nil, nil), Step{Name: "b", Do: func(context.Context) error { panic("b") }})
	}()
	tr.want(t, "+a -a")
}

func TestEveryStepHasTwoFailpoints(t *testing.T) {
	var tr trace
	stop := failpoint.Record()
	_, err := Run(t.Context(), "test.op", tr.step("a", nil, nil), tr.step("b", nil, nil))
	names := stop()
	if err != nil || !slices.Equal(names, []string{"test.op.a.before", "test.op.a.after", "test.op.b.before", "test.op.b.after"}) {
		t.Fatalf("%v %v", names, err)
	}
	for name, want := range map[string]string{
		"test.op.a.before": "", "test.op.a.after": "+a -a", "test.op.b.before": "+a -a", "test.op.b.after": "+a +b -b -a"} {
		tr = trace{}
		disarm := failpoint.Arm(name, failpoint.Once(nil))
		_, err := Run(t.Context(), "test.op", tr.step("a", nil, nil), tr.step("b", nil, nil))
		disarm()
		tr.want(t, want)
		if err == nil {
			t.Fatalf("%s did not fail", name)
		}
	}
}

func TestCloseUndoesInReverseOnce(t *testing.T) {
	var tr trace
	s, err := Open(t.Context(), "boot", tr.step("a", nil, nil), tr.step("b", nil, errors.New("busy")))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(t.Context()); err == nil {
		t.Fatal("the error of b is gone")
	}
	_ = s.Close(t.Context())
	tr.want(t, "+a +b -b -a")
}
