// Package vmm is the contract of a virtual machine monitor: a program that runs
// one virtual machine, and is started, watched and ended here.
//
// Words: a Shape is what a machine looks like to its guest (kernel, memory,
// slots) and says nothing of one sandbox. Devices are what is behind the slots
// of one machine: files of layers, a disk, a tap. A template is a machine of a
// Shape that was booted once, stopped, and is kept; a clone is a machine that
// goes on where the template stopped, with its memory shared with the template
// until it writes. A snapshot is one machine, with all of its memory.
//
//	Start ─────────────▶ running ⇄ paused ──Snapshot──▶ directory ──Restore──▶ paused
//	BuildTemplate ──▶ Template ──Clone, or Prepare and Begin──▶ running         (the machine stays as it was)
//	                                    any ──Stop, Kill, its own end──▶ ended: Done is closed
//
// A machine that Start, Clone or Restore returned belongs to the caller, who ends it
// with Stop or Kill, also when its guest has ended. A call that
// returns an error leaves no process, file or descriptor. Every call ends by its
// context, and by a limit of the implementation's own when the context has none.
//
// A machine without a name (Devices.Name) ends with the process that started it, whatever ends that.
// One with a name outlives it, kill -9 included, if the implementation is an Adopter: it runs on, or
// stays paused, and the next process takes it over with Adopt. It ends with
// what keeps it instead: for QEMU that is dsec-hold.
//
// What a clone and a restored machine do not get by themselves: other random
// numbers than their siblings, the time, names and addresses. The guest has to
// be told of them over the channel before anything else runs. Nothing that its
// kernel had read from a slot before is forgotten either: a guest that scanned
// its disks in the template flushes the buffers of a block device (BLKFLSBUF)
// before it reads it. Such a guest is never waited for to power off: a
// virtio-pmem device has no state that survives, and its last flush may never
// come back. Stop does not ask the guest.
//
// # Other monitors
//
// QEMU is the only implementation. What another would do:
//
// Cloud Hypervisor: Start is its REST calls vm.create and vm.boot on a socket that
// it inherits; Pmem are --pmem file=…,discard_writes=on; a Balloon is --balloon size=0,free_page_reporting=on; Pause, Resume, Snapshot
// and Restore are vm.pause, vm.resume, vm.snapshot and --restore. Its snapshot has
// the memory in a file of its own, which a clone maps privately. The channel is
// virtio-vsock with a Unix socket here: Channel is the connection that the guest's
// port was reached at, after the line CONNECT <port> that the implementation says itself.
//
// Firecracker: the same with its API socket (PUT /machine-config, /boot-source,
// /drives, /actions; PATCH /vm; PUT /snapshot/create and /snapshot/load with a
// File memory backend, which maps privately), and the same vsock. A version
// without virtio-pmem answers a Shape with slots with Unsupported.
//
// Both drop connections over vsock when a snapshot is taken or restored:
// an implementation connects again before it returns, and a guest listens again.
// That is why Channel begins empty in every machine: nothing that
// was under way when a template or snapshot was taken is in it.
package vmm

import (
	"context"
	"net"
	"os"

	"github.com/opendsec/dsec"
)

// PmemAlign divides the size of every pmem slot and of the file behind it: a guest
// gets no device for one that it does not.
const PmemAlign = 2 << 20

// File is a file whose content is known.
type File struct {
	Path   string
	SHA256 string // hex; a file that has another is refused as Corrupt
}

// Shape is what a machine looks like to its guest.
type Shape struct {
	Kernel    File    // ELF, with an entry for PVH
	Initramfs File    // a cpio
	Append    string  // to the kernel's command line
	CPUs      int     // at least 1
	Memory    int64   // bytes, a multiple of 1 MiB
	Pmem      []int64 // sizes of the read-only slots in bytes, multiples of PmemAlign: /dev/pmem0, …
	Disk      int64   // size of the writable /dev/vda in bytes, a multiple of 512; 0: none
	Blocks    []int64 // sizes of read-only disks behind it in bytes, multiples of 512
	NIC       bool    // an interface, the same address in every machine

	// Balloon: the guest tells what of its memory is free, and the monitor gives that back to this machine.
	// No template has one: see BuildTemplate. A machine keeps it when it is restored.
	Balloon bool

	// Firmware: Kernel is a firmware instead (SeaBIOS, OVMF), which boots the disk. There is no initramfs,
	// no command line and no slot, and the machine may start itself anew. Desk machines are such.
	Firmware bool
	Video    string // with a firmware: a screen ("std" or "virtio"), a keyboard and a tablet; "": none
	Bus      string // with a firmware, of the disk: "" is virtio, "sata"
}

