package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/failpoint"
	"github.com/opendsec/dsec/internal/hold"
)

// Keep has machines with a name outlive this process: dsec-hold is the parent of their
// QEMUs, and keeps a duplicate of each of our ends of their connections. It is of no use when the
// client has lost its hold: then the process that owns machines ends, and the next one adopts them.
type Keep struct {
	Hold *hold.Client

	// Place says which control groups the QEMU of a machine joins: a directory on the v2
	// tree and "tasks" files of v1, which exist and stay the caller's; nil: those of the hold.
	Place func(name string) (group string, tasks []string)

	OOMScoreAdj int // of QEMUs
}

// Ends of connections that are kept.
var keptEnds = []string{"qmp", "agent", "said"}

const (
	keptPrefix = "vm-"            // of the names of processes
	forgetTime = 10 * time.Second // to forget a machine
)

func endName(machine, end string) string { return "vm/" + machine + "/" + end }

// start has the hold start a process, when all that its next owner needs is kept.
func (k *Keep) start(ctx context.Context, name string, ends map[string]*os.File, c Command) (Process, error) {
	for end, f := range ends {
		if err := k.Hold.Put(ctx, endName(name, end), f); err != nil {
			return nil, err
		}
	}
	if err := failpoint.Hit(ctx, "qemu.kept.ends"); err != nil {
		return nil, err
	}
	s := hold.PlainSpec{Name: keptPrefix + name, Path: c.Path, Args: c.Args, UID: c.UID, GID: c.GID, Groups: c.Groups, OOMScoreAdj: k.OOMScoreAdj}
	if k.Place != nil {
		s.Cgroup, s.Tasks = k.Place(name)
	}
	p, err := k.Hold.StartPlain(ctx, s, c.Output, c.Files...)
	if err != nil {
		return nil, err
	}
	return newKept(p), nil
}

// forget gives up all that is kept of a machine that has ended, or whose start nobody waits
// for any more, the process last. After an error something may be left.
func (k *Keep) forget(name string) error {
	ctx, cancel := context.WithTimeout(context.Background(), forgetTime)
	defer cancel()
	p, err := k.Hold.FindPlain(ctx, keptPrefix+name)
	if err == nil {
		p.Kill()
		err = p.Wait(ctx)
		p.Close()
	}
	if err != nil && dsec.ClassOf(err) != dsec.NotFound {
		return err
	}
	for _, end := range keptEnds {
		if err := k.Hold.Drop(ctx, endName(name, end)); err != nil {
			return err
		}
	}
	if err := failpoint.Hit(ctx, "qemu.kept.dropped"); err != nil {
		return err
	}
	if err := k.Hold.AckPlain(ctx, keptPrefix+name); err != nil {
		return err
	}
	// What is told is served before what is asked after it: now the name is free.
	if _, err := k.Hold.Plains(ctx, keptPrefix+name); err != nil {
		return err
	}
	return failpoint.Hit(ctx, "qemu.kept.forgotten")
}

// keptProcess is one that the hold is the parent of.
type keptProcess struct {
	p      *hold.Plain
	life   context.Context // of our interest in it
	forget context.CancelFunc
}

func newKept(p *hold.Plain) keptProcess {
	k := keptProcess{p: p}
	k.life, k.forget = context.WithCancel(context.Background())
	return k
}

func (k keptProcess) Pid() int { return k.p.Info().PID }
func (k keptProcess) Kill()    { k.p.Kill() }

// leave ends Wait; the process goes on.
func (k keptProcess) leave() { k.forget() }

func (k keptProcess) Wait() error {
	err := k.p.Wait(k.life)
	k.forget()
	i := k.p.Info()
	k.p.Close()
	if err == nil && (i.Code != 0 || i.Signal != 0) {
		return exitStatus{i.Code, syscall.Signal(i.Signal)}
	}
	return err
}

// exitStatus is how a process ended that is nobody's child here; like an exec.ExitError.
type exitStatus struct {
	code   int
	signal syscall.Signal
}

func (e exitStatus) Exited() bool { return e.signal == 0 }

func (e exitStatus) Error() string {
	if e.signal != 0 {
		return "signal: " + e.signal.String()
	}
	return fmt.Sprint("exit status ", e.code)
}

// spawn starts the QEMU of a machine. One with a name has a record, which is to be forgotten
// when it has ended.
func (d *Driver) spawn(ctx context.Context, name string, ident identity, ends map[string]*os.File, c Command) (p Process, rec *owned, err error) {
	if name == "" {
		p, err := d.cfg.Spawn(c)
		return p, nil, err
	}
	if d.cfg.Keep == nil {
		return nil, nil, dsec.Errorf(dsec.Unsupported, "start", "virtual machine "+name, "nothing keeps machines beyond this process")
	}
	rec, err = d.newRecord(record{Format: recordFormat, Name: name, UID: c.UID, Identity: ident})
	if err != nil {
		return nil, nil, err
	}
	if err = failpoint.Hit(ctx, "qemu.kept.recorded"); err == nil {
		p, err = d.cfg.Keep.start(ctx, name, ends, c)
	}
	if err == nil {
		if err = failpoint.Hit(ctx, "qemu.kept.started"); err != nil {
			p.Kill()
			_ = p.Wait()
		}
	}
	if err != nil {
		return nil, nil, errors.Join(err, d.forget(rec))
	}
	return p, rec, nil
}

// forget removes what there is of a machine that has ended. If the hold does not answer, the
// record stays for who asks the next one.
func (d *Driver) forget(rec *owned) error {
	if err := d.cfg.Keep.forget(rec.Name); err != nil {
		rec.release()
		return err
	}
	rec.remove()
	return nil
}
