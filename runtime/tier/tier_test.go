package tier

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
)

type sandbox struct {
	Box
	made int
}

func newTable() *Table[*sandbox] {
	n := 0
	return NewTable(func(id dsec.SandboxID) *sandbox {
		n++
		sb := &sandbox{made: n}
		sb.Init(id)
		return sb
	})
}

func TestASandboxThatIsNotThere(t *testing.T) {
	table := newTable()
	for what, want := range map[string]struct {
		call  func() error
		class dsec.Class
	}{
		"find":        {func() error { _, err := table.Find("op", "a"); return err }, dsec.NotFound},
		"find inside": {func() error { _, err := table.FindInside("op", "a"); return err }, dsec.SandboxGone},
		"acquire":     {func() error { _, err := table.Acquire(t.Context(), "op", "a"); return err }, dsec.NotFound},
		"live":        {func() error { _, err := table.Live("op", "a"); return err }, dsec.SandboxGone},
	} {
		if err := want.call(); dsec.ClassOf(err) != want.class {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, ok := table.Get("a"); ok || len(table.All()) != 0 {
		t.Error("asking made one")
	}
}

// TestAcquireOfOneThatIsMadeAgain gets the new one: what it waited for is gone.
func TestAcquireOfOneThatIsMadeAgain(t *testing.T) {
	table := newTable()
	old := table.Reserve("a")
	if err := old.Enter(t.Context(), "op"); err != nil {
		t.Fatal(err)
	}
	got := make(chan *sandbox, 1)
	go func() {
		sb, err := table.Acquire(context.WithoutCancel(t.Context()), "op", "a")
		if err != nil {
			t.Error(err)
		}
		got <- sb
	}()
	short, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := table.Acquire(short, "op", "a"); dsec.ClassOf(err) != dsec.ClassOf(context.DeadlineExceeded) {
		t.Errorf("while another has the turn: %v", err)
	}
	table.Forget(old)
	fresh := table.Reserve("a")
	table.Forget(old) // is not the one that there is
	old.Leave()
	if sb := <-got; sb != fresh || !table.Current(fresh) || table.Current(old) {
		t.Errorf("acquired %+v", sb)
	}
	fresh.Leave()
}

func TestWhatALiveSandboxIsNot(t *testing.T) {
	table := newTable()
	sb := table.Reserve("a")
	for p, want := range map[Phase]dsec.Class{Absent: dsec.SandboxGone, Making: dsec.IllegalState, Ended: dsec.SandboxGone, Stopped: dsec.IllegalState, Removing: dsec.SandboxGone} {
		sb.SetPhase(p)
		if _, err := table.Live("op", "a"); dsec.ClassOf(err) != want {
			t.Errorf("phase %d: %v", p, err)
		}
	}
	sb.SetPhase(Running)
	if _, err := table.Live("op", "a"); err != nil {
		t.Error(err)
	}
}

// TestARemovalThatDoesNotGetItsTurn changes nothing in the end.
func TestARemovalThatDoesNotGetItsTurn(t *testing.T) {
	var sb sandbox
	sb.Init("a")
	for _, p := range []Phase{Absent, Making, Running, Ended, Stopped} {
		sb.SetPhase(p)
		undo := sb.AnnounceRemoval()
		if announced := sb.GetPhase() == Removing; announced != (p == Running || p == Ended) {
			t.Errorf("phase %d: announced: %v", p, announced)
		}
		if undo(); sb.GetPhase() != p {
			t.Errorf("phase %d became %d", p, sb.GetPhase())
		}
	}
}

// TestEndsWaitForTheirReceiver: in their order, without those that were acknowledged.
func TestEndsWaitForTheirReceiver(t *testing.T) {
	e := NewEnds()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { e.Send(ctx); close(done) }()
	for _, id := range []dsec.SandboxID{"a", "b", "c"} {
		e.Report(runtime.Exit{ID: id})
	}
	e.Acknowledge("b")
	for _, want := range []dsec.SandboxID{"a", "c"} {
		if x := <-e.C(); x.ID != want {
			t.Errorf("%s, not %s", x.ID, want)
		}
	}
	e.Report(runtime.Exit{ID: "d"})
	cancel()
	<-done
	select {
	case x := <-e.C():
		t.Errorf("%+v after the end", x)
	default:
	}
}

// gone is a command of which the supervisor knows nothing more.
type gone struct {
	process.Process
	err error
}

func (g gone) Kill(context.Context) error                 { return g.err }
func (g gone) Release(context.Context) error              { return g.err }
func (g gone) Write(context.Context, []byte) (int, error) { return 0, g.err }
func (g gone) Wait(context.Context) (process.Result, error) {
	return process.Result{Status: process.Killed}, g.err
}

func TestACommandWhoseSandboxIsGone(t *testing.T) {
	var sb sandbox
	sb.Init("a")
	unknown := dsec.Errorf(dsec.NotFound, "find command", "x", "no such command")
	c := sb.Command(gone{err: unknown})
	sb.SetPhase(Running)
	if _, err := c.Write(t.Context(), nil); !errors.Is(err, unknown) || dsec.ClassOf(err) != dsec.NotFound {
		t.Errorf("of a sandbox that runs: %v", err)
	}
	if err := c.Kill(t.Context()); dsec.ClassOf(err) != dsec.NotFound {
		t.Errorf("of a sandbox that runs: %v", err)
	}
	sb.SetPhase(Removing)
	if _, err := c.Write(t.Context(), nil); dsec.ClassOf(err) != dsec.SandboxGone {
		t.Error(err)
	}
	if err := errors.Join(c.Kill(t.Context()), c.Release(t.Context())); err != nil {
		t.Errorf("there is nothing left to do: %v", err)
	}
	c = sb.Command(gone{})
	if _, err := c.Wait(t.Context()); dsec.ClassOf(err) != dsec.SandboxGone {
		t.Errorf("killed with its sandbox: %v", err)
	}
}
