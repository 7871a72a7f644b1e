package qemu

import (
	"context"
	"encoding/json"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
)

var _ vmm.Desk = (*machine)(nil)

func (m *machine) Resets() <-chan struct{} { return m.resets }

func (m *machine) Stuck() <-chan string { return m.stuck }

// notify has a channel have an element.
func notify[T any](c chan<- T, v T) {
	select {
	case c <- v:
	default: // it was told, and not heard yet
	}
}

// portChanged is called with each VSERPORT_CHANGE. Of changes in one second QEMU tells the first and the last: a port
// that is opened while it is open was closed in between.
func (m *machine) portChanged(data json.RawMessage) {
	var e struct {
		Open *bool `json:"open"`
	}
	if json.Unmarshal(data, &e) != nil || e.Open == nil {
		return
	}
	if m.portOpen || !*e.Open {
		notify(m.resets, struct{}{})
	}
	m.portOpen = *e.Open
}

// stuck is why a machine was stopped, if a BLOCK_IO_ERROR says that it was; what QEMU calls no space
// is not all of it: a quota is another error.
func stuck(data json.RawMessage) (why string, stopped bool) {
	var e struct {
		Action string `json:"action"`
		Reason string `json:"reason"`
	}
	if json.Unmarshal(data, &e) != nil || e.Action != "stop" {
		return "", false
	}
	return e.Reason, true
}

func (m *machine) Console() []byte { return m.said.bytes() }

func (m *machine) PowerButton(ctx context.Context) error {
	return m.call(ctx, "system_powerdown", nil, nil)
}

func (m *machine) Reset(ctx context.Context) error {
	m.op.Lock()
	defer m.op.Unlock()
	return m.call(ctx, "system_reset", nil, nil)
}

// screened says whether there is a screen at all.
func (m *machine) screened(op string) error {
	if m.shape.Video == "" {
		return dsec.Errorf(dsec.Unsupported, op, "virtual machine", "it has no screen")
	}
	return nil
}

// Screenshot has QEMU write to the file by a descriptor: it can open nothing. What it has
// of it is for writing only, as it asks for no other.
func (m *machine) Screenshot(ctx context.Context, to *os.File) error {
	const op = "take a picture of"
	if err := m.screened(op); err != nil {
		return err
	}
	w, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", to.Fd()), os.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return dsec.E(dsec.Internal, op, "virtual machine", cause(err))
	}
	defer func() { _ = w.Close() }()
	var set struct {
		ID int64 `json:"fdset-id"`
	}
	if err := m.mon.callWith(ctx, "add-fd", nil, &set, w); err != nil {
		return m.orGone(ctx, "add-fd", err)
	}
	err = m.call(ctx, "screendump", map[string]any{"filename": fmt.Sprintf("/dev/fdset/%d", set.ID)}, nil)
	// Also when the caller has gone; it goes with the machine anyway.
	_ = m.call(context.WithoutCancel(ctx), "remove-fd", map[string]any{"fdset-id": set.ID}, nil)
	return err
}

// orGone is the error of a call that was not made by call.
func (m *machine) orGone(ctx context.Context, op string, err error) error {
	select {
	case <-m.mon.done:
		return m.gone(ctx, op, err)
	default:
		return err
	}
}

type qmpEvent struct {
	Type string `json:"type"`
	Data any    `json:"data"`
}

func (m *machine) Input(ctx context.Context, events []vmm.Input) error {
	if err := m.screened("hand input to"); err != nil {
		return err
	}
	all := make([]qmpEvent, 0, len(events))
	for _, e := range events {
		switch {
		case e.Key != "":
			all = append(all, qmpEvent{"key", map[string]any{"down": e.Down, "key": map[string]string{"type": "qcode", "data": e.Key}}})
		case e.Button != "":
			all = append(all, qmpEvent{"btn", map[string]any{"down": e.Down, "button": e.Button}})
		default:
			all = append(all, qmpEvent{"abs", map[string]any{"axis": e.Axis, "value": e.Value}})
		}
	}
	return m.call(ctx, "input-send-event", map[string]any{"events": all}, nil)
}
