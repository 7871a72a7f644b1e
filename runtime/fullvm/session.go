package fullvm

import (
	"context"
	"crypto/rand"
	"errors"
	"net"
	"strings"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/guest"
	"github.com/opendsec/dsec/internal/version"
	"github.com/opendsec/dsec/internal/within"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
)

const (
	askEvery   = 10 * time.Second // that an agent which says nothing is asked whether it lives
	answerTime = 30 * time.Second // that it may take
	endingTime = 100 * time.Millisecond
	againTime  = time.Second      // after a session that did not come about
	graceTime  = 15 * time.Second // that a call waits for an agent which is not there
)

// lent is a channel for one session: closing it ends the session's calls, and not the channel.
type lent struct{ net.Conn }

func (l lent) Close() error { return l.SetDeadline(time.Unix(1, 0)) }

// attend makes a machine that of a sandbox: watches its end, and talks with its agent if there is to be one.
func (r *Runtime) attend(sb *sandbox, vm vmm.VM) error {
	desk, ok := vm.(vmm.Desk)
	if !ok {
		vm.Kill()
		return dsec.Errorf(dsec.Internal, "boot", "virtual machine", "%T is no desk", vm)
	}
	ctx, hangUp := context.WithCancel(r.life)
	talking := make(chan struct{})
	sb.Mu.Lock()
	sb.vm, sb.hangUp, sb.talking, sb.Stopping, sb.early = desk, hangUp, talking, false, nil
	rec := sb.rec
	sb.Mu.Unlock()
	r.tasks.Go(func() {
		for {
			select {
			case <-desk.Done():
				if ctx.Err() == nil { // else it was let go, or ended
					r.machineEnded(sb, desk)
				}
				return
			case why := <-desk.Stuck():
				r.diskStuck(ctx, sb, why)
			case <-ctx.Done():
				return
			}
		}
	})
	r.tasks.Go(func() {
		defer close(talking)
		if rec.Image.Agent {
			r.converse(ctx, sb, desk)
		}
	})
	return nil
}

// converse keeps a session with the agent as long as the machine is on: it begins another one when the guest was
// started anew, its agent was, or the one there is has broken.
func (r *Runtime) converse(ctx context.Context, sb *sandbox, vm vmm.Desk) {
	for {
		select {
		case <-vm.Resets(): // what comes is after it
		default:
		}
		c, err := r.greet(ctx, sb, vm)
		if err == nil {
			sb.setClient(c)
			r.greeted(sb, c)
			r.listen(ctx, sb, vm, c)
			sb.setClient(nil)
			_ = c.Close()
		}
		if err != nil && ctx.Err() == nil { // a machine that ends says so soon
			_ = within.Sleep(ctx, endingTime)
		}
		select {
		case <-ctx.Done():
			return
		case <-vm.Done():
			return
		default:
		}
		if err != nil {
			r.log.Info("talk with guest agent", "sandbox", sb.ID, "err", err)
			if within.Sleep(ctx, againTime) != nil {
				return
			}
		}
	}
}

// greet waits as long as it takes.
func (r *Runtime) greet(ctx context.Context, sb *sandbox, vm vmm.Desk) (*guest.Client, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := make(chan struct{})
	defer close(stop)
	go func() {
		select {
		case <-vm.Done():
			cancel()
		case <-stop:
		}
	}()
	conn := vm.Channel()
	if err := conn.SetDeadline(time.Time{}); err != nil {
		return nil, err
	}
	c, err := guest.Connect(ctx, lent{conn}, guest.Options{Program: version.Version})
	if err != nil {
		return nil, err
	}
	rec := sb.record()
	if rec == nil {
		_ = c.Close()
		return nil, errClosed
	}
	actx, acancel := context.WithTimeout(ctx, answerTime)
	defer acancel()
	if err = c.Resume(actx, resumption()); err == nil {
		err = c.Mount(actx, mountOf(rec))
	}
	if err != nil {
		_ = c.Close()
		return nil, err
	}
	return c, nil
}

// resumption is what a guest is told when it begins, and when it goes on: it cannot know that it stood still.
func resumption() guest.Resume {
	seed := make([]byte, 32)
	_, _ = rand.Read(seed) // never errs
	return guest.Resume{Time: time.Now().UnixNano(), Seed: seed}
}

