package gvisor

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/hold"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
)

// Exits tells of ends that nobody asked for.
func (r *Runtime) Exits() <-chan runtime.Exit { return r.exits }

// sendExits hands what is in unsent to the receiver.
func (r *Runtime) sendExits() {
	for {
		r.mu.Lock()
		var next *runtime.Exit
		var to chan<- runtime.Exit // nil: nothing to send, and a nil channel is never ready
		if len(r.unsent) > 0 {
			next, to = r.unsent[0], r.exits
		} else {
			next = &runtime.Exit{}
		}
		r.mu.Unlock()
		select {
		case to <- *next:
			r.mu.Lock()
			r.unsent = slices.DeleteFunc(r.unsent, func(x *runtime.Exit) bool { return x == next })
			r.mu.Unlock()
		case <-r.wake: // it grew, or what is first was acknowledged
		case <-r.life.Done():
			return
		}
	}
}

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
	sb, err := r.find("follow sandbox", dsec.SandboxID(id))
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
	if err := r.hold.KillSandbox(ctx, name(sb.id)); err != nil {
		r.log.Warn("end a sandbox after its sentry", "sandbox", sb.id, "err", err)
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
	if err := sb.lock(ctx, "end sandbox"); err != nil {
		return // of this process; the next one does it
	}
	defer sb.unlock()
	if r.current(sb) && sb.getPhase() == ended {
		r.conclude(ctx, sb)
	}
}

func (r *Runtime) oomKills(sb *sandbox) int64 {
	sb.mu.Lock()
	g := sb.group
	sb.mu.Unlock()
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
	x.ID = sb.id
	sb.mu.Lock()
	if sb.phase == making {
		sb.early = &x
		sb.mu.Unlock()
		return true
	}
	if sb.phase != running || sb.stopping {
		sb.mu.Unlock()
		return false
	}
	sb.phase, sb.exit = ended, &x
	sb.mu.Unlock()
	r.report(x)
	return true
}

func (r *Runtime) report(x runtime.Exit) {
	r.mu.Lock()
	r.unsent = append(r.unsent, &x)
	r.mu.Unlock()
	r.kick()
}

// acknowledge drops the report of a sandbox that was not received yet.
func (r *Runtime) acknowledge(id dsec.SandboxID) {
	r.mu.Lock()
	r.unsent = slices.DeleteFunc(r.unsent, func(x *runtime.Exit) bool { return x.ID == id })
	r.mu.Unlock()
	r.kick()
}

func (r *Runtime) kick() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// holdLost ends every sandbox: the kernel has killed all their processes.
func (r *Runtime) holdLost() {
	if r.life.Err() != nil {
		return
	}
	all := r.all()
	r.log.Error("the hold is gone, and with it every running sandbox", "sandboxes", len(all), "at", time.Now().UTC())
	for _, sb := range all {
		r.end(sb, runtime.Exit{Cause: dsec.CauseInfraNodeLost, By: dsec.InducedByPlatform,
			Evidence: []string{"the process that held the sandbox (dsec-hold) ended"}})
	}
}
