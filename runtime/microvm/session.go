package microvm

import (
	"context"
	cryptorand "crypto/rand"
	"encoding/hex"
	"errors"
	"net"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/guest"
	"github.com/opendsec/dsec/internal/version"
	"github.com/opendsec/dsec/netpolicy"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
	"github.com/opendsec/dsec/runtime/tier"
)

// Times that a guest has.
const (
	bootTime   = time.Minute      // to answer the first time of all
	greetTime  = 20 * time.Second // to answer the first time after its machine goes on
	resumeTime = 20 * time.Second
	mountTime  = time.Minute
	freezeTime = time.Minute     // to stop everything, and have what was written on the disk
	askTime    = 5 * time.Second // to answer a question
)

// lane is the channel of a machine, lent to one session: closing it ends what reads and writes
// for that session, and not the channel.
type lane struct{ net.Conn }

func (l lane) Close() error { return l.SetDeadline(time.Unix(1, 0)) }

// connect begins a session on the channel of a machine. The one before has to be closed.
func connect(ctx context.Context, ch net.Conn) (*guest.Client, error) {
	return connectWithin(ctx, ch, greetTime, guest.Options{})
}

func connectWithin(ctx context.Context, ch net.Conn, limit time.Duration, o guest.Options) (*guest.Client, error) {
	if err := ch.SetDeadline(time.Time{}); err != nil {
		return nil, dsec.E(dsec.SandboxGone, "greet guest", "", err)
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	o.Program = version.Version
	return guest.Connect(ctx, lane{ch}, o)
}

// session returns the one with a guest that runs, and begins another if that has ended.
func (r *Runtime) session(ctx context.Context, sb *sandbox) (*guest.Client, error) {
	const op = "reach guest of sandbox"
	sb.Mu.Lock()
	c, m := sb.client, sb.machine
	sb.Mu.Unlock()
	if c != nil && !over(c) {
		return c, nil
	}
	if m == nil {
		return nil, dsec.Errorf(dsec.SandboxGone, op, string(sb.ID), "the sandbox has ended")
	}
	select {
	case sb.talking <- struct{}{}:
		defer func() { <-sb.talking }()
	case <-ctx.Done():
		return nil, dsec.E(dsec.ClassOf(ctx.Err()), op, string(sb.ID), context.Cause(ctx))
	}
	sb.Mu.Lock()
	c, now := sb.client, sb.machine
	sb.Mu.Unlock()
	if now != m {
		return nil, dsec.Errorf(dsec.SandboxGone, op, string(sb.ID), "the sandbox has ended")
	}
	if c != nil && !over(c) {
		return c, nil
	}
	if c != nil {
		_ = c.Close() // waits until nobody reads the channel any more
	}
	c, err := connect(ctx, m.Channel())
	if err != nil {
		return nil, r.explain(op, sb, err)
	}
	sb.Mu.Lock()
	now = sb.machine
	if now == m {
		sb.client = c
	}
	sb.Mu.Unlock()
	if now != m {
		_ = c.Close()
		return nil, dsec.Errorf(dsec.SandboxGone, op, string(sb.ID), "the sandbox has ended")
	}
	return c, nil
}

func over(c *guest.Client) bool { return tier.IsDone(c.Done()) }

// explain says that the sandbox has ended where that is why a guest could not be reached.
func (r *Runtime) explain(op string, sb *sandbox, err error) error {
	return sb.Explain(op, err, func() bool {
		sb.Mu.Lock()
		m, away := sb.machine, sb.suspended != nil
		sb.Mu.Unlock()
		return m == nil && !away || m != nil && tier.IsDone(m.Done())
	})
}

// identity is what makes a machine one of its own; see guest.Resume. at is when it is told.
func (r *Runtime) identity(sb *sandbox, rec *record) guest.Resume {
	q := guest.Resume{Time: time.Now().UnixNano(), Seed: make([]byte, 32), Hostname: hostname(sb.ID, rec.Request.Spec), MachineID: rec.MachineID, Network: rec.Lease.network()}
	_, _ = cryptorand.Read(q.Seed) // never errs
	var l netpolicy.Lease
	if rec.Lease != nil {
		l = rec.Lease.Lease
	}
	for _, f := range []struct {
		name    string
		content []byte
	}{{"hosts", l.Hosts(q.Hostname)}, {"hostname", []byte(q.Hostname + "\n")}, {"resolv.conf", l.ResolvConf()}} {
		q.Files = append(q.Files, guest.NewFile{Dir: "/etc", Name: f.name, Content: f.content})
	}
	return q
}

func newMachineID() string {
	var b [16]byte
	_, _ = cryptorand.Read(b[:]) // never errs
	return hex.EncodeToString(b[:])
}

func hostname(id dsec.SandboxID, s dsec.Spec) string {
	if s.Hostname == "" {
		return string(id)
	}
	return dsec.ShortHostname(s.Hostname)
}

// begin makes the guest of a machine that has just begun, or goes on, one of its own.
func (r *Runtime) begin(ctx context.Context, sb *sandbox, rec *record) error {
	return r.tell(ctx, sb, rec, false)
}

// tell is begin; frozen: what is frozen stays so.
func (r *Runtime) tell(ctx context.Context, sb *sandbox, rec *record, frozen bool) error {
	c, err := r.session(ctx, sb)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, resumeTime)
	defer cancel()
	q := r.identity(sb, rec)
	q.Frozen = frozen
	return c.Resume(ctx, q)
}

// leave gives up the sessions and machines of a sandbox, which go on.
func (r *Runtime) leave(sb *sandbox) {
	r.mu.Lock()
	m := r.machinery
	r.mu.Unlock()
	sb.Mu.Lock()
	vm, c, d := sb.machine, sb.client, sb.disk
	sb.client, sb.disk = nil, nil
	sb.Mu.Unlock()
	if c != nil {
		_ = c.Close()
	}
	if d != nil {
		_ = d.c.Close()
		d.m.Kill() // it only serves
	}
	if m == nil || vm == nil {
		return
	}
	if k, ok := m.VMM.(vmm.Adopter); ok {
		k.Leave(vm)
	}
}

// endMachine ends the machine of a sandbox, if it has one, and what was under way there.
func (sb *sandbox) endMachine(ctx context.Context) error {
	sb.Mu.Lock()
	m, c := sb.machine, sb.client
	sb.machine, sb.client = nil, nil
	sb.Mu.Unlock()
	return endMachine(ctx, m, c)
}

func endMachine(ctx context.Context, m vmm.VM, c *guest.Client) error {
	if c != nil {
		_ = c.Close()
	}
	if m == nil {
		return nil
	}
	err := m.Stop(ctx)
	if errors.Is(err, dsec.Timeout.Err()) { // it was killed, which is all that is wanted
		return nil
	}
	return err
}
