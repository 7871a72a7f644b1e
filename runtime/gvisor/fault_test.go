package gvisor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/failpoint"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/runtimetest/layertest"
	"github.com/opendsec/dsec/runtime/tier"
)

func withMain(argv ...string) func(*runtime.Request) {
	return func(r *runtime.Request) { r.Spec.Command = argv }
}

// TestAFaultInEveryStepLeavesNothing breaks a creation, then a start, behind each step.
func TestAFaultInEveryStepLeavesNothing(t *testing.T) {
	w := newWorld(t)
	must(t, w.r.TrySentry(t.Context())) // else its steps are recorded, too
	stop := failpoint.Record()
	id := w.create(t, withMain("sleep", "300"))
	created := stop()
	if len(created) < 8 {
		t.Fatalf("failpoints %v", created)
	}
	must(t, w.r.Stop(t.Context(), id, 0))
	stop = failpoint.Record()
	_, err := w.r.Start(t.Context(), id)
	must(t, err)
	started := stop()
	must(t, w.r.Stop(t.Context(), id, 0))
	for _, n := range started {
		if !strings.HasPrefix(n, "gvisor.start.") {
			continue
		}
		disarm := failpoint.Arm(n, failpoint.Once(errors.New("broken on purpose")))
		_, err := w.r.Start(t.Context(), id)
		disarm()
		if err == nil || !strings.Contains(err.Error(), "on purpose") {
			t.Errorf("%s: %v", n, err)
		}
		if _, ok := w.r.boxes.Reserve(id).Status(); !ok || w.r.boxes.Reserve(id).GetPhase() != tier.Stopped {
			t.Errorf("%s: it is not stopped", n)
		}
	}
	_, err = w.r.Start(t.Context(), id)
	must(t, err)
	must(t, w.r.Destroy(t.Context(), id))
	for _, n := range created {
		if !strings.HasPrefix(n, "gvisor.create.") {
			continue
		}
		disarm := failpoint.Arm(n, failpoint.Once(errors.New("broken on purpose")))
		_, err := w.r.Create(t.Context(), request(t, withMain("sleep", "300")))
		disarm()
		if err == nil || !strings.Contains(err.Error(), "on purpose") {
			t.Errorf("%s: %v", n, err)
		}
		w.wantNothing(t)
	}
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
	stop := failpoint.Record()
	id := w.create(t, withMain("sleep", "100"))
	names := stop()
	must(t, w.r.Destroy(t.Context(), id))
	for i, n := range names {
		if !strings.HasPrefix(n, "gvisor.create.") || i%4 != 1 && os.Getenv("DSEC_LONG") == "" {
			continue
		}
		w.close(t)
		req := dsec.NewSandboxID("t")
		cmd := exec.Command(os.Args[0], "-test.run=TestAgentKilledAtEveryStep$")
		cmd.Env = append(os.Environ(), killedEnv+"="+strings.Join([]string{n, w.dir, w.name, string(req), fmt.Sprint(w.uidBase), layertest.Base(t).Meta}, "\x1f"))
		out, err := cmd.CombinedOutput()
		if ee, ok := errors.AsType[*exec.ExitError](err); !ok || ee.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
			t.Fatalf("%s: the agent ended with %v: %s", n, err, out)
		}
		w.open(t)
		list, err := w.r.List(t.Context())
		must(t, err)
		if len(list) > 0 && (!strings.HasPrefix(n, "gvisor.create.main") || !list[0].Running) {
			t.Errorf("%s: %+v", n, list)
		}
		must(t, w.r.Destroy(t.Context(), req))
		w.wantNothing(t)
	}
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
