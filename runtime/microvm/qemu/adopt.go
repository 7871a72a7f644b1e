package qemu

import (
	"context"
	"errors"
	"net"
	"os"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
)

var _ vmm.Adopter = (*Driver)(nil)

// Adopt takes over a machine by its name: our ends of its connections from the hold, the
// rest from its record, what state it is in from QEMU.
func (d *Driver) Adopt(ctx context.Context, name string) (vmm.VM, error) {
	const op = "adopt"
	object := "virtual machine " + name
	if err := vmm.CheckName(name); err != nil {
		return nil, err
	}
	if d.cfg.Keep == nil {
		return nil, dsec.Errorf(dsec.Unsupported, op, object, "nothing keeps machines beyond this process")
	}
	asked := ctx
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	rec, err := d.ownRecord(ctx, name)
	if rec == nil {
		return nil, err
	}
	plain, perr := d.cfg.Keep.Hold.FindPlain(ctx, keptPrefix+name)
	switch {
	case dsec.ClassOf(perr) == dsec.NotFound: // it was never started, or its hold is gone and it with that
		rec.Name = name
		if err := d.lost(rec); err != nil {
			return nil, err
		}
		return nil, dsec.Errorf(dsec.SandboxGone, op, object, "there is no process of it")
	case perr != nil:
		rec.release()
		return nil, perr
	case dsec.ClassOf(err) == dsec.Corrupt: // nobody can use it any more
		plain.Kill()
		_ = plain.Wait(ctx)
		plain.Close()
		rec.Name, rec.UID = name, plain.Info().Spec.UID
		return nil, errors.Join(err, d.lost(rec))
	case err != nil: // somebody else may know more of it
		plain.Close()
		rec.release()
		return nil, err
	}
	ended := plain.Info().Ended
	m, err := d.adopted(ctx, rec, newKept(plain))
	if err != nil {
		plain.Close()
		rec.release()
		return nil, err
	}
	err = m.takeOver(ctx, ended)
	switch class := dsec.ClassOf(err); {
	case err == nil:
		return m, nil
	case class == dsec.SandboxGone:
	case asked.Err() != nil: // it is not to blame
		m.leave()
	default:
		m.Kill()
		err = dsec.Errorf(dsec.SandboxGone, "take over", "virtual machine", "it did not answer, and was killed: %w", err)
	}
	return nil, dsec.E(dsec.ClassOf(err), op, object, err)
}

// lost forgets a machine that has no process.
func (d *Driver) lost(rec *owned) error {
	uid := rec.UID
	if err := d.forget(rec); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.users, uid)
	return nil
}

// adopted makes a machine of what is kept of it.
func (d *Driver) adopted(ctx context.Context, rec *owned, proc Process) (_ *machine, err error) {
	ends := map[string]*os.File{}
	defer func() {
		for _, f := range ends {
			closeAll(f)
		}
	}()
	for _, end := range keptEnds {
		f, err := d.cfg.Keep.Hold.Get(ctx, endName(rec.Name, end))
		if dsec.ClassOf(err) == dsec.NotFound {
			// Its owner died while it forgot the machine, whose process had ended.
			f, err = os.Open(os.DevNull)
		}
		if err != nil {
			return nil, err
		}
		ends[end] = f
	}
	qmp, agent := connOf(ends["qmp"]), connOf(ends["agent"])
	d.mu.Lock()
	d.users[rec.UID] = true
	d.mu.Unlock()
	free := func() { _ = d.lost(rec) }
	m := &machine{shape: rec.Identity.shape(), ident: rec.Identity, proc: proc, agent: agent, said: newTail(rec.Identity.shape()), free: free, rec: rec, adopted: true, portOpen: true, resets: make(chan struct{}, 1), stuck: make(chan string, 1), done: make(chan struct{})}
	m.run(ends["said"], resumeMonitor(qmp, m.event))
	delete(ends, "said") // taken
	return m, nil
}

// connOf is a connection; of what is none, one that has ended.
func connOf(f *os.File) net.Conn {
	c, err := net.FileConn(f)
	if err != nil {
		here, there := net.Pipe()
		_ = there.Close()
		return here
	}
	return c
}

// takeOver comes to terms with what the owner before was in the middle of: a command
// whose answer is not ours, a migration that nobody reads any more.
func (m *machine) takeOver(ctx context.Context, ended bool) error {
	if ended { // what it said last is there to be read
		return m.takenOver(ctx, os.ErrProcessDone)
	}
	if err := m.mon.interrupt(ctx); err != nil {
		return m.takenOver(ctx, err)
	}
	// Refused if the owner before has done it: whether it is done shows the next command.
	if err := m.call(ctx, "qmp_capabilities", nil, nil); err != nil && dsec.ClassOf(err) != dsec.Internal {
		return m.takenOver(ctx, err)
	}
	status, err := m.status(ctx)
	if err != nil {
		return m.takenOver(ctx, err)
	}
	if status == "inmigrate" {
		m.Kill()
		return dsec.Errorf(dsec.SandboxGone, "take over", "virtual machine", "its owner ended before it had begun")
	}
	m.unsave(ctx)
	if _, err := m.status(ctx); err != nil {
		return m.takenOver(ctx, err)
	}
	return nil
}

// takenOver is why that does not work: mostly that the machine has ended.
func (m *machine) takenOver(ctx context.Context, err error) error {
	if dsec.ClassOf(err) == dsec.Timeout {
		return err
	}
	select {
	case <-m.done:
	case <-ctx.Done():
		return err
	}
	if own := m.Err(); own != nil {
		err = own
	}
	return dsec.E(dsec.SandboxGone, "take over", "virtual machine", err)
}
