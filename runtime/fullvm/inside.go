package fullvm

import (
	"context"
	"errors"
	"net"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/confine"
	"github.com/opendsec/dsec/files"
	"github.com/opendsec/dsec/guest"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime/tier"
)

// allCaps is every capability there is: root of the machine is root of nothing else.
const allCaps = 1<<41 - 1

// command is one as the guest is told it.
func command(rec *record, s process.Spec) guest.Exec {
	return guest.Exec{Command: guest.NewCommand(s), Caps: allCaps, NoNewPrivs: rec.Request.Spec.NoNewPrivs, OOMScoreAdj: confine.OOMScoreAdj}
}

// execution is a command of a sandbox. A guest that does not answer is one that was turned off.
type execution struct {
	process.Process
	r  *Runtime
	sb *sandbox
}

func (p execution) Wait(ctx context.Context) (process.Result, error) {
	res, err := p.Process.Wait(ctx)
	return res, p.sb.translate("wait for command", err)
}

// translate names a sandbox that has ended as the reason for which its guest does not answer.
func (sb *sandbox) translate(op string, err error) error {
	if err == nil || !errors.Is(err, dsec.Unavailable.Err()) {
		return err
	}
	if p := sb.GetPhase(); p != tier.Running && p != tier.Making {
		return dsec.E(dsec.SandboxGone, op, string(sb.ID), err)
	}
	return err
}

// Exec starts a command.
func (r *Runtime) Exec(ctx context.Context, id dsec.SandboxID, s process.Spec) (process.Process, error) {
	const op = "exec in sandbox"
	sb, c, err := r.agent(ctx, op, id)
	if err != nil {
		return nil, err
	}
	if sb.IsPaused() {
		return nil, dsec.Errorf(dsec.IllegalState, op, string(id), "it is paused")
	}
	if s.ID == "" {
		s.ID = dsec.Random(20)
	}
	p, err := c.Exec(ctx, command(sb.record(), s))
	if err != nil {
		return nil, sb.translate(op, err)
	}
	r.watchCommand(sb, c, p)
	return execution{p, r, sb}, nil
}

// Process finds a command that runs or waits for Release.
func (r *Runtime) Process(ctx context.Context, id dsec.SandboxID, exec string) (process.Process, error) {
	const op = "find command"
	sb, c, err := r.agent(ctx, op, id)
	if err != nil {
		return nil, err
	}
	p, err := c.Process(ctx, exec)
	if err != nil {
		return nil, sb.translate(op, err)
	}
	return execution{p, r, sb}, nil
}

// Files opens the file service of a sandbox that runs: the file system of one that does not is the
// guest's, and this machine's kernel reads none of a guest.
func (r *Runtime) Files(ctx context.Context, id dsec.SandboxID, user string) (files.FS, error) {
	const op = "open files"
	if sb, err := r.boxes.Find(op, id); err == nil && sb.GetPhase() == tier.Stopped {
		return nil, dsec.Errorf(dsec.Unsupported, op, string(id), "files of a stopped sandbox cannot be read in the %s tier; start it", r.Tier())
	}
	sb, c, err := r.agent(ctx, op, id)
	if err != nil {
		return nil, err
	}
	fs, err := c.Files(ctx, user)
	if err != nil {
		return nil, sb.translate(op, err)
	}
	return fs, nil
}

// Dial connects to a port of the machine's own loopback.
func (r *Runtime) Dial(ctx context.Context, id dsec.SandboxID, port uint16) (net.Conn, error) {
	const op = "dial"
	sb, c, err := r.agent(ctx, op, id)
	if err != nil {
		return nil, err
	}
	conn, err := c.Dial(ctx, port)
	return conn, sb.translate(op, err)
}
