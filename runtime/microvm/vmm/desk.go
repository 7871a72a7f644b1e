package vmm

import (
	"context"
	"os"

	"github.com/opendsec/dsec"
)

// Screens that a machine may have.
const (
	VideoStd    = "std"    // VGA, known to every system
	VideoVirtio = "virtio" // virtio-gpu, with VGA until its driver is there
	BusSATA     = "sata"
)

// Desk is a VM with a firmware: one that a person could sit at. Its methods may be called
// concurrently, also with those of VM.
type Desk interface {
	VM

	// Screenshot writes what is on the screen to a file, empty until then, as binary PPM. It is what
	// the guest shows, of the size that it chose. Of a machine without one it is an Unsupported.
	Screenshot(ctx context.Context, to *os.File) error

	// Input hands events to the keyboard and the tablet, in order, all at once. The devices keep
	// 16 of each that the guest has not asked for, and lose what comes then.
	Input(ctx context.Context, events []Input) error

	// Console is the end of what came from the first serial port, and of what the monitor said.
	Console() []byte

	// PowerButton presses it; what the guest does then is its own business.
	PowerButton(ctx context.Context) error

	// Reset has it begin anew, as the button of that name; the guest is not asked.
	Reset(ctx context.Context) error

	// Resets gets an element each time it has begun anew, whoever did it, and each time what had the channel open
	// in it has let go of it; one that was not taken stands for all that follow.
	Resets() <-chan struct{}

	// Stuck gets the reason when the file of the disk could not be written and the machine, which did not ask for
	// more than its disk has, was stopped for it; one that was not taken stands for all that follow. A machine that
	// is resumed tries again.
	Stuck() <-chan string
}

// Input is one event. Exactly one of Key, Button and Axis is set.
type Input struct {
	Key    string // a key's name in QMP (QKeyCode): "a", "ret", "shift"
	Button string // "left", "middle", "right", "wheel-up", "wheel-down", "wheel-left", "wheel-right"
	Down   bool   // of a key or button
	Axis   string // of the tablet: "x" or "y"
	Value  int    // of the axis: 0 to MaxAxis is the whole screen
}

// MaxAxis is the right and the lower border.
const MaxAxis = 32767

func (s Shape) checkDesk() error {
	bad := func(format string, args ...any) error {
		return dsec.Errorf(dsec.Invalid, "check", "shape of a virtual machine", format, args...)
	}
	switch {
	case s.Kernel.Path == "":
		return bad("it has no firmware")
	case s.Disk == 0:
		return bad("a firmware, and no disk to boot")
	case s.Initramfs.Path != "" && s.Initramfs.Path != "-" || s.Append != "" || len(s.Pmem) > 0:
		return bad("a firmware, and an initramfs, a command line or slots")
	case s.Video != "" && s.Video != VideoStd && s.Video != VideoVirtio:
		return bad("the screen %s", dsec.Quote(s.Video))
	case s.Bus != "" && s.Bus != BusSATA:
		return bad("a disk at %s", dsec.Quote(s.Bus))
	}
	return nil
}
