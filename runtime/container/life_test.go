package container

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/failpoint"
	"github.com/opendsec/dsec/internal/hold"
	"github.com/opendsec/dsec/internal/leak"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/runtimetest"
	"github.com/opendsec/dsec/runtime/runtimetest/layertest"
)

// exitOf waits for the unasked end of a sandbox.
func (w *world) exitOf(t *testing.T, id dsec.SandboxID) runtime.Exit {
	t.Helper()
	return runtimetest.ExitOf(t, w.r, id)
}

func withMain(argv ...string) func(*runtime.Request) {
	return func(r *runtime.Request) { r.Spec.Command = argv }
}

func TestMainProcessEndIsTheSandboxsEnd(t *testing.T) {
	w := newWorld(t)
	for _, c := range []struct {
		script string
		cause  dsec.Cause
		says   string
	}{
		{"exit 0", dsec.CauseCompleted, "exited with 0"},
		{"exit 3", dsec.CauseCompleted, "exited with 3"},
		{"kill -SEGV $$", dsec.CauseAgentError, "signal 11"},
		{"exec head -c 400m /dev/zero | exec tail", dsec.CauseOOM, "limit"},
	} {
		id := w.create(t, withMain("sh", "-c", c.script), func(r *runtime.Request) { r.Spec.Limits.Memory = 64 << 20 })
		x := w.exitOf(t, id)
		if x.Cause != c.cause || x.By != dsec.InducedBySelf || !strings.Contains(strings.Join(x.Evidence, ";"), c.says) {
			t.Errorf("%s: %+v", c.script, x)
		}
		if _, err := w.r.Exec(t.Context(), id, process.Spec{Argv: []string{"true"}}); !errors.Is(err, dsec.SandboxGone.Err()) {
			t.Errorf("%s: exec after the end: %v", c.script, err)
		}
		must(t, w.r.Stop(t.Context(), id, 0))
		must(t, w.r.Destroy(t.Context(), id))
	}
	w.wantNothing(t)
}

func TestI1OOMEndsTheCommandAndNotTheSandbox(t *testing.T) {
	w := newWorld(t)
	small := func(r *runtime.Request) { r.Spec.Limits.Memory = 64 << 20 }
	id := w.create(t, small)
	o := w.run(t, id, process.Spec{Argv: []string{"sh", "-c", "head -c 400m /dev/zero | tail > /dev/null; exit $?"}})
	if !o.OOM || o.ExitCode != 137 || o.OOMLimit != 64<<20 || o.OOMPeak < 32<<20 {
		t.Errorf("%+v", o.Result)
	}
	w.want(t, id, "echo alive", "alive\n")
	if o := w.sh(t, id, "kill -9 $$"); o.OOM || o.ExitCode != 137 {
		t.Errorf("a plain SIGKILL: %+v", o.Result)
	}
	id = w.create(t, small, func(r *runtime.Request) { r.Spec.OOM = dsec.OOMSandbox })
	p, err := w.r.Exec(t.Context(), id, process.Spec{Argv: []string{"sh", "-c", "head -c 400m /dev/zero | tail > /dev/null; exit $?"}})
	must(t, err)
	if x := w.exitOf(t, id); x.Cause != dsec.CauseOOM || x.By != dsec.InducedBySelf || len(x.Evidence) == 0 {
		t.Errorf("%+v", x)
	}
	if res, err := p.Wait(t.Context()); err != nil || !res.OOM {
		t.Errorf("%+v %v", res, err)
	}
}

// pid1 is the host pid of a sandbox's PID 1.
func (w *world) pid1(t *testing.T, id dsec.SandboxID) int {
	t.Helper()
	known, err := w.hold.List(t.Context())
	must(t, err)
	for _, s := range known {
		if s.ID == string(id) {
			return s.PID
		}
	}
	t.Fatalf("the hold does not know %s", id)
	return 0
}

func TestLossOfInitIsReportedAndAcknowledged(t *testing.T) {
	w := newWorld(t)
	id := w.create(t)
	must(t, syscall.Kill(w.pid1(t, id), syscall.SIGKILL))
	x := w.exitOf(t, id)
	if x.Cause != dsec.CauseUnknown || !strings.Contains(strings.Join(x.Evidence, ";"), "PID 1") {
		t.Errorf("%+v", x)
	}
	if _, err := w.r.Exec(t.Context(), id, process.Spec{Argv: []string{"true"}}); !errors.Is(err, dsec.SandboxGone.Err()) {
		t.Errorf("exec: %v", err)
	}
	// Nobody acknowledged it: the next process reports it again.
	must(t, w.r.Close())
	w.openRuntime(t)
	if y := w.exitOf(t, id); y.Cause != x.Cause {
		t.Errorf("again: %+v", y)
	}
	must(t, w.r.Stop(t.Context(), id, 0))
	must(t, w.r.Close())
	w.openRuntime(t)
	select {
	case x := <-w.r.Exits():
		t.Errorf("reported after the acknowledgement: %+v", x)
	case <-time.After(50 * time.Millisecond):
	}
	steps, err := w.r.Start(t.Context(), id)
	must(t, err)
	if len(steps) == 0 {
		t.Error("a start without steps")
	}
	w.want(t, id, "echo alive", "alive\n")
}