// mountOf is the same in all sessions of a sandbox.
func mountOf(rec *record) guest.Mount {
	s := rec.Request.Spec
	return guest.Mount{Machine: true, Mounts: []guest.FileSystem{}, Overlay: guest.Overlay{Lowers: []string{}},
		Defaults: guest.Defaults{User: s.User, Cwd: s.Workdir, Env: s.Env},
		// The limits are of commands and what they start. Its memory the machine could not exceed anyway; a
		// group that knows it says how much there was when one was killed for it.
		Limits: guest.Limits{Memory: s.Limits.Memory, Pids: s.Limits.Pids, Spool: s.Limits.Output}}
}

// greeted looks for what a sandbox stands and falls with.
func (r *Runtime) greeted(sb *sandbox, c *guest.Client) {
	rec := sb.record()
	if rec == nil || rec.Made < rec.Starts {
		return
	}
	ctx, cancel := context.WithTimeout(r.life, answerTime)
	defer cancel()
	if rec.Request.Spec.OOM == dsec.OOMSandbox {
		r.watchAll(ctx, sb, c)
	}
	if len(rec.Request.Spec.Command) == 0 {
		return
	}
	p, err := c.Process(ctx, mainID)
	switch {
	case err == nil:
		r.watchCommand(sb, c, p)
	case errors.Is(err, dsec.NotFound.Err()):
		r.selfEnded(sb, "the machine, or its agent, began anew, and the main command is gone")
	}
}

// watchAll watches commands that an earlier process, or session, has begun; the main one is watched anyway.
func (r *Runtime) watchAll(ctx context.Context, sb *sandbox, c *guest.Client) {
	ids, err := c.List(ctx)
	if err != nil {
		return // the session has ended
	}
	for _, id := range ids {
		if p, err := c.Process(ctx, id); err == nil && id != mainID {
			r.watchCommand(sb, c, p)
		}
	}
}

// listen returns when the session is of no use any more.
func (r *Runtime) listen(ctx context.Context, sb *sandbox, vm vmm.Desk, c *guest.Client) {
	ask := time.NewTicker(askEvery)
	defer ask.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.Done():
			return
		case <-vm.Resets():
			return
		case <-ask.C:
		}
		if sb.IsPaused() {
			continue
		}
		actx, cancel := context.WithTimeout(ctx, answerTime)
		_, err := c.List(actx)
		cancel()
		if err != nil && !sb.IsPaused() {
			return
		}
	}
}

// IsPaused is as its record says, which outlives this process, and not as its box.
func (sb *sandbox) IsPaused() bool {
	sb.Mu.Lock()
	defer sb.Mu.Unlock()
	return sb.rec != nil && sb.rec.Paused
}

// await waits until somebody answers for the guest.
func (sb *sandbox) await(ctx context.Context) (*guest.Client, error) {
	for {
		sb.Mu.Lock()
		c, changed, vm := sb.client, sb.changed, sb.vm
		sb.Mu.Unlock()
		if c != nil {
			return c, nil
		}
		if vm == nil {
			return nil, dsec.Errorf(dsec.SandboxGone, "wait for guest agent", string(sb.ID), "it has ended")
		}
		select {
		case <-changed:
		case <-vm.Done():
			return nil, dsec.E(dsec.SandboxGone, "wait for guest agent", string(sb.ID), vm.Err())
		case <-ctx.Done():
			return nil, dsec.E(dsec.ClassOf(ctx.Err()), "wait for guest agent", string(sb.ID), context.Cause(ctx))
		}
	}
}

// noAgent is the error of what needs one.
func (r *Runtime) noAgent(op string, id dsec.SandboxID) error {
	return dsec.Errorf(dsec.Unsupported, op, string(id), "its disk image has no guest agent, without which the %s tier has a screen, a console and a power switch only", r.Tier())
}

// agent of a sandbox that runs.
func (r *Runtime) agent(ctx context.Context, op string, id dsec.SandboxID) (*sandbox, *guest.Client, error) {
	sb, _, err := r.live(op, id)
	if err != nil {
		return nil, nil, err
	}
	if !sb.record().Image.Agent {
		return nil, nil, r.noAgent(op, id)
	}
	wctx, cancel := context.WithTimeout(ctx, graceTime)
	defer cancel()
	c, err := sb.await(wctx)
	if err != nil && ctx.Err() == nil && dsec.ClassOf(err) != dsec.SandboxGone {
		err = dsec.Errorf(dsec.Unavailable, op, string(id), "its agent does not answer")
	}
	return sb, c, err
}

// tailOf is the end of a text in one line.
func tailOf(b []byte) string {
	b = b[max(0, len(b)-400):]
	return strings.Join(strings.Fields(strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r == 0xfffd {
			return ' '
		}
		return r
	}, string(b))), " ")
}
