package fullvm

import (
	"context"
	"fmt"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/guest"
	"github.com/opendsec/dsec/internal/lifecycle"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
	"github.com/opendsec/dsec/runtime/tier"
)

// Exits tells of ends that nobody asked for.
func (r *Runtime) Exits() <-chan runtime.Exit { return r.ends.C() }

// end marks a running sandbox as ended and reports it, once. It returns false if the sandbox did not
// run, or is being ended anyway. The end of one that is being made is kept until it is.
func (r *Runtime) end(sb *sandbox, x runtime.Exit) bool {
	x.ID = sb.ID
	sb.Mu.Lock()
	if sb.Phase == tier.Making && sb.early == nil {
		sb.early = &x
	}
	if sb.Phase != tier.Running || sb.Stopping {
		sb.Mu.Unlock()
		return false
	}
	sb.Phase = tier.Ended
	rec := *sb.rec
	rec.Exit = &x
	sb.rec = &rec
	err := r.write(&rec) // in turn with whoever changes it
	sb.Mu.Unlock()
	if err != nil { // who opens it next finds no machine, and says so
		r.log.Warn("write down the end of a sandbox", "sandbox", sb.ID, "err", err)
	}
	r.ends.Report(x)
	return true
}

// machineEnded says why a machine is gone that nobody ended.
func (r *Runtime) machineEnded(sb *sandbox, vm vmm.Desk) {
	if sb.machineNow() != vm {
		return
	}
	r.end(sb, r.verdict(sb, vm.Err()))
}

func (r *Runtime) verdict(sb *sandbox, err error) runtime.Exit {
	what := "QEMU ended"
	if err != nil {
		what = err.Error()
	}
	x := runtime.Exit{Cause: dsec.CauseUnknown, By: dsec.InducedByUnknown, Evidence: []string{what}}
	select {
	case <-r.cfg.Lost:
		return lostWithHold(what)
	default:
	}
	sb.Mu.Lock()
	g := sb.group
	sb.Mu.Unlock()
	if g != nil {
		if s, serr := g.Stats(); serr == nil && s.OOMKills > 0 {
			x.Cause, x.By = dsec.CauseOOM, dsec.InducedBySelf
			x.Evidence = append(x.Evidence, fmt.Sprintf("limit %d bytes, peak %d bytes, %d processes killed by it", s.MemoryLimit, s.MemoryPeak, s.OOMKills))
			return x
		}
	}
	switch {
	case dsec.ClassOf(err) != dsec.SandboxGone || strings.Contains(what, "while nobody owned it"):
	case strings.Contains(what, "guest-shutdown"):
		x.Cause, x.By = dsec.CauseCompleted, dsec.InducedBySelf
	default: // it crashed
		x.Cause, x.By = dsec.CauseAgentDamage, dsec.InducedBySelf
	}
	return x
}

func lostWithHold(what string) runtime.Exit {
	return runtime.Exit{Cause: dsec.CauseInfraNodeLost, By: dsec.InducedByPlatform, Evidence: []string{"the process that held the sandbox (dsec-hold) ended", what}}
}

// diskStuck ends a sandbox whose machine stands still because its disk could not be written. It cannot go on without
// an error that its file system does not expect: what it wrote until then is as after a loss of power.
func (r *Runtime) diskStuck(ctx context.Context, sb *sandbox, why string) {
	u, err := r.cfg.Disks.Usage(ctx, string(sb.ID))
	x := runtime.Exit{By: dsec.InducedByPlatform, Evidence: []string{"its disk could not be written: " + why}}
	switch {
	case ctx.Err() != nil:
		return
	case err == nil && u.Used+nearFull >= u.Limit, strings.EqualFold(why, unix.EDQUOT.Error()): // nobody else has its quota
		x.Cause, x.By = dsec.CauseDiskFull, dsec.InducedBySelf
		x.Evidence = append(x.Evidence, fmt.Sprintf("it has %d bytes with its marks, limit %d bytes", u.Used, u.Limit))
	case strings.EqualFold(why, unix.ENOSPC.Error()): // as libc spells it
		x.Cause = dsec.CauseInfraCapacity
	default:
		x.Cause = dsec.CauseInfraDisk
	}
	if r.end(sb, x) {
		r.finish(sb, nil)
	} else if vm := sb.machineNow(); vm != nil && sb.GetPhase() == tier.Making {
		vm.Kill() // who waits for it to boot waits in vain
	}
}

// nearFull is what of a limit cannot be used by a write: a cluster of the disk, and what the file system of the pool
// needs to note it.
const nearFull = 1 << 20

// selfEnded ends a sandbox whose programs have ended what it is for.
func (r *Runtime) selfEnded(sb *sandbox, why string) {
	if r.end(sb, runtime.Exit{Cause: dsec.CauseAgentDamage, By: dsec.InducedBySelf, Evidence: []string{why}}) {
		r.tasks.Go(func() { r.off(sb) })
	}
}

// watchCommand ends a sandbox with its main command, or by its own wish with one that ran out of memory.
func (r *Runtime) watchCommand(sb *sandbox, c *guest.Client, p process.Process) {
	spec := sb.record().Request.Spec
	isMain := p.Spec().ID == mainID && len(spec.Command) > 0
	if !isMain && spec.OOM != dsec.OOMSandbox {
		return
	}
	r.tasks.Go(func() {
		ctx, cancel := context.WithCancel(r.life)
		defer cancel()
		res, err := p.Wait(ctx)
		if err != nil || res.Status == process.Killed && !isMain {
			return
		}
		sb.Mu.Lock()
		now := sb.client
		sb.Mu.Unlock()
		if now != c {
			return // of another life of the machine
		}
		x := runtime.Exit{Cause: dsec.CauseCompleted, By: dsec.InducedBySelf, Evidence: []string{fmt.Sprintf("the main process exited with %d", res.ExitCode)}}
		switch {
		case res.OOM:
			x.Cause, x.Evidence = dsec.CauseOOM, []string{fmt.Sprintf("command %s was killed by the memory limit", p.Spec().ID)}
		case !isMain:
			return
		case res.Signal != 0:
			x.Cause, x.Evidence = dsec.CauseAgentError, []string{fmt.Sprintf("the main process was ended by signal %d (%s)", res.Signal, syscall.Signal(res.Signal))}
		}
		if r.end(sb, x) {
			r.finish(sb, c)
		}
	})
}

// finish turns off the machine of a sandbox that has ended.
func (r *Runtime) finish(sb *sandbox, c *guest.Client) {
	if c != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(r.life), lifecycle.UndoLimit)
		defer cancel()
		_ = c.Shutdown(ctx, 0) // the disk has what it wrote, if it answers
	}
	r.tasks.Go(func() { r.off(sb) })
}
