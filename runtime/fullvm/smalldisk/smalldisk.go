// Package smalldisk makes a disk for tests of whole machines: a system that boots in seconds where nothing but
// emulation is to be had, with a BIOS and with UEFI. It is the pinned kernel, GRUB, Debian's busybox and the guest agent as a
// service that is started again when it has ended.
package smalldisk

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/e2e/vm"
	"github.com/opendsec/dsec/internal/debian"
	"github.com/opendsec/dsec/internal/embedded"
	"github.com/opendsec/dsec/runtime/microvm/boot"
	"github.com/opendsec/dsec/runtime/runtimetest/layertest"
)

// Least is the smallest root, in MiB. About 10 of them are free.
const Least = 33

const (
	esp  = 4 // MiB, what UEFI reads
	uuid = "64736563-6469-736b-8000-000000000002"
)

// modules are what the kernel, which has no driver of SATA, needs to find its disk and the agent's port.
var modules = []string{"virtio_pci", "virtio_blk", "virtio_console", "ext4"}

var (
	//go:embed disk.sh
	diskScript string
	//go:embed init.sh
	initScript []byte
	//go:embed initramfs.sh
	initramfsScript []byte
)

// Make makes the file "disk" in a directory, and returns its size. cache is that of kernels; room is how large the root is, in MiB.
func Make(ctx context.Context, cache, dir string, room int) (size int64, err error) {
	const op = "make small disk"
	if room < Least {
		return 0, dsec.Errorf(dsec.Invalid, op, dir, "a root of %d MiB, want at least %d", room, Least)
	}
	size, err = build(ctx, cache, dir, room)
	if err != nil {
		return 0, dsec.E(dsec.Internal, op, dir, err)
	}
	return size, nil
}

func build(ctx context.Context, cache, dir string, room int) (int64, error) {
	root := filepath.Join(dir, "root")
	if err := os.Mkdir(root, 0o755); err != nil {
		return 0, err
	}
	if err := errors.Join(layertest.Busybox(root), system(root), kernel(ctx, cache, filepath.Join(root, "boot"))); err != nil {
		return 0, err
	}
	cfg := fmt.Sprintf("search.fs_uuid %s root\nlinux /boot/vmlinuz quiet loglevel=4 console=ttyS0 mitigations=off random.trust_cpu=on cryptomgr.notests audit=0 apparmor=0 selinux=0 "+
		"nokaslr tsc=reliable no_timer_check panic=-1\ninitrd /boot/initrd\nboot\n", uuid)
	if err := os.WriteFile(filepath.Join(dir, "grub.cfg"), []byte(cfg), 0o644); err != nil {
		return 0, err
	}
	script := exec.CommandContext(ctx, "sh", "-eu", "-c", diskScript, "disk.sh", dir, uuid, fmt.Sprint(esp), fmt.Sprint(room))
	if out, err := script.CombinedOutput(); err != nil {
		return 0, fmt.Errorf("disk.sh: %w\n%s", err, out)
	}
	return int64(1+esp+room+1) << 20, os.RemoveAll(root)
}

// system is what the root has besides busybox.
func system(root string) error {
	agent, err := embedded.Guest()
	if err != nil {
		return err
	}
	for _, d := range []string{"dev", "run", "sbin", "usr/sbin", "boot"} {
		err = errors.Join(err, os.MkdirAll(filepath.Join(root, d), 0o755))
	}
	for _, a := range []string{"basename", "dirname", "ip", "wc"} {
		if l := filepath.Join(root, "bin", a); os.Symlink("busybox", l) != nil {
			_, serr := os.Lstat(l) // it was there
			err = errors.Join(err, serr)
		}
	}
	return errors.Join(err, os.WriteFile(filepath.Join(root, "usr/sbin/dsec-guest"), agent, 0o755), os.WriteFile(filepath.Join(root, "sbin/init"), initScript, 0o755))
}

// kernel is the pinned kernel as a boot loader takes it, and an initramfs that finds the root.
func kernel(ctx context.Context, cache, dir string) error {
	k, err := vm.Fetch(ctx, cache) // the package of the kernel comes through the machine's apt
	if err != nil {
		return err
	}
	k.Close()
	busybox, err := os.ReadFile("/bin/busybox")
	if err != nil {
		return err
	}
	built, err := boot.Build(ctx, boot.Config{Cache: cache, Init: initramfsScript, Modules: modules, Files: []boot.File{{Name: "bin/busybox", Mode: 0o755, Content: busybox}}})
	if err != nil {
		return err
	}
	initrd, err := os.ReadFile(built.Initramfs)
	if err != nil {
		return err
	}
	deb, err := (debian.Cache{Dir: cache}).Path(built.Lock.Deb)
	if err != nil {
		return err
	}
	unpack := exec.CommandContext(ctx, "sh", "-c", `dpkg-deb --fsys-tarfile "$0" | tar -xOf - "./boot/vmlinuz-$1" >"$2"`, deb, built.Release, filepath.Join(dir, "vmlinuz"))
	if out, err := unpack.CombinedOutput(); err != nil {
		return fmt.Errorf("unpack the kernel of %s: %w\n%s", built.Lock.Package, err, out)
	}
	return os.WriteFile(filepath.Join(dir, "initrd"), initrd, 0o644)
}
