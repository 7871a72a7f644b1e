package container

import (
	"context"
	"fmt"
	"syscall"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/hold"
	"github.com/opendsec/dsec/internal/lifecycle"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/tier"
)

// Exits tells of ends that nobody asked for.
func (r *Runtime) Exits() <-chan runtime.Exit { return r.ends.C() }

// watchHold acts on what the hold reports, until Close or the end of the hold.
func (r *Runtime) watchHold() {
	events := r.hold.Events()
	for {
		select {
		case e, ok := <-events:
			if !ok {
				r.holdLost()
				return
			}
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
	if e.Type == hold.Refused {
		r.gatherRefusals()
		return
	}
	ctx, cancel := context.WithTimeout(r.life, lifecycle.UndoLimit)
	defer cancel()
	sb, err := r.boxes.Find("follow sandbox", dsec.SandboxID(e.Sandbox))
	if err != nil { // being removed, with all that is known of it; or a shell
		r.shells.lost(ctx, e.Sandbox)
		return
	}
	switch {
	case e.Type == hold.SandboxExited && !e.Asked:
		r.end(sb, r.initEnd(sb, e.Signal))
	case e.Type == hold.ExecExited:
		r.execEnded(ctx, sb, e.Exec, e.Result)
	}
	if err := r.hold.Ack(ctx, e); err != nil && ctx.Err() == nil {
		r.log.Warn("acknowledge an end", "sandbox", e.Sandbox, "exec", e.Exec, "err", err)
	}
}

// execEnded ends the sandbox if the command was its main process, or if a
// memory kill ends it by its own wish.
func (r *Runtime) execEnded(ctx context.Context, sb *sandbox, exec string, res process.Result) {
	if res.Status == process.Lost {
		return
	}
	var x runtime.Exit
	spec := sb.record()
	if spec == nil {
		return
	}
	switch isMain := exec == mainID && len(spec.Request.Spec.Command) > 0; {
	case res.OOM && (isMain || spec.Request.Spec.OOM == dsec.OOMSandbox):
		x = runtime.Exit{Cause: dsec.CauseOOM, By: dsec.InducedBySelf, Evidence: []string{
			fmt.Sprintf("command %s was killed by the memory limit", exec),
			fmt.Sprintf("limit %d bytes, peak %d bytes", res.OOMLimit, res.OOMPeak)}}
	case !isMain:
		return
	case res.Signal != 0:
		x = runtime.Exit{Cause: dsec.CauseAgentError, By: dsec.InducedBySelf, Evidence: []string{
			fmt.Sprintf("the main process was ended by signal %d (%s)", res.Signal, syscall.Signal(res.Signal))}}
	default: // an exit code is what the command says, not how the sandbox fared
		x = runtime.Exit{Cause: dsec.CauseCompleted, By: dsec.InducedBySelf, Evidence: []string{
			fmt.Sprintf("the main process exited with %d", res.ExitCode)}}
	}
	if !r.end(sb, x) {
		return
	}
	if err := r.hold.KillSandbox(ctx, string(sb.ID)); err != nil {
		r.log.Warn("end a sandbox after its main process", "sandbox", sb.ID, "err", err)
	}
}

// initEnd says why PID 1 is gone. Inside, nothing can send it SIGKILL; it ends
// by that only through the memory limit or somebody on the machine.
func (r *Runtime) initEnd(sb *sandbox, signal int) runtime.Exit {
	sb.Mu.Lock()
	g := sb.group
	sb.Mu.Unlock()
	what := fmt.Sprintf("PID 1 was ended by signal %d (%s)", signal, syscall.Signal(signal))
	if g != nil {
		if s, err := g.Stats(); err == nil && s.OOMKills > 0 {
			return runtime.Exit{Cause: dsec.CauseOOM, By: dsec.InducedBySelf, Evidence: []string{what,
				fmt.Sprintf("limit %d bytes, peak %d bytes, %d processes killed by it", s.MemoryLimit, s.MemoryPeak, s.OOMKills)}}
		}
	}
	if signal == int(syscall.SIGKILL) {
		return runtime.Exit{Cause: dsec.CauseUnknown, By: dsec.InducedByUnknown, Evidence: []string{what, "not by the memory limit"}}
	}
	return runtime.Exit{Cause: dsec.CauseAgentDamage, By: dsec.InducedBySelf, Evidence: []string{what}}
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
