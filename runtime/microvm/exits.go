package microvm

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/guest"
	"github.com/opendsec/dsec/internal/lifecycle"
	"github.com/opendsec/dsec/internal/within"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
	"github.com/opendsec/dsec/runtime/tier"
)

// A guest whose sessions break is greeted again so often before its sandbox is given up.
const (
	mostBroken  = tier.MostBroken
	brokenPause = 200 * time.Millisecond
	longSession = time.Minute // one that held so long is no sign of a guest that breaks each
)

// Exits tells of ends that nobody asked for.
func (r *Runtime) Exits() <-chan runtime.Exit { return r.ends.C() }

// watch ends a sandbox with its machine, its PID 1 or its main command.
func (r *Runtime) watch(sb *sandbox, m vmm.VM) {
	r.tasks.Go(func() {
		select {
		case <-m.Done():
			r.machineEnded(sb, m)
		case <-r.life.Done():
		}
	})
	r.tasks.Go(func() { r.attend(sb, m) })
}

// owns reports whether a machine is still the one of a sandbox that runs.
func (sb *sandbox) owns(m vmm.VM) bool {
	sb.Mu.Lock()
	defer sb.Mu.Unlock()
	return sb.machine == m && sb.Phase == tier.Running && !sb.Stopping
}

// attend asks the guest to tell of its end, by session after session.
func (r *Runtime) attend(sb *sandbox, m vmm.VM) {
	for broken := 0; ; {
		c, err := r.session(r.life, sb)
		if err == nil {
			r.watchCommands(sb, c)
			begun := time.Now()
			var why string
			if why, err = c.Ended(r.life); err == nil {
				r.end(sb, r.initEnd(sb, c, why))
				return
			}
			if time.Since(begun) > longSession {
				broken = 0
			}
		}
		select {
		case <-m.Done(): // which is told by who waits for that
			return
		default:
		}
		if r.life.Err() != nil || !sb.owns(m) {
			return
		}
		r.log.Warn("a guest broke its session", "sandbox", sb.ID, "err", err)
		if broken++; broken > mostBroken {
			r.end(sb, runtime.Exit{Cause: dsec.CauseAgentDamage, By: dsec.InducedBySelf, Evidence: []string{"the agent in its machine does not answer as it should: " + err.Error()}})
			return
		}
		if within.Sleep(r.life, brokenPause) != nil {
			return
		}
	}
}

// watchCommands watches those that an earlier process, or session, has begun.
func (r *Runtime) watchCommands(sb *sandbox, c *guest.Client) {
	ids, err := c.List(r.life)
	if err != nil {
		return // the session has ended
	}
	for _, id := range ids {
		if p, err := c.Process(r.life, id); err == nil {
			r.watchCommand(sb, p)
		}
	}
}

// watchCommand ends the sandbox if the command is its main process, or if a memory kill ends
// it by its own wish.
func (r *Runtime) watchCommand(sb *sandbox, p process.Process) {
	rec := sb.record()
	if rec == nil {
		return
	}
	spec := rec.Request.Spec
	isMain := p.Spec().ID == mainID && len(spec.Command) > 0
	if !isMain && spec.OOM != dsec.OOMSandbox {
		return
	}
	r.tasks.Go(func() {
		res, err := p.Wait(r.life)
		if err == nil && res.Status != process.Lost {
			r.commandEnded(sb, p.Spec().ID, isMain, res)
		}
	})
}

func (r *Runtime) commandEnded(sb *sandbox, id string, isMain bool, res process.Result) {
	x := runtime.Exit{By: dsec.InducedBySelf}
	switch {
	case res.OOM:
		x.Cause, x.Evidence = dsec.CauseOOM, []string{fmt.Sprintf("command %s was killed by the memory limit", id),
			fmt.Sprintf("limit %d bytes, peak %d bytes", res.OOMLimit, res.OOMPeak)}
	case !isMain:
		return
	case res.Signal != 0:
		x.Cause, x.Evidence = dsec.CauseAgentError, []string{fmt.Sprintf("the main process was ended by signal %d (%s)", res.Signal, syscall.Signal(res.Signal))}
	default: // an exit code is what the command says, not how the sandbox fared
		x.Cause, x.Evidence = dsec.CauseCompleted, []string{fmt.Sprintf("the main process exited with %d", res.ExitCode)}
	}
	r.end(sb, x)
}