func TestStopKeepsTheDiskAndStartGoesOn(t *testing.T) {
	everyPlan(t, func(t *testing.T, w *world) {
		id := w.create(t, withMain("sh", "-c", "trap 'echo asked > /asked; exit 0' TERM; while :; do sleep 1 & wait; done"))
		w.want(t, id, "echo kept > /f; rm /bin/tac 2>/dev/null; mv /home /house; id -u", "0\n")
		uid := w.r.boxes.Reserve(id).record().UID
		must(t, w.r.Stop(t.Context(), id, 5*time.Second))
		must(t, w.r.Stop(t.Context(), id, 0))
		if _, err := w.r.Exec(t.Context(), id, process.Spec{Argv: []string{"true"}}); !errors.Is(err, dsec.IllegalState.Err()) {
			t.Errorf("exec while stopped: %v", err)
		}
		if s, err := w.r.Stats(t.Context(), id); err != nil || s.MemoryPeak == 0 || s.Disk == 0 {
			t.Errorf("stats of a stopped one: %+v %v", s, err)
		}
		for range 2 {
			_, err := w.r.Start(t.Context(), id)
			must(t, err)
		}
		w.want(t, id, "cat /f /asked; ls -d /house/user; echo 2 >> /f", "kept\nasked\n/house/user\n")
		if now := w.r.boxes.Reserve(id).record(); now.UID != uid || now.Starts != 2 {
			t.Errorf("uid %d was %d, starts %d", now.UID, uid, now.Starts)
		}
		must(t, w.r.Stop(t.Context(), id, 0))
		_, err := w.r.Start(t.Context(), id)
		must(t, err)
		w.want(t, id, "cat /f", "kept\n2\n")
	})
}

func TestANewProcessFindsEverything(t *testing.T) {
	everyPlan(t, func(t *testing.T, w *world) {
		idle, paused, halted := w.create(t), w.create(t), w.create(t)
		main := w.create(t, withMain("sleep", "1000"))
		w.want(t, idle, "echo here > /f", "")
		p, err := w.r.Exec(t.Context(), idle, process.Spec{ID: "loop", Argv: []string{"sh", "-c", "i=0; while test $i -lt 30; do echo $i; i=$((i+1)); sleep 0.01; done; exit 7"}})
		must(t, err)
		must(t, w.r.Pause(t.Context(), paused))
		must(t, w.r.Stop(t.Context(), halted, 0))
		w.close(t)
		w.open(t)
		list, err := w.r.List(t.Context())
		must(t, err)
		got := map[dsec.SandboxID]runtime.Status{}
		for _, s := range list {
			got[s.ID] = s
		}
		if len(got) != 4 || !got[idle].Running || got[idle].Paused || !got[paused].Paused || got[halted].Running || !got[main].Running {
			t.Errorf("found %+v", list)
		}
		if !slices.Contains(got[idle].Execs, "loop") || !slices.Contains(got[main].Execs, mainID) {
			t.Errorf("commands %v and %v", got[idle].Execs, got[main].Execs)
		}
		p, err = w.r.Process(t.Context(), idle, "loop")
		must(t, err)
		if res, err := p.Wait(t.Context()); err != nil || res.ExitCode != 7 || res.Stdout.Total != 80 {
			t.Errorf("%+v %v", res, err)
		}
		w.want(t, idle, "cat /f; echo $HOME", "here\n/root\n")
		must(t, w.r.Resume(t.Context(), paused))
		w.want(t, paused, "echo on", "on\n")
		_, err = w.r.Start(t.Context(), halted)
		must(t, err)
		w.want(t, halted, "echo on", "on\n")
		// A new sandbox shares nothing with the old ones.
		w.want(t, w.create(t), "test -e /f || echo clean", "clean\n")
		must(t, w.r.Destroy(t.Context(), main))
	})
}

