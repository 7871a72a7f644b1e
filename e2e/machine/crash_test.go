package machine

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/process"
)

// counting prints numbers slowly enough to be killed over, and ends with 7.
const counting = "i=0; while [ $i -lt 300 ]; do echo $i; i=$((i+1)); sleep 0.01; done; exit 7"

func TestG1_KilledAgentFindsItsSandboxesAgain(t *testing.T) {
	t.Parallel()
	h := start(t)
	n := 8
	if long {
		n = 50
	}
	var ids []dsec.SandboxID
	var procs []*client.Process
	for range n {
		id := h.create(nil)
		p, err := h.Exec(t.Context(), id, process.Spec{Argv: []string{"/bin/sh", "-c", counting}})
		if err != nil {
			t.Fatal(err)
		}
		ids, procs = append(ids, id), append(procs, p)
	}
	h.Kill("node")
	eventually(t, "all sandboxes are running again", func() bool {
		states := h.states(t.Context())
		for _, id := range ids {
			if states[id] != dsec.Running {
				return false
			}
		}
		return true
	})
	for i, p := range procs {
		var out bytes.Buffer
		r, err := p.Follow(t.Context(), client.Offsets{}, func(c client.Chunk) error {
			if c.Stream == process.Stdout && c.Offset != int64(out.Len()) && len(c.Data) > 0 {
				return fmt.Errorf("output jumps from %d to %d", out.Len(), c.Offset)
			}
			out.Write(c.Data)
			return nil
		})
		if err != nil || r.ExitCode != 7 || r.Status != process.Exited {
			t.Fatalf("command %d over the kill: %+v, %v", i, r, err)
		}
		if got := strings.Count(out.String(), "\n"); got != 300 {
			t.Errorf("command %d: %d lines of 300", i, got)
		}
	}
	if out, r := h.sh(ids[0], "echo again"); out != "again\n" || r.ExitCode != 0 {
		t.Errorf("after the kill: %q, %+v", out, r)
	}
}

func TestKilledGatewayLosesNothing(t *testing.T) {
	t.Parallel()
	h := start(t)
	id := h.create(nil)
	h.Kill("gateway")
	eventually(t, "the sandbox is listed", func() bool {
		list, _, err := h.List(t.Context(), client.ListOptions{})
		return err == nil && len(list) == 1 && list[0].ID == id && list[0].State == dsec.Running
	})
	if out, _ := h.sh(id, "echo again"); out != "again\n" {
		t.Errorf("after the kill: %q", out)
	}
}

// A hold that dies takes its sandboxes along, and nobody says it was the agent's fault.
func TestKilledHoldEndsItsSandboxesAsNodeLost(t *testing.T) {
	t.Parallel()
	h := start(t)
	id := h.create(nil)
	p, err := h.Exec(t.Context(), id, process.Spec{Argv: []string{"/bin/sleep", "600"}})
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(h.holdPID(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the sandbox has failed", func() bool {
		sb, err := h.Get(t.Context(), id)
		return err == nil && sb.State == dsec.Failed
	})
	sb, err := h.Get(t.Context(), id)
	if err != nil || sb.Result == nil || sb.Result.Cause != dsec.CauseInfraNodeLost || !sb.Result.Mask() {
		t.Fatalf("%+v, %v", sb.Result, err)
	}
	if r, err := p.Wait(t.Context()); err == nil && r.Status == process.Exited {
		t.Errorf("a command of a lost sandbox ended %+v", r)
	}
	eventually(t, "a new sandbox works", func() bool {
		sb, err := h.Create(t.Context(), kind)
		return err == nil && sb.State == dsec.Running
	})
}

