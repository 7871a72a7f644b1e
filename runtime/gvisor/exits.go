package gvisor

import (
	"context"
	"fmt"
	"strings"
	"syscall"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/hold"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/tier"
)

// Exits tells of ends that nobody asked for.
func (r *Runtime) Exits() <-chan runtime.Exit { return r.ends.C() }

// watchHold acts on what the hold reports, until Close or the end of the hold.
func (r *Runtime) watchHold() {
	for {
		select {
		case e := <-r.events:
			// Beside the loop: what follows calls the hold, which may wait for us to receive.
			r.tasks.Go(func() { r.on(e) })
		case <-r.hold.Done():
			r.holdLost()
			return
		case <-r.life.Done():
			return
		}
	}
}

func (r *Runtime) on(e hold.Event) {
	ctx, cancel := context.WithTimeout(r.life, saveLimit)
	defer cancel()
	id, isShell := strings.CutPrefix(e.Sandbox, Prefix)
	sb, err := r.boxes.Find("follow sandbox", dsec.SandboxID(id))
	if err != nil || !isShell { // being removed, with all that is known of it; or of its files only
		return
	}
	switch {
	case e.Type == hold.SandboxExited && !e.Asked:
		r.end(sb, r.sentryEnd(sb, "the first process of its shell is gone"))
	case e.Type == hold.ExecExited && e.Exec == runID && e.Result.Status == process.Exited:
		r.end(sb, r.sentryEnd(sb, "the sentry is gone"))
		r.killAfter(ctx, sb)
	case e.Type == hold.ExecExited && !isOwn(e.Exec):
		r.execEnded(ctx, sb, e.Exec, e.Result)
	}
	if err := r.hold.Ack(ctx, e); err != nil && ctx.Err() == nil {
		r.log.Warn("acknowledge an end", "sandbox", e.Sandbox, "exec", e.Exec, "err", err)
	}
}

// killAfter ends what is left in the shell of a sentry that is gone: those that hold the
// ends of its commands.
func (r *Runtime) killAfter(ctx context.Context, sb *sandbox) {
	if err := r.hold.KillSandbox(ctx, name(sb.ID)); err != nil {
		r.log.Warn("end a sandbox after its sentry", "sandbox", sb.ID, "err", err)
	}
}

// execEnded ends the sandbox if the command was its main process.
func (r *Runtime) execEnded(ctx context.Context, sb *sandbox, exec string, res process.Result) {
	if res.OOM { // whichever process it was, the sentry's memory is short
		if r.end(sb, r.sentryEnd(sb, "command "+exec+" was ended by it")) {
			r.killAfter(ctx, sb)
		}
		return
	}
	rec := sb.record()
	if rec == nil || exec != mainID || len(rec.Request.Spec.Command) == 0 || res.Status == process.Lost {
		return
	}
	x := runtime.Exit{Cause: dsec.CauseCompleted, By: dsec.InducedBySelf, Evidence: []string{fmt.Sprintf("the main process exited with %d", res.ExitCode)}}
	switch {
	case r.oomKills(sb) > 0:
		x = r.sentryEnd(sb, "the main process ended with it")
	case res.Signal != 0:
		x = runtime.Exit{Cause: dsec.CauseAgentError, By: dsec.InducedBySelf, Evidence: []string{
			fmt.Sprintf("the main process was ended by signal %d (%s)", res.Signal, syscall.Signal(res.Signal))}}
	}
	if !r.end(sb, x) {
		return
	}
	if err := sb.Enter(ctx, "end sandbox"); err != nil {
		return // of this process; the next one does it
	}
	defer sb.Leave()
	if r.boxes.Current(sb) && sb.GetPhase() == tier.Ended {
		r.conclude(ctx, sb)
	}
}

func (r *Runtime) oomKills(sb *sandbox) int64 {
	sb.Mu.Lock()
	g := sb.group
	sb.Mu.Unlock()
	if g == nil {
		return 0
	}
	s, err := g.Stats()
	if err != nil {
		return 0
	}
	return s.OOMKills
}

// sentryEnd says why the sentry is gone. Inside, nothing can send it a signal; it ends by
// the memory limit, by an error of its own, or by somebody on the machine.
func (r *Runtime) sentryEnd(sb *sandbox, what string) runtime.Exit {
	if n := r.oomKills(sb); n > 0 {
		rec := sb.record()
		return runtime.Exit{Cause: dsec.CauseOOM, By: dsec.InducedBySelf, Evidence: []string{what,
			fmt.Sprintf("%d processes were killed by the memory limit: %d bytes and %d for the sentry", n, rec.Request.Spec.Limits.Memory, int64(sentryMemory))}}
	}
	return runtime.Exit{Cause: dsec.CauseUnknown, By: dsec.InducedByUnknown, Evidence: []string{what, "not by the memory limit; what it had written since its start is lost"}}
}

// end marks a running sandbox as ended and reports it, once. It returns false
// if the sandbox did not run, or is being ended anyway. The end of one that is
// still being made is kept until it is made.
func (r *Runtime) end(sb *sandbox, x runtime.Exit) bool {
	x.ID = sb.ID
	sb.Mu.Lock()
	if sb.Phase == tier.Making {
		sb.early = &x
		sb.Mu.Unlock()
		return true
	}
	if sb.Phase != tier.Running || sb.Stopping {
		sb.Mu.Unlock()
		return false
	}
	sb.Phase, sb.exit = tier.Ended, &x
	sb.Mu.Unlock()
	r.ends.Report(x)
	return true
}

// holdLost ends every sandbox: the kernel has killed all their processes.
func (r *Runtime) holdLost() {
	if r.life.Err() != nil {
		return
	}
	all := r.boxes.All()
	r.log.Error("the hold is gone, and with it every running sandbox", "sandboxes", len(all), "at", time.Now().UTC())
	for _, sb := range all {
		r.end(sb, runtime.Exit{Cause: dsec.CauseInfraNodeLost, By: dsec.InducedByPlatform,
			Evidence: []string{"the process that held the sandbox (dsec-hold) ended"}})
	}
}
