package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
)

// stopTime is how long QEMU may take to write its disk and quit.
const stopTime = 5 * time.Second

// machine is one QEMU.
type machine struct {
	shape vmm.Shape
	ident identity // what a snapshot of it must be restored by
	proc  Process
	mon   *monitor
	agent net.Conn
	out   *os.File // where it says something
	said  *tail
	free  func() // gives back its user, and what is kept of it
	done  chan struct{}

	resets chan struct{} // see vmm.Desk
	stuck  chan string

	portOpen bool // in the guest, as far as event was told

	rec     *owned // nil: it has no name
	adopted bool   // not started by this process, which may have missed something

	op sync.Mutex // one change of the machine's state at a time

	mu     sync.Mutex
	asked  bool   // Stop or Kill
	off    string // why the guest ended it, as QEMU says
	err    error  // after done
	exited bool   // by its own decision
}

var _ vmm.VM = (*machine)(nil)

// run begins to watch it. It takes out.
func (m *machine) run(out *os.File, mon *monitor) {
	m.mon, m.out = mon, out
	heard := make(chan struct{})
	go func() { m.said.follow(out); close(heard) }()
	go m.watch(heard)
}

// event is called by the monitor.
func (m *machine) event(name string, data json.RawMessage) {
	switch name {
	case "RESET":
		notify(m.resets, struct{}{})
	case "VSERPORT_CHANGE":
		m.portChanged(data)
	case "BLOCK_IO_ERROR":
		if why, stopped := stuck(data); stopped {
			notify(m.stuck, why)
		}
	case "SHUTDOWN":
		m.shutdown(data)
	}
}

func (m *machine) shutdown(data json.RawMessage) {
	var s struct {
		Reason string `json:"reason"`
	}
	_ = json.Unmarshal(data, &s)
	m.mu.Lock()
	m.off = s.Reason
	m.mu.Unlock()
}

// watch waits for the end of the process, and kills it when its monitor breaks
// first. heard is closed when all that it said is kept.
func (m *machine) watch(heard <-chan struct{}) {
	ended := make(chan error, 1)
	go func() { ended <- m.proc.Wait() }()
	var status, broken error
	select {
	case status = <-ended:
	case <-m.mon.done:
		wait := stopTime // one that quits closes its monitor first
		if errors.Is(m.mon.err, errMonitor) {
			wait = 0
		}
		select {
		case status = <-ended:
		case <-time.After(wait):
			broken = m.mon.err
			m.proc.Kill()
			status = <-ended
		}
	}
	// What it was is gone: what waits for it here ends now, but what it said last is read.
	select {
	case <-m.mon.done:
	case <-time.After(time.Second): // somebody else holds its end
	}
	_ = m.mon.conn.Close()
	<-m.mon.done
	_ = m.agent.Close()
	select {
	case <-heard:
	case <-time.After(time.Second): // somebody else holds its pipe
	}
	m.mu.Lock()
	var e interface{ Exited() bool } // an exec.ExitError or an exitStatus
	if errors.As(status, &e) && e.Exited() {
		m.exited = true
	}
	switch {
	case m.asked:
	case broken != nil:
		m.err = dsec.E(dsec.ClassOf(broken), "run", "virtual machine", broken)
	case m.off != "":
		m.err = dsec.Errorf(dsec.SandboxGone, "run", "virtual machine", "it ended itself (%s); %s", dsec.Quote(m.off), m.said)
	case m.adopted && status == nil:
		m.err = dsec.Errorf(dsec.SandboxGone, "run", "virtual machine", "it was stopped or ended itself while nobody owned it; %s", m.said)
	default:
		m.err = dsec.Errorf(dsec.Unavailable, "run", "virtual machine", "QEMU ended: %s; %s", statusText(status), m.said)
	}
	free := m.free
	m.mu.Unlock()
	free()
	close(m.done)
}