// Devices are what is behind the slots of a Shape for one machine.
type Devices struct {
	// Name is one that no other machine of the same directory has; then the machine outlives this
	// process. See CheckName. "": it does not. A VMM that is no Adopter answers Unsupported.
	Name string

	// Pmem are files by slot, exactly of its size, and complete: a read of a page
	// that is not there yet would be one of a process that cannot wait. "" is
	// an empty slot, which reads as zeros; slots at the end may be left out.
	Pmem []string

	// Blocks are files by place, of at most its size, that many machines may share. A read
	// may take its time and may fail, which is an error of that read in the guest; so is one
	// behind the end of the file. "" is an empty one, which reads as zeros; those at the end may
	// be left out.
	Blocks []string

	// Disk is a file of at most the Shape's size, which the machine takes the disk to have: what is
	// read or written behind the end of the file is an error of that in the guest. No two machines
	// share one: the second is refused as a Conflict.
	Disk string

	// Base is what a disk of a machine with a firmware holds where nothing was written, exactly of the
	// Shape's size, and never changed; Disk is a qcow2 file over it then, which names no other file.
	// The caller keeps it, and may close it when the machine was started.
	Base *os.File

	// Firmware is where that of the shape is; Restore needs it, Start does not.
	Firmware string

	// Tap is an open tap interface, or nil: the interface has no cable. The
	// caller keeps it, and closes it when the machine was started.
	Tap *os.File
}

// Caps are what a monitor can do on this machine.
type Caps struct {
	Version string // of the monitor, as it says it
	Accel   string // "kvm" or "tcg"
	NoKVM   string // why it is not kvm: "no KVM: …"
}

// Ready waits until a guest that boots may become a template: it talks with it
// over the channel, and returns when the guest waits for what only a clone is told.
// Everything the guest sends before that has to be read.
type Ready func(ctx context.Context, ch net.Conn) error

// Template names one that was built; any process can clone it that uses the
// same directory.
type Template struct {
	Key string
}

// VMM starts machines. Its methods may be called concurrently.
type VMM interface {
	// Probe tries what this machine can accelerate with a guest of this shape, and
	// what was found is used from then on. A machine without KVM is no error.
	Probe(ctx context.Context, s Shape, ready Ready) (Caps, error)

	// Start boots a machine. It returns when the guest's first instruction may
	// run, long before the guest says anything.
	Start(ctx context.Context, s Shape, d Devices) (VM, error)

	// BuildTemplate returns the template of a shape, and boots it if there is none. One with a
	// balloon is Unsupported: what a clone gave back would be taken from its template.
	BuildTemplate(ctx context.Context, s Shape, ready Ready) (Template, error)

	// Clone starts a machine where the template stopped.
	Clone(ctx context.Context, t Template, d Devices) (VM, error)

	// Prepare does what of a clone can be done before it is needed: it is Clone
	// up to where the machine begins.
	Prepare(ctx context.Context, t Template, d Devices) (Waiting, error)

	// Restore starts a machine from a snapshot, paused. The devices must be
	// what they were when it was taken.
	Restore(ctx context.Context, dir string, d Devices) (VM, error)
}

// Adopter is a VMM whose machines can outlive the process that started them.
type Adopter interface {
	// Names lists the machines with a name that were not ended, in order, whoever owns them; also those
	// that ended while nobody owned them.
	Names(ctx context.Context) ([]string, error)

	// Adopt takes over a machine whose owner has died, and returns it as its owner had it: running
	// or paused, with the same guest behind the channel. What the owner was in the middle of is
	// over: a Pause or Resume happened or not, and a Snapshot left no snapshot, and perhaps a
	// paused machine. So who adopts one calls Pause or Resume, as he wants it. What the guest
	// said and its owner did not read comes from the channel, which may begin in the middle of a
	// message: the protocol over it finds its place again.
	//
	// One with a living owner is a Conflict, in this process too; that of one that has just
	// died is waited for. One that ended in the meantime, or had not begun, is SandboxGone with the
	// reason; nothing of it is left then, and from then on its name is NotFound.
	Adopt(ctx context.Context, name string) (VM, error)

	// Leave gives up a machine with a name, which goes on as it is: another process may adopt
	// it, or this one again. Its Done is closed, and its Err nil. Nobody else may use it at that
	// time, and of one that has ended it does nothing.
	Leave(VM)
}

// Carrier is a VMM whose snapshots go on on other machines. What tells a machine apart is in what
// it says of a snapshot, and where that is written is the caller's business.
type Carrier interface {
	// OpenSnapshot opens a snapshot: what PlaceSnapshot wants to know of it, and its one file,
	// which the caller closes.
	OpenSnapshot(dir string) (about []byte, state *os.File, err error)

	// PlaceSnapshot makes a snapshot of what OpenSnapshot gave elsewhere, for a machine of this shape:
	// fill writes the file. Unsupported if the snapshot is of another monitor, kernel, processor or
	// shape, before fill is called; Corrupt if what it wrote is not what the snapshot was. After an
	// error there is none.
	PlaceSnapshot(ctx context.Context, dir string, about []byte, s Shape, fill func(*os.File) error) error
}

// Waiting is a clone that has not begun: a process, with the files of its devices. The
// caller ends it with one call of Begin or Drop.
type Waiting interface {
	// Begin makes a machine of it, and leaves nothing when it returns an error.
	Begin(ctx context.Context) (VM, error)

	// Drop ends it. After Begin it does nothing.
	Drop()
}

