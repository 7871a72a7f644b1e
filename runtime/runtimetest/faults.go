package runtimetest

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/failpoint"
	"github.com/opendsec/dsec/internal/leak"
	"github.com/opendsec/dsec/runtime"
)

// Faults is what breaking a tier at every step of its creations and starts needs of it.
type Faults struct {
	Runtime func() runtime.Runtime // the one that is open
	Prefix  string                 // of the tier's failpoints, like "microvm."
	Request func(t *testing.T) runtime.Request
	Prime   func(t *testing.T) // comes before each creation; nil: nothing
	Empty   func(t *testing.T) // checks that nothing of any sandbox is there
	Steps   int                // a creation has at least so many failpoints, and each call at least eight
	// Last is how the failpoints of a creation begin behind which nothing is left to give
	// up: cancelled there, or with its agent killed, the sandbox stands.
	Last string
	// Try says which failpoints are tried, the i-th of them called n. nil: all.
	Try func(i int, n string) bool
}

// Behind tries what comes after each step, and not what comes before it; with DSEC_LONG all.
func Behind(_ int, n string) bool {
	return strings.HasSuffix(n, ".after") || os.Getenv("DSEC_LONG") != ""
}

var errOnPurpose = errors.New("broken on purpose")

// steps are the failpoints of a call.
func (f Faults) steps(t *testing.T, of string, call func()) (names []string) {
	t.Helper()
	stop := failpoint.Record()
	call()
	all := slices.DeleteFunc(stop(), func(n string) bool { return !strings.HasPrefix(n, f.Prefix+of+".") })
	for i, n := range all {
		if f.Try == nil || f.Try(i, n) {
			names = append(names, n)
		}
	}
	least := 8
	if of == "create" {
		least = max(f.Steps, 8)
	}
	if len(all) < least || len(names) == 0 || f.Last == "" {
		t.Fatalf("failpoints of %s: %v, want at least %d; behind %q nothing is left to give up", of, all, least, f.Last)
	}
	return names
}

func (f Faults) create(t *testing.T, ctx context.Context) error {
	if f.Prime != nil {
		f.Prime(t)
	}
	_, err := f.Runtime().Create(ctx, f.Request(t))
	return err
}

// ofCreation are the failpoints of a creation, of a sandbox that is gone again.
func (f Faults) ofCreation(t *testing.T) []string {
	t.Helper()
	names := f.steps(t, "create", func() {
		if err := f.create(t, t.Context()); err != nil {
			t.Fatal(err)
		}
	})
	f.destroyAll(t)
	return names
}

func (f Faults) destroyAll(t *testing.T) {
	t.Helper()
	list, err := f.Runtime().List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range list {
		if err := f.Runtime().Destroy(t.Context(), s.ID); err != nil {
			t.Fatal(err)
		}
	}
}

// Create breaks creations at each step, and cancels them there: the error says why and undoing is
// not one, and nothing is left.
func (f Faults) Create(t *testing.T) {
	for _, n := range f.ofCreation(t) {
		disarm := failpoint.Arm(n, failpoint.Once(errOnPurpose))
		err := f.create(t, t.Context())
		disarm()
		if err == nil || !strings.Contains(err.Error(), errOnPurpose.Error()) || strings.Contains(err.Error(), "undo") {
			t.Errorf("%s: %v", n, err)
		}
		f.Empty(t)
		ctx, cancel := context.WithCancel(t.Context())
		disarm = failpoint.Arm(n, failpoint.Call(cancel))
		err = f.create(t, ctx)
		disarm()
		cancel()
		if dsec.ClassOf(err) != dsec.Canceled && !(err == nil && f.last(n)) {
			t.Errorf("%s cancelled: %v", n, err)
		}
		if err == nil {
			f.destroyAll(t)
		}
		f.Empty(t)
	}
}

func (f Faults) last(n string) bool { return strings.HasPrefix(n, f.Prefix+f.Last) }

// Start breaks starts of a stopped sandbox at each step: it stays stopped, of which idle makes
// sure. At the end it runs.
func (f Faults) Start(t *testing.T, id dsec.SandboxID, idle func(t *testing.T)) {
	r, ctx := f.Runtime(), t.Context()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	names := f.steps(t, "start", func() {
		_, err := r.Start(ctx, id)
		must(err)
	})
	must(r.Stop(ctx, id, 0))
	for _, n := range names {
		disarm := failpoint.Arm(n, failpoint.Once(errOnPurpose))
		_, err := r.Start(ctx, id)
		disarm()
		if err == nil || !strings.Contains(err.Error(), errOnPurpose.Error()) || strings.Contains(err.Error(), "undo") {
			t.Errorf("%s: %v", n, err)
		}
		list, err := r.List(ctx)
		if err != nil || len(list) != 1 || list[0].ID != id || list[0].Running {
			t.Errorf("%s: %+v %v", n, list, err)
		}
		idle(t)
	}
	_, err := r.Start(ctx, id)
	must(err)
}

// Kill has another process make a sandbox, as agent says, that is killed at each failpoint; the
// runtime of this one is closed meanwhile. The one that is opened then cleans up, or goes on with what was whole.
func (f Faults) Kill(t *testing.T, agent func(t *testing.T, at string, id dsec.SandboxID) *exec.Cmd, closeIt, open func()) {
	for _, n := range f.ofCreation(t) {
		closeIt()
		id := dsec.NewSandboxID("t")
		cmd := agent(t, n, id)
		out, err := cmd.CombinedOutput()
		open()
		if ee, ok := errors.AsType[*exec.ExitError](err); !ok || ee.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
			t.Fatalf("%s: the agent ended with %v: %s", n, err, out)
		}
		list, err := f.Runtime().List(t.Context())
		if err != nil || len(list) > 0 && !(f.last(n) && list[0].Running) {
			t.Errorf("%s: %+v %v", n, list, err)
		}
		if err := f.Runtime().Destroy(t.Context(), id); err != nil {
			t.Fatal(err)
		}
		f.Empty(t)
	}
}

// WantNothingSince waits until the machine is as it was: network namespaces end a little after
// the last process in them. Groups that say "these CPUs" or "these devices" are made once and stay.
func WantNothingSince(t testing.TB, name string, before leak.Snapshot) {
	t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		left := slices.DeleteFunc(leak.Take(name).Since(before), func(line string) bool {
			return strings.Contains(line, "/cpus-") || strings.Contains(line, "/dev-")
		})
		if len(left) == 0 {
			return
		}
		if time.Now().After(end) {
			t.Fatal("left:", left)
		}
	}
}