func TestHoldsEndIsNodeLost(t *testing.T) {
	w := newWorld(t)
	id, halted := w.create(t), w.create(t)
	must(t, w.r.Stop(t.Context(), halted, 0))
	must(t, syscall.Kill(w.hold.Info().PID, syscall.SIGKILL))
	if x := w.exitOf(t, id); x.Cause != dsec.CauseInfraNodeLost || x.By != dsec.InducedByPlatform {
		t.Errorf("%+v", x)
	}
	must(t, w.r.Close())
	must(t, w.mounts.Close())
	must(t, w.disks.Close())
	must(t, w.groups.Close())
	_ = w.hold.Close() // the other end is gone
	w.open(t)
	if x := w.exitOf(t, id); x.Cause != dsec.CauseInfraNodeLost {
		t.Errorf("after the restart: %+v", x)
	}
	must(t, w.r.Destroy(t.Context(), id))
	_, err := w.r.Start(t.Context(), halted)
	must(t, err)
	w.want(t, halted, "echo alive", "alive\n")
}

func (w *world) faults() runtimetest.Faults {
	return runtimetest.Faults{Runtime: func() runtime.Runtime { return w.r }, Prefix: "container.", Last: "create.main.after", Steps: 20, Prime: func(t *testing.T) { w.prime(t) },
		Request: func(t *testing.T) runtime.Request { return request(t, withMain("sleep", "100"), w.net) }, Empty: func(t *testing.T) { t.Helper(); w.wantNothing(t) }}
}

func TestG5FaultAtEveryStepLeavesNothing(t *testing.T) {
	everyPlan(t, func(t *testing.T, w *world) {
		var before leak.Snapshot
		must(t, w.r.Destroy(t.Context(), w.create(t)))
		w.rest(t, func() { before = leak.Take(w.name) })
		w.faults().Create(t)
		w.wantNothingSince(t, before)
	})
}

func (w *world) wantNothingSince(t *testing.T, before leak.Snapshot) {
	t.Helper()
	w.rest(t, func() { runtimetest.WantNothingSince(t, w.name, before) })
}

func (w *world) destroyAll(t *testing.T) {
	t.Helper()
	list, err := w.r.List(t.Context())
	must(t, err)
	for _, s := range list {
		must(t, w.r.Destroy(t.Context(), s.ID))
	}
}

func TestG5FaultAtEveryStepOfAStartLeavesItStopped(t *testing.T) {
	w := newWorld(t)
	id := w.create(t)
	w.want(t, id, "echo kept > /f", "")
	must(t, w.r.Stop(t.Context(), id, 0))
	w.faults().Start(t, id, func(t *testing.T) {
		if groups, err := w.groups.List(); err != nil || len(groups) > 0 {
			t.Errorf("control groups %v %v", groups, err)
		}
		known, err := w.hold.List(t.Context())
		if err != nil || slices.ContainsFunc(known, func(s hold.SandboxInfo) bool { return !s.Ended }) {
			t.Errorf("the hold knows %v %v", known, err)
		}
	})
	w.want(t, id, "cat /f", "kept\n")
}

// killedEnv makes this test binary an agent that dies on its way.
const killedEnv = "DSEC_CONTAINER_TEST_KILLED"

// TestG6AgentKilledAtEveryStep: another process creates, starts or destroys a
// sandbox and is killed at each failpoint; the next one cleans up or goes on.
func TestG6AgentKilledAtEveryStep(t *testing.T) {
	if os.Getenv(killedEnv) != "" {
		killedAgent(t)
		return
	}
	t.Run("no shells", func(t *testing.T) { killAtEveryStep(t, newWorld(t)) })
	t.Run("shells", func(t *testing.T) { killAtEveryStep(t, newWorld(t, readyShells)) })
	t.Run("linked shells", func(t *testing.T) { killAtEveryStep(t, newWorld(t, linkedShells)) })
}

func killAtEveryStep(t *testing.T, w *world) {
	agent := func(t *testing.T, at string, id dsec.SandboxID) *exec.Cmd {
		cmd := exec.Command(os.Args[0], "-test.run=TestG6AgentKilledAtEveryStep$")
		cmd.Env = append(os.Environ(), killedEnv+"="+strings.Join([]string{at, w.dir, w.name, string(id), fmt.Sprint(w.uidBase), layertest.Base(t).Meta, fmt.Sprint(w.shells), fmt.Sprint(w.linked)}, "\x1f"))
		return cmd
	}
	w.faults().Kill(t, agent, func() { w.close(t) }, func() { w.open(t) })
}

