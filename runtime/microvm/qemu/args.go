package qemu

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/opendsec/dsec/runtime/microvm/vmm"
)

// Accelerators.
const (
	tcg = "tcg"
	kvm = "kvm"
)

// mac is the address of every guest's interface: it is a part of a template,
// and each interface is alone on its tap.
const mac = "02:64:73:65:63:01"

// firstSet is the number of the set that has the descriptor of the first read-only disk.
const firstSet = 16

// line is a command line as data. Numbers are descriptors that QEMU inherits; 0
// is none of a kind.
type line struct {
	accel string
	shape vmm.Shape

	qmp, agent int
	firmware   string
	kernel     int
	initramfs  int // 0: the machine begins with a state, and the kernel is never run
	ram        int // 0: memory of its own, behind no file
	shared     bool
	slots      []int // one for each of the shape's
	disk       int
	blocks     []int // one for each of the shape's
	base       int   // of a machine with a firmware: what its disk stands on
	incoming   bool  // of such a one: it begins with a state
	tap        int   // 0: an interface without a cable
	cable      int   // the end of a connection that stands for the tap
}

// args is the command line. Nothing in it is a path but the firmware's, so that
// the process needs no directory, and nothing of it was text of somebody else but
// the kernel's own command line, which is an argument of its own.
//
// A machine that begins with a state must have the same devices, in the same order
// and of the same sizes, as the one that it is of.
func (l line) args() []string {
	s := l.shape
	if s.Firmware {
		return l.deskArgs()
	}
	mib := s.Memory >> 20
	a := []string{
		"-name", "dsec-vm",
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
		"-M", "q35,memory-backend=ram,usb=off,vmport=off,smm=off,sata=off,smbus=off,dump-guest-core=off,mem-merge=off",
		"-bios", l.firmware,
		"-smp", strconv.Itoa(s.CPUs),
		"-m", memory(mib, s.Pmem),
		"-chardev", fmt.Sprintf("socket,id=qmp,fd=%d", l.qmp), "-mon", "chardev=qmp,mode=control",
		"-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console",
	}
	if l.accel == kvm {
		a = append(a, "-accel", "kvm", "-cpu", "host")
	} else {
		a = append(a, "-accel", "tcg,tb-size=64", "-cpu", "max")
	}
	if l.ram == 0 {
		a = append(a, "-object", fmt.Sprintf("memory-backend-ram,id=ram,size=%dM", mib))
	} else {
		a = append(a, "-object", fmt.Sprintf("memory-backend-file,id=ram,mem-path=%s,size=%dM,share=%s", fdPath(l.ram), mib, onOff(l.shared)))
	}
	for i, n := range s.Pmem {
		a = append(a, "-object", fmt.Sprintf("memory-backend-file,id=pm%d,mem-path=%s,size=%d,share=on,readonly=on", i, fdPath(l.slots[i]), n),
			"-device", fmt.Sprintf("virtio-pmem-pci,id=pmem%d,memdev=pm%d", i, i))
	}
	a = append(a, "-device", "virtio-serial-pci,id=serial,max_ports=2", "-chardev", fmt.Sprintf("socket,id=agent,fd=%d", l.agent),
		"-device", "virtserialport,chardev=agent,name=agent")
	if s.Disk > 0 {
		a = append(a, "-add-fd", fmt.Sprintf("fd=%d,set=1", l.disk),
			// What a guest wants to be safe from a loss of power is not kept that long anyway.
			"-blockdev", "driver=raw,node-name=disk,discard=unmap,cache.no-flush=on,file.driver=file,file.filename=/dev/fdset/1,file.discard=unmap",
			// A host without room is an error to the guest, and no reason to stop it.
			"-device", "virtio-blk-pci,id=disk0,drive=disk,werror=report,rerror=report")
	}
	for i := range s.Blocks {
		// A file of its own size: what the guest was told of may be larger, and is read as an error.
		a = append(a, "-add-fd", fmt.Sprintf("fd=%d,set=%d", l.blocks[i], firstSet+i),
			"-blockdev", fmt.Sprintf("driver=raw,node-name=block%d,read-only=on,file.driver=file,file.locking=off,file.read-only=on,file.filename=/dev/fdset/%d", i, firstSet+i),
			"-device", fmt.Sprintf("virtio-blk-pci,id=blk%d,drive=block%d,rerror=report", i, i))
	}
	if s.NIC {
		// Without a cable it is a connection that has ended. (A guest with a hub
		// that has no other port never gets through qboot.)
		back := fmt.Sprintf("socket,id=net,fd=%d", l.cable)
		if l.tap != 0 {
			back = fmt.Sprintf("tap,id=net,fd=%d", l.tap)
		}
		a = append(a, "-netdev", back, "-device", "virtio-net-pci,id=nic0,netdev=net,romfile=,mac="+mac)
	}
	a = append(a, l.balloon()...)
	a = append(a, "-kernel", fdPath(l.kernel))
	if l.initramfs == 0 {
		return append(a, "-incoming", "defer")
	}
	return append(a, "-initrd", fdPath(l.initramfs), "-append", cmdline(l.accel, s.Append))
}

// balloon is the device through which a guest reports free pages. Nobody blows it up.
func (l line) balloon() []string {
	if !l.shape.Balloon {
		return nil
	}
	return []string{"-device", "virtio-balloon-pci,id=balloon0,free-page-reporting=on"}
}

// memory leaves room for the slots, each at a place that may be a multiple of 1 GiB.
func memory(mib int64, slots []int64) string {
	if len(slots) == 0 {
		return fmt.Sprintf("%dM", mib)
	}
	room := int64(0)
	for _, n := range slots {
		room += (n+1<<30-1)>>30<<10 + 1<<10
	}
	return fmt.Sprintf("%dM,slots=%d,maxmem=%dM", mib, len(slots), mib+room)
}

// cmdline is what the kernel is told: no driver that is not there is looked for,
// no algorithm is tested, and it says what it dies of. Without KVM nobody
// can attack it by timing its caches, and what protects from that is left out.
func cmdline(accel, more string) string {
	c := "console=ttyS0 panic=-1 reboot=t quiet loglevel=1 cryptomgr.notests random.trust_cpu=on 8250.nr_uarts=1 i8042.noaux i8042.nokbd " +
		"i8042.dumbkbd audit=0 apparmor=0 selinux=0 swiotlb=noforce"
	if accel == tcg {
		c += " nokaslr mitigations=off tsc=reliable no_timer_check"
	}
	return strings.TrimSpace(c + " " + more)
}

func fdPath(fd int) string { return fmt.Sprintf("/proc/self/fd/%d", fd) }

func onOff(v bool) string {
	if v {
		return "on"
	}
	return "off"
}
