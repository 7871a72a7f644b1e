package qemu

import (
	"fmt"
	"strconv"

	"github.com/opendsec/dsec/runtime/microvm/vmm"
)

// deskPort is the name of the channel's port in a machine that has an init of its own.
const deskPort = "org.dsec.agent"

// deskArgs is the command line of a machine with a firmware: what a system of any kind finds
// drivers for. The disk is a qcow2 file over a raw one; both are descriptors, so that what is in the head of a
// file leads nowhere.
func (l line) deskArgs() []string {
	s := l.shape
	sata := s.Bus == vmm.BusSATA
	a := []string{
		"-name", "dsec-vm",
		"-nodefaults", "-no-user-config", "-display", "none",
		"-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
		"-M", fmt.Sprintf("q35,memory-backend=ram,usb=off,vmport=off,smm=off,sata=%s,smbus=off,dump-guest-core=off,mem-merge=off", onOff(sata)),
		"-global", "ICH9-LPC.disable_s3=1", "-global", "ICH9-LPC.disable_s4=1",
		"-bios", fdPath(l.kernel),
		"-smp", strconv.Itoa(s.CPUs),
		"-m", memory(s.Memory>>20, nil),
		"-object", fmt.Sprintf("memory-backend-ram,id=ram,size=%dM", s.Memory>>20),
		"-chardev", fmt.Sprintf("socket,id=qmp,fd=%d", l.qmp), "-mon", "chardev=qmp,mode=control",
		"-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console",
	}
	if l.accel == kvm {
		a = append(a, "-accel", "kvm", "-cpu", "host")
	} else {
		a = append(a, "-accel", "tcg,tb-size=128", "-cpu", "max")
	}
	a = append(a, "-device", "virtio-serial-pci,id=serial,max_ports=2", "-chardev", fmt.Sprintf("socket,id=agent,fd=%d", l.agent),
		// QEMU says of a port with an id when what had it open in the guest has gone.
		"-device", "virtserialport,id=port,chardev=agent,name="+deskPort)
	// What cannot be written stops the machine: an error that its file system does not expect costs more.
	disk := "virtio-blk-pci,id=disk0,drive=disk,bootindex=0,werror=stop"
	if sata {
		disk = "ide-hd,id=disk0,drive=disk,bus=ide.0,bootindex=0,werror=stop"
	}
	// What a guest gives back is used again within the file, and not given back by it: see RATIONALE, the disk of a microVM.
	a = append(a, "-add-fd", fmt.Sprintf("fd=%d,set=1", l.disk), "-add-fd", fmt.Sprintf("fd=%d,set=2", l.base),
		"-blockdev", "driver=raw,node-name=base,read-only=on,file.driver=file,file.filename=/dev/fdset/2,file.locking=off",
		"-blockdev", "driver=qcow2,node-name=disk,backing=base,discard=unmap,file.driver=file,file.filename=/dev/fdset/1,file.discard=ignore,file.locking=off",
		"-device", disk)
	switch s.Video {
	case vmm.VideoStd:
		a = append(a, "-device", "VGA,id=video,vgamem_mb=16")
	case vmm.VideoVirtio:
		a = append(a, "-device", "virtio-vga,id=video")
	}
	if s.Video != "" {
		a = append(a, "-device", "qemu-xhci,id=usb", "-device", "usb-tablet,bus=usb.0", "-device", "usb-kbd,bus=usb.0")
	}
	if s.NIC {
		back := fmt.Sprintf("socket,id=net,fd=%d", l.cable)
		if l.tap != 0 {
			back = fmt.Sprintf("tap,id=net,fd=%d", l.tap)
		}
		a = append(a, "-netdev", back, "-device", "virtio-net-pci,id=nic0,netdev=net,romfile=,mac="+mac)
	}
	a = append(a, l.balloon()...)
	if l.incoming {
		a = append(a, "-incoming", "defer")
	}
	return a
}