// VM is one machine. Its methods may be called concurrently, and of a machine that
// ended return an error of class SandboxGone at once.
type VM interface {
	// Channel is the connection to the guest's port, the same at each call.
	// It reads EOF when the machine has ended.
	Channel() net.Conn

	// Pause stops the guest's processors; of one that is paused it is no error.
	Pause(ctx context.Context) error

	// Resume lets them go on; of one that runs it is no error.
	Resume(ctx context.Context) error

	// Snapshot writes the machine to a directory, which must not be there, and
	// leaves it as it was, running or paused. The content of the disk is not in it:
	// who wants both pauses first, and copies the disk before Resume. Between two
	// snapshots of one machine it has to run, else the second is an IllegalState.
	Snapshot(ctx context.Context, dir string) error

	// Memory is what the monitor has of this machine's memory in bytes, what it shares
	// with others counted by its part (PSS).
	Memory() (int64, error)

	// Done is closed when the machine has ended, and nothing of it is left.
	Done() <-chan struct{}

	// Err is nil until then, and after Stop and Kill; otherwise it says why the
	// machine ended by itself.
	Err() error

	// Stop ends the machine without asking the guest; what it wrote to the disk,
	// and had flushed or not, is in the file when Stop returns.
	Stop(ctx context.Context) error

	// Kill ends the machine at once.
	Kill()
}

// CheckName says what is wrong with the name of a machine, as Invalid: it has 1 to 60 of
// [A-Za-z0-9_.-], and begins with no point.
func CheckName(name string) error {
	good := name != "" && len(name) <= 60 && name[0] != '.'
	for _, c := range []byte(name) {
		good = good && (c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '_' || c == '.' || c == '-')
	}
	if !good {
		return dsec.Errorf(dsec.Invalid, "check", "name of a virtual machine", "%s: 1 to 60 of letters, digits, _ . and -", dsec.Quote(name))
	}
	return nil
}

// Check says what is wrong with a shape, as Invalid.
func (s Shape) Check() error {
	const op, object = "check", "shape of a virtual machine"
	bad := func(format string, args ...any) error {
		return dsec.Errorf(dsec.Invalid, op, object, format, args...)
	}
	switch {
	case s.Firmware:
		if err := s.checkDesk(); err != nil {
			return err
		}
	case s.Kernel.Path == "" || s.Initramfs.Path == "":
		return bad("it has no kernel or no initramfs")
	case s.Video != "" || s.Bus != "":
		return bad("a screen or a bus of its disk, without a firmware")
	}
	switch {
	case s.CPUs < 1 || s.CPUs > 255:
		return bad("%d processors, from 1 to 255", s.CPUs)
	case s.Memory < 32<<20 || s.Memory > 1<<40 || s.Memory%(1<<20) != 0:
		return bad("%d bytes of memory: whole MiB, from 32 MiB to 1 TiB", s.Memory)
	case s.Disk < 0 || s.Disk > 1<<50 || s.Disk%512 != 0:
		return bad("a disk of %d bytes: whole sectors of 512, up to 1 PiB", s.Disk)
	case len(s.Pmem) > 32:
		return bad("%d pmem slots, at most 32", len(s.Pmem))
	case len(s.Blocks) > 32:
		return bad("%d read-only disks, at most 32", len(s.Blocks))
	case len(s.Append) > 1024:
		return bad("%d bytes for the kernel's command line, at most 1024", len(s.Append))
	}
	for _, c := range []byte(s.Append) {
		if c < ' ' || c > '~' {
			return bad("the byte %#x in the kernel's command line", c)
		}
	}
	for i, n := range s.Pmem {
		if n <= 0 || n > 1<<42 || n%PmemAlign != 0 {
			return bad("pmem slot %d has %d bytes: multiples of 2 MiB, up to 4 TiB", i, n)
		}
	}
	for i, n := range s.Blocks {
		if n <= 0 || n > 1<<50 || n%512 != 0 {
			return bad("read-only disk %d has %d bytes: whole sectors of 512, up to 1 PiB", i, n)
		}
	}
	return nil
}

// Check says whether devices fit a shape; files are looked at by who opens them.
func (d Devices) Check(s Shape) error {
	const op, object = "check", "devices of a virtual machine"
	switch {
	case len(d.Pmem) > len(s.Pmem):
		return dsec.Errorf(dsec.Invalid, op, object, "%d pmem files for %d slots", len(d.Pmem), len(s.Pmem))
	case len(d.Blocks) > len(s.Blocks):
		return dsec.Errorf(dsec.Invalid, op, object, "%d read-only files for %d disks", len(d.Blocks), len(s.Blocks))
	case (d.Disk != "") != (s.Disk > 0):
		return dsec.Errorf(dsec.Invalid, op, object, "a disk file and a disk of %d bytes in the shape: both or none", s.Disk)
	case (d.Base != nil) != s.Firmware:
		return dsec.Errorf(dsec.Invalid, op, object, "a base of the disk and a firmware: both or none")
	case d.Tap != nil && !s.NIC:
		return dsec.Errorf(dsec.Invalid, op, object, "a tap for a shape without an interface")
	case d.Name != "":
		return CheckName(d.Name)
	}
	return nil
}
