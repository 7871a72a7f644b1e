package gvisor

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/failpoint"
	"github.com/opendsec/dsec/internal/hold"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/runtimetest"
	"github.com/opendsec/dsec/runtime/runtimetest/layertest"
)

func withMain(argv ...string) func(*runtime.Request) {
	return func(r *runtime.Request) { r.Spec.Command = argv }
}

func (w *world) faults(short bool) runtimetest.Faults {
	return runtimetest.Faults{Runtime: func() runtime.Runtime { return w.r }, Prefix: "gvisor.", Last: "create.main",
		Request: func(t *testing.T) runtime.Request { return request(t, withMain("sleep", "300")) }, Empty: func(t *testing.T) { t.Helper(); w.wantNothing(t) },
		Try: func(i int, _ string) bool { return i%4 == 1 || !short || os.Getenv("DSEC_LONG") != "" }}
}

func TestG5FaultAtEveryStepLeavesNothing(t *testing.T) {
	w := newWorld(t)
	must(t, w.r.TrySentry(t.Context())) // else its steps are recorded, too
	w.faults(false).Create(t)
}

func TestG5FaultAtEveryStepOfAStartLeavesItStopped(t *testing.T) {
	w := newWorld(t)
	id := w.create(t)
	w.want(t, id, "echo kept > /f", "")
	must(t, w.r.Stop(t.Context(), id, 0))
	w.faults(false).Start(t, id, func(t *testing.T) {
		known, err := w.hold.List(t.Context())
		if err != nil || slices.ContainsFunc(known, func(s hold.SandboxInfo) bool { return !s.Ended }) {
			t.Errorf("the hold knows %v %v", known, err)
		}
	})
	w.want(t, id, "cat /f", "kept\n")
}

const killedEnv = "DSEC_GVISOR_KILLED"

// TestAgentKilledAtEveryStep: an agent makes a sandbox and is killed at each failpoint;
// the next one cleans up or goes on. Without DSEC_LONG at every fourth one.
func TestAgentKilledAtEveryStep(t *testing.T) {
	if f := strings.Split(os.Getenv(killedEnv), "\x1f"); len(f) == 6 {
		killedAgent(t, f)
		return
	}
	w := newWorld(t)
	must(t, w.r.TrySentry(t.Context()))
	agent := func(t *testing.T, at string, id dsec.SandboxID) *exec.Cmd {
		cmd := exec.Command(os.Args[0], "-test.run=TestAgentKilledAtEveryStep$")
		cmd.Env = append(os.Environ(), killedEnv+"="+strings.Join([]string{at, w.dir, w.name, string(id), fmt.Sprint(w.uidBase), layertest.Base(t).Meta}, "\x1f"))
		return cmd
	}
	w.faults(true).Kill(t, agent, func() { w.close(t) }, func() { w.open(t) })
}

func killedAgent(t *testing.T, f []string) {
	w := &world{dir: f[1], name: f[2]}
	if _, err := fmt.Sscan(f[4], &w.uidBase); err != nil {
		t.Fatal(err)
	}
	w.open(t)
	must(t, w.r.TrySentry(t.Context()))
	w.r.works = true
	layertest.Use(f[5])
	r := request(t, withMain("sleep", "100"), func(r *runtime.Request) { r.ID = dsec.SandboxID(f[3]) })
	failpoint.Arm(f[0], failpoint.Kill())
	_, err := w.r.Create(context.Background(), r)
	t.Fatal("it lives: ", err)
}