// net has a sandbox with a network, in a world that has one.
func (w *world) net(r *runtime.Request) {
	if w.linked {
		openNet(r)
	}
}

// prime has shells ready that request needs: all there can be, if there were none.
func (w *world) prime(t testing.TB) {
	t.Helper()
	p := w.r.shells
	p.mu.Lock()
	p.askLocked(w.r.shapeOf(request(t, w.net).Spec))
	p.mu.Unlock()
	if w.shells > 0 && p.low() { // what is not low is not filled up
		p.wake <- struct{}{}
		w.ready(t)
	}
}

func killedAgent(t *testing.T) {
	f := strings.Split(os.Getenv(killedEnv), "\x1f")
	w := &world{dir: f[1], name: f[2]}
	_, err := fmt.Sscan(f[4], &w.uidBase)
	must(t, err)
	_, err = fmt.Sscan(f[6]+" "+f[7], &w.shells, &w.linked)
	must(t, err)
	layertest.Use(f[5])
	w.open(t)
	w.prime(t)
	failpoint.Arm(f[0], failpoint.Kill())
	req := request(t, withMain("sleep", "100"), w.net)
	req.ID = dsec.SandboxID(f[3])
	_, err = w.r.Create(t.Context(), req)
	t.Errorf("survived: %v", err)
}

func TestG8LoopsLeaveNothing(t *testing.T) {
	n := 100
	if os.Getenv("DSEC_LONG") != "" {
		n = 2000
	}
	w := newWorld(t)
	w.destroyAll(t)
	round := func() {
		id := w.create(t)
		w.run(t, id, process.Spec{Argv: []string{"true"}})
		must(t, w.r.Destroy(t.Context(), id))
	}
	round()
	before, fds := leak.Take(w.name), countFDs(t, os.Getpid())
	holdFDs := countFDs(t, w.hold.Info().PID)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range n / 4 {
				round()
			}
		})
	}
	wg.Wait()
	w.wantNothing(t)
	w.wantNothingSince(t, before)
	eventually(t, "descriptors are back to where they were", func() bool {
		return countFDs(t, os.Getpid()) <= fds+4 && countFDs(t, w.hold.Info().PID) <= holdFDs
	})
}

func countFDs(t *testing.T, pid int) int {
	t.Helper()
	e, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	must(t, err)
	return len(e)
}

func TestA15DestroyEndsWhatIsInFlight(t *testing.T) {
	w := newWorld(t)
	id := w.create(t)
	p, err := w.r.Exec(t.Context(), id, process.Spec{Argv: []string{"sleep", "1000"}})
	must(t, err)
	type end struct {
		res process.Result
		err error
	}
	ended := make(chan end, 1)
	go func() {
		res, err := p.Wait(context.Background())
		ended <- end{res, err}
	}()
	must(t, w.r.Destroy(t.Context(), id))
	select {
	case e := <-ended:
		if !errors.Is(e.err, dsec.SandboxGone.Err()) && e.res.Status != process.Killed {
			t.Errorf("%+v %v", e.res, e.err)
		}
	case <-time.After(2 * time.Second):
		t.Error("the wait hangs")
	}
	if err := p.Kill(t.Context()); err != nil && !errors.Is(err, dsec.SandboxGone.Err()) {
		t.Errorf("second kill: %v", err)
	}
}