// Leave implements vmm.Adopter.
func (d *Driver) Leave(vm vmm.VM) {
	m := vm.(*machine)
	select {
	case <-m.done:
		return
	default:
	}
	if m.rec != nil {
		m.leave()
	}
}

// leave gives up a machine with a name, which goes on: another process may take it over, or
// this one again.
func (m *machine) leave() {
	m.mu.Lock()
	m.free, m.asked = m.rec.release, true
	m.mu.Unlock()
	m.proc.(keptProcess).leave()
	_ = m.mon.conn.Close()
	_ = m.out.Close()
	<-m.done
}

func statusText(err error) string {
	if err == nil {
		return "exit status 0"
	}
	return err.Error()
}

func (m *machine) Channel() net.Conn     { return m.agent }
func (m *machine) Done() <-chan struct{} { return m.done }

func (m *machine) Err() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.err
}

// call runs a QMP command. If the machine has ended, that is the error.
func (m *machine) call(ctx context.Context, name string, args, into any) error {
	err := m.mon.call(ctx, name, args, into)
	if err == nil {
		return nil
	}
	select {
	case <-m.mon.done:
		return m.gone(ctx, name, err)
	default:
		return err
	}
}

// gone is the error of a call whose machine ends.
func (m *machine) gone(ctx context.Context, op string, cause error) error {
	select {
	case <-m.done:
	case <-ctx.Done():
	}
	if err := m.Err(); err != nil {
		cause = err
	}
	return dsec.E(dsec.SandboxGone, op, "virtual machine", cause)
}

// status is what QEMU calls the state of the machine.
func (m *machine) status(ctx context.Context) (string, error) {
	var s struct {
		Status string `json:"status"`
	}
	err := m.call(ctx, "query-status", nil, &s)
	return s.Status, err
}

func (m *machine) Pause(ctx context.Context) error {
	m.op.Lock()
	defer m.op.Unlock()
	return m.call(ctx, "stop", nil, nil)
}

func (m *machine) Resume(ctx context.Context) error {
	m.op.Lock()
	defer m.op.Unlock()
	return m.call(ctx, "cont", nil, nil)
}

func (m *machine) Memory() (int64, error) {
	const op = "read memory"
	select {
	case <-m.done:
		return 0, dsec.E(dsec.SandboxGone, op, "virtual machine", m.Err())
	default:
	}
	name := fmt.Sprintf("/proc/%d/smaps_rollup", m.proc.Pid())
	text, err := os.ReadFile(name)
	select {
	case <-m.done: // the number may be another process's
		err = errors.Join(err, os.ErrProcessDone)
	default:
	}
	if err != nil {
		return 0, dsec.E(dsec.SandboxGone, op, "virtual machine", err)
	}
	for l := range strings.Lines(string(text)) {
		f := strings.Fields(l)
		if len(f) == 3 && f[0] == "Pss:" {
			n, err := strconv.ParseInt(f[1], 10, 64)
			if err != nil {
				return 0, dsec.E(dsec.Internal, op, name, err)
			}
			return n << 10, nil
		}
	}
	return 0, dsec.Errorf(dsec.SandboxGone, op, "virtual machine", "%s has no Pss", name)
}

func (m *machine) Stop(ctx context.Context) error {
	select {
	case <-m.done:
		return nil
	default:
	}
	m.ask()
	ctx, cancel := context.WithTimeout(ctx, stopTime)
	defer cancel()
	err := m.mon.call(ctx, "quit", nil, nil)
	select {
	case <-m.done:
		return nil
	case <-ctx.Done():
	}
	m.Kill()
	if err == nil {
		err = ctx.Err()
	}
	return dsec.Errorf(dsec.Timeout, "stop", "virtual machine", "QEMU did not quit, and was killed: %w", err)
}

func (m *machine) Kill() {
	select {
	case <-m.done:
		return
	default:
	}
	m.ask()
	m.proc.Kill()
	<-m.done
}

func (m *machine) ask() {
	m.mu.Lock()
	m.asked = true
	m.mu.Unlock()
}