// initEnd says why PID 1 of a sandbox is gone, which nothing inside can send a signal.
func (r *Runtime) initEnd(sb *sandbox, c *guest.Client, why string) runtime.Exit {
	ctx, cancel := context.WithTimeout(r.life, lifecycle.UndoLimit)
	defer cancel()
	if s, err := c.Stats(ctx); err == nil && s.OOMKills > 0 {
		return runtime.Exit{Cause: dsec.CauseOOM, By: dsec.InducedBySelf, Evidence: []string{why,
			fmt.Sprintf("%d processes killed by the memory limit", s.OOMKills)}}
	}
	return runtime.Exit{Cause: dsec.CauseAgentDamage, By: dsec.InducedBySelf, Evidence: []string{why}}
}

// machineEnded says why a machine is gone.
func (r *Runtime) machineEnded(sb *sandbox, m vmm.VM) {
	if r.life.Err() != nil || !sb.owns(m) && sb.GetPhase() != tier.Making {
		return
	}
	err := m.Err()
	if err == nil {
		err = errors.New("the machine was ended")
	}
	x := runtime.Exit{Cause: dsec.CauseUnknown, By: dsec.InducedByUnknown, Evidence: []string{err.Error()}}
	sb.Mu.Lock()
	g := sb.group
	sb.Mu.Unlock()
	var killed int64
	if g != nil {
		if s, err := g.Stats(); err == nil {
			killed = s.OOMKills
		}
	}
	switch {
	case killed > 0:
		x.Cause, x.By = dsec.CauseOOM, dsec.InducedBySelf
		x.Evidence = append(x.Evidence, fmt.Sprintf("its virtual machine monitor was killed by the memory limit of %d bytes", g.Limits().Memory))
	case r.holdIsGone():
		x.Cause, x.By = dsec.CauseInfraNodeLost, dsec.InducedByPlatform
		x.Evidence = append(x.Evidence, "the process that held the machine (dsec-hold) ended")
	case errors.Is(err, dsec.SandboxGone.Err()):
		// Its kernel stopped, which nothing but what ran in it can have done.
		x.Cause, x.By = dsec.CauseAgentDamage, dsec.InducedBySelf
	case strings.Contains(err.Error(), syscall.SIGBUS.String()):
		// What it maps was not there: a layer is not what it was.
		x.Cause, x.By = dsec.CauseInfraImage, dsec.InducedByPlatform
	case strings.Contains(err.Error(), "signal"):
		x.Evidence = append(x.Evidence, "not by the memory limit")
	}
	r.end(sb, x)
}

func (r *Runtime) holdIsGone() bool {
	select {
	case <-r.hold.Done():
		return true
	default:
		return false
	}
}

// end marks a running sandbox as ended, reports it, once, and has its machine ended. It returns
// false if the sandbox did not run, or is being ended anyway. The end of one that is still being
// made is kept until it is made.
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
	if err := writeExit(r.dir(sb.ID), x); err != nil {
		r.log.Warn("note the end of a sandbox", "sandbox", sb.ID, "err", err)
	}
	r.report(sb, x)
	return true
}

// report tells of an end, and has what is left of the machine ended.
func (r *Runtime) report(sb *sandbox, x runtime.Exit) {
	r.ends.Report(x)
	r.tasks.Go(func() { r.finish(sb) })
}

// finish ends the machine of a sandbox that has ended, so that its disk is whole.
func (r *Runtime) finish(sb *sandbox) {
	ctx, cancel := context.WithTimeout(r.life, 2*lifecycle.UndoLimit)
	defer cancel()
	if sb.Enter(ctx, "end machine of sandbox") != nil {
		return // closed; the next process does it
	}
	defer sb.Leave()
	if sb.GetPhase() != tier.Ended {
		return
	}
	if err := r.powerOff(ctx, sb, 0); err != nil && ctx.Err() == nil {
		r.log.Warn("end the machine of a sandbox", "sandbox", sb.ID, "err", err)
	}
}