func TestPauseStopsClocksAndResumeContinues(t *testing.T) {
	w := newWorld(t)
	id := w.create(t)
	p, err := w.r.Exec(t.Context(), id, process.Spec{Argv: []string{"sh", "-c", "sleep 0.2; echo done"}, Timeout: time.Second})
	must(t, err)
	must(t, w.r.Pause(t.Context(), id))
	must(t, w.r.Pause(t.Context(), id))
	if _, err := w.r.Exec(t.Context(), id, process.Spec{Argv: []string{"true"}}); !errors.Is(err, dsec.IllegalState.Err()) {
		t.Errorf("exec while paused: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 1200*time.Millisecond)
	if res, err := p.Wait(ctx); err == nil {
		t.Errorf("ended while paused: %+v", res)
	}
	cancel()
	must(t, w.r.Resume(t.Context(), id))
	must(t, w.r.Resume(t.Context(), id))
	res, err := p.Wait(t.Context())
	must(t, err)
	if res.Status != process.Exited || res.Held < time.Second {
		t.Errorf("%+v", res)
	}
	must(t, w.r.Pause(t.Context(), id))
	must(t, w.r.Destroy(t.Context(), id)) // a frozen one can be destroyed
}

func TestDialReachesLoopbackOfTheSandboxOnly(t *testing.T) {
	w := newWorld(t)
	id, other := w.create(t), w.create(t)
	p, err := w.r.Exec(t.Context(), id, process.Spec{Argv: []string{"nc", "-ll", "-p", "7000", "-e", "cat"}})
	must(t, err)
	var c net.Conn
	eventually(t, "nc listens", func() bool {
		c, err = w.r.Dial(t.Context(), id, 7000)
		return err == nil
	})
	defer c.Close()
	_, err = c.Write([]byte("ping"))
	must(t, err)
	got := make([]byte, 4)
	if _, err := io.ReadFull(c, got); err != nil || string(got) != "ping" {
		t.Errorf("%q %v", got, err)
	}
	for _, x := range []struct {
		id   dsec.SandboxID
		port uint16
	}{{other, 7000}, {id, 7001}} {
		if _, err := w.r.Dial(t.Context(), x.id, x.port); !errors.Is(err, dsec.Unavailable.Err()) {
			t.Errorf("port %d of %s: %v", x.port, x.id, err)
		}
	}
	must(t, p.Kill(t.Context()))
}

func TestProbeSaysWhatWorks(t *testing.T) {
	w := newWorld(t)
	rep := w.r.Probe(t.Context())
	if !rep.OK || rep.Tier != dsec.TierContainer {
		t.Errorf("%+v", rep)
	}
	for _, c := range rep.Checks {
		t.Logf("%-18s %v %s", c.Name, c.OK, c.Detail)
		if c.Detail == "" {
			t.Errorf("%s has no detail", c.Name)
		}
	}
}

func TestDestroyThatIsCancelledWhileItWaitsChangesNothing(t *testing.T) {
	w := newWorld(t)
	id := w.create(t)
	sb := w.r.boxes.Reserve(id)
	must(t, sb.Enter(t.Context(), "hold up"))
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := w.r.Destroy(ctx, id); !errors.Is(err, dsec.Timeout.Err()) {
		t.Errorf("%v", err)
	}
	sb.Leave()
	w.want(t, id, "echo alive", "alive\n")
}

func TestSandboxThatCannotBeTakenOverIsReportedAndDestroyable(t *testing.T) {
	w := newWorld(t)
	good, bad := w.create(t), w.create(t)
	rec := *w.r.boxes.Reserve(bad).record()
	rec.UID = w.r.boxes.Reserve(good).record().UID
	must(t, writeRecord(w.r.dir(bad), &rec))
	must(t, w.r.Close())
	w.openRuntime(t)
	x := <-w.r.Exits()
	if x.Cause != dsec.CauseInfraNodeLost || x.By != dsec.InducedByPlatform || !strings.Contains(x.Evidence[0], "uid range") {
		t.Errorf("%+v", x)
	}
	must(t, w.r.Destroy(t.Context(), good))
	must(t, w.r.Destroy(t.Context(), bad))
	w.wantNothing(t)
}

func TestStopKilledHalfWayIsFinished(t *testing.T) {
	w := newWorld(t)
	id := w.create(t)
	w.want(t, id, "echo kept > /f", "")
	must(t, w.r.Close())
	must(t, w.hold.KillSandbox(t.Context(), string(id)))
	must(t, w.groups.Remove(t.Context(), string(id)))
	w.openRuntime(t)
	if list, err := w.r.List(t.Context()); err != nil || len(list) != 1 || list[0].Running {
		t.Errorf("%+v %v", list, err)
	}
	_, err := w.r.Start(t.Context(), id)
	must(t, err)
	w.want(t, id, "cat /f", "kept\n")
}

func TestBrokenStateFileCostsOneSandboxAndNotTheNode(t *testing.T) {
	w := newWorld(t)
	good, bad := w.create(t), w.create(t)
	must(t, os.Truncate(filepath.Join(w.r.dir(bad), stateFile), 10))
	must(t, w.r.Close())
	w.openRuntime(t)
	if list, err := w.r.List(t.Context()); err != nil || len(list) != 1 || list[0].ID != good {
		t.Errorf("%+v %v", list, err)
	}
	must(t, w.r.Destroy(t.Context(), good))
	w.wantNothing(t)
}

func TestG13SameIDCreatedConcurrently(t *testing.T) {
	w := newWorld(t)
	req := request(t)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if _, err := w.r.Create(t.Context(), req); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if list, err := w.r.List(t.Context()); err != nil || len(list) != 1 {
		t.Errorf("%v %v", list, err)
	}
	for range 4 {
		wg.Go(func() {
			if err := w.r.Destroy(t.Context(), req.ID); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	w.wantNothing(t)
}
