// Package qemu runs virtual machines with QEMU: q35 with the firmware qboot, an
// uncompressed kernel entered through PVH, with KVM where that was seen to boot
// this very kernel, else emulated. It is the vmm.VMM that every machine can have.
//
// A QEMU runs as a user of its own, which no other QEMU is at that time, without
// capabilities, under its own seccomp filter, which starts no programs, in the namespaces that its Spawner puts it in.
// Everything that it uses is a descriptor which it inherits: kernel, memory of
// a template, layers, disk, tap, the two connections. It needs no directory, makes
// no file, and listens on nothing. Files that it maps (kernel, initramfs, layers) it
// opens again by the descriptor, so its user must be able to read them by their mode,
// but needs no way to them.
//
// Templates are in the directory of the Config (docs/formats/vmtemplate.md):
//
//	<key>/       ram, state, manifest.json
//	kvm.json     what the last probes of KVM found
//	tmp-*        being made or removed; removed by the next who builds
//	lock         held with flock(2) by who builds
//	machines/    a record of each machine with a name (docs/formats/vmrecord.md), locked by its owner
//
// With a Keep, a machine with a name outlives this process: dsec-hold is the parent of its QEMU and has
// a duplicate of our end of its QMP, its channel and its output, so that QEMU notices nothing when its
// owner dies. Nobody reads then: what the guest says waits in the sockets. The next owner begins
// in the middle of QMP: it has numbers of its own, passes over what is for others, and asks for the
// state. A user is taken as long as there is a record with it.
//
// The memory of a template that is cloned is in a sealed file in memory, one for
// all clones of this Driver, read and compared with its digest when the first clone
// is made. No QEMU can write it, whatever becomes of that QEMU, and a balloon in a
// guest punches no holes in it; there is none all the same. Of templates only those used last are
// kept, fewer in memory than on disk; a directory may be removed at any time.
package qemu

import (
	"bytes"
	"cmp"
	"context"
	"os"
	"os/exec"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/fault"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
)

// Config is how to run QEMU. Zero values stand for what is in parentheses.
type Config struct {
	Path     string  // the program (qemu-system-x86_64, found in PATH)
	Firmware string  // (/usr/share/qemu/qboot.rom)
	Dir      string  // for templates, made if it is not there
	UID      uint32  // the first of the users, and of the groups of the same numbers, that QEMUs run as; 0 only if this process is not root
	UIDs     int     // how many there are, and so how many QEMUs (4096)
	Spawn    Spawner // of machines that end with this process (Direct)
	Keep     *Keep   // of machines with a name, which do not (there are none)
	NoKVM    bool    // never try it

	InMemory int // templates whose memory is kept to be cloned; those that clones share beside (16)
	OnDisk   int // templates that are kept to be opened (64)
}

// Driver is a vmm.VMM.
type Driver struct {
	cfg     Config
	version string

	probeTime time.Duration // for a guest with KVM

	mu        sync.Mutex
	users     map[uint32]bool     // those that a QEMU runs as
	accel     map[string]vmm.Caps // by digest of the kernel: what a probe found
	templates map[string]*opened  // by key
	closed    bool
}

var _ vmm.VMM = (*Driver)(nil)

// New looks at the installed QEMU. Close gives back what the driver keeps.
func New(ctx context.Context, cfg Config) (*Driver, error) {
	const op = "find QEMU"
	if cfg.Path == "" {
		p, err := exec.LookPath("qemu-system-x86_64")
		if err != nil {
			return nil, dsec.Errorf(dsec.Unsupported, op, "qemu-system-x86_64", "%w (package qemu-system-x86)", err)
		}
		cfg.Path = p
	}
	if cfg.Firmware == "" {
		cfg.Firmware = "/usr/share/qemu/qboot.rom"
	}
	if _, err := os.Stat(cfg.Firmware); err != nil {
		return nil, dsec.Errorf(dsec.Unsupported, op, cfg.Firmware, "%w (package qemu-system-data)", cause(err))
	}
	if strings.Contains(cfg.Firmware, ",") || cfg.Dir == "" {
		return nil, dsec.Errorf(dsec.Invalid, op, cfg.Firmware, "no directory for templates, or a comma in the path of the firmware")
	}
	if os.Geteuid() == 0 && cfg.UID == 0 {
		return nil, dsec.Errorf(dsec.Invalid, op, cfg.Path, "it is to run as root")
	}
	if cfg.UIDs == 0 {
		cfg.UIDs = 4096
	}
	cfg.InMemory, cfg.OnDisk = cmp.Or(cfg.InMemory, 16), cmp.Or(cfg.OnDisk, 64)
	if cfg.Spawn == nil {
		cfg.Spawn = Direct(nil)
	}
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, dsec.E(fault.Class(err, dsec.Internal), "make directory", cfg.Dir, cause(err))
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, cfg.Path, "--version").Output()
	if err != nil {
		return nil, dsec.E(dsec.Unsupported, op, cfg.Path, err)
	}
	first, _, _ := bytes.Cut(out, []byte("\n"))
	version := strings.TrimSpace(string(first))
	if !strings.Contains(version, "QEMU") || len(version) > 200 {
		return nil, dsec.Errorf(dsec.Unsupported, op, cfg.Path, "it says its version is %s", dsec.Quote(version))
	}
	d := &Driver{cfg: cfg, version: version, probeTime: kvmTime, users: map[uint32]bool{}, accel: map[string]vmm.Caps{}, templates: map[string]*opened{}}
	if cfg.Keep != nil {
		if err := d.reserve(ctx); err != nil {
			return nil, err
		}
	}
	return d, nil
}

// Close gives back the memory of templates that no machine shares. Machines go on.
func (d *Driver) Close() {
	d.mu.Lock()
	d.closed = true
	d.mu.Unlock()
	for _, o := range d.templates { // nobody adds to them any more
		o.mu.Lock()
		d.close(o)
		o.mu.Unlock()
	}
}

// accelOf is what a probe found for a kernel; without one it is not KVM.
func (d *Driver) accelOf(kernel string) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	if c, ok := d.accel[kernel]; ok {
		return c.Accel
	}
	return tcg
}

// user takes a user for one QEMU: two of one user could kill and read each other.
func (d *Driver) user() (uid uint32, free func(), err error) {
	if os.Geteuid() != 0 {
		return uint32(os.Geteuid()), func() {}, nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := range d.cfg.UIDs {
		uid := d.cfg.UID + uint32(i)
		if d.users[uid] {
			continue
		}
		d.users[uid] = true
		return uid, func() {
			d.mu.Lock()
			defer d.mu.Unlock()
			delete(d.users, uid)
		}, nil
	}
	return 0, nil, dsec.Errorf(dsec.ResourceExhausted, "start", "virtual machine", "there are %d already, and no more users for them", d.cfg.UIDs)
}

// groups are those that the accelerator's device needs.
func (d *Driver) groups(accel string) []uint32 {
	var st unix.Stat_t
	if accel != kvm || unix.Stat(kvmDevice, &st) != nil || st.Gid == 0 {
		return nil
	}
	return []uint32{st.Gid}
}