// holdPID finds the hold by its socket's path on its command line.
func (h *host) holdPID() int {
	h.t.Helper()
	dirs, err := os.ReadDir("/proc")
	if err != nil {
		h.t.Fatal(err)
	}
	for _, d := range dirs {
		line, err := os.ReadFile("/proc/" + d.Name() + "/cmdline")
		var pid int
		if err == nil && bytes.Contains(line, []byte(h.Dir+"/run/hold")) && bytes.Contains(line, []byte("hold")) {
			if _, err := fmt.Sscan(d.Name(), &pid); err == nil {
				return pid
			}
		}
	}
	h.t.Fatal("no hold runs")
	return 0
}

func TestG3_CreateAndKillLoopsMeetNothingBusy(t *testing.T) {
	h := start(t)
	loops := 60
	if long {
		loops = 500
	}
	next := make(chan int)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for i := range next {
				sb, err := h.Create(t.Context(), kind)
				if err != nil {
					t.Errorf("create %d: %v", i, err)
					continue
				}
				if existed, err := h.Delete(t.Context(), sb.ID); err != nil || !existed {
					t.Errorf("delete %d: %v, %v", i, existed, err)
				}
			}
		})
	}
	for i := range loops {
		next <- i
	}
	close(next)
	wg.Wait()
	if left := h.states(t.Context()); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

func TestG21_NothingOfADeadSandboxRunsOn(t *testing.T) {
	h := start(t)
	id := h.create(nil)
	if _, err := h.Exec(t.Context(), id, process.Spec{Argv: []string{"/bin/sh", "-c", "sleep 86399 & exec sleep 86398"}}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the commands run", func() bool { return sleepers(t) == 2 || !hosted() && len(h.processesOf(id)) > 0 })
	if existed, err := h.Delete(t.Context(), id); err != nil || !existed {
		t.Fatalf("%v, %v", existed, err)
	}
	if left := h.processesOf(id); len(left) > 0 || sleepers(t) > 0 {
		t.Errorf("processes %v, and %d commands, run on after the delete was confirmed", left, sleepers(t))
	}
}

// sleepers counts the commands of TestG21, wherever they are.
func sleepers(t *testing.T) (n int) {
	t.Helper()
	dirs, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range dirs {
		line, err := os.ReadFile("/proc/" + d.Name() + "/cmdline")
		if err == nil && (bytes.Contains(line, []byte("sleep\x0086399")) || bytes.Contains(line, []byte("sleep\x0086398"))) {
			n++
		}
	}
	return n
}

// processesOf are those in control groups of the sandbox: its commands, or what its own kernel runs in.
func (h *host) processesOf(id dsec.SandboxID) (pids []int) {
	h.t.Helper()
	dirs, err := os.ReadDir("/proc")
	if err != nil {
		h.t.Fatal(err)
	}
	for _, d := range dirs {
		groups, err := os.ReadFile("/proc/" + d.Name() + "/cgroup") // some end while they are looked at
		if pid, _ := strconv.Atoi(d.Name()); err == nil && pid > 0 && bytes.Contains(groups, []byte(id)) {
			pids = append(pids, pid)
		}
	}
	return pids
}

func TestKillUnderLoadLosesNoRunningSandbox(t *testing.T) {
	h := start(t)
	kept := h.create(nil)
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for ctx.Err() == nil {
				sb, err := h.Create(ctx, kind)
				if err == nil {
					_, _ = h.Delete(ctx, sb.ID) // errors are expected while the agent is away
				}
			}
		})
	}
	kills := 3
	if long {
		kills = 20
	}
	for range kills {
		time.Sleep(300 * time.Millisecond) // load between the kills, not a wait for something
		h.Kill("node")
	}
	stop()
	wg.Wait()
	if out, _ := h.sh(kept, "echo alive"); out != "alive\n" {
		t.Errorf("the kept sandbox says %q", out)
	}
	for id, state := range h.states(t.Context()) {
		if id == kept {
			continue
		}
		if _, err := h.Delete(t.Context(), id); err != nil {
			t.Errorf("delete %s (%s): %v", id, state, err)
		}
	}
}
