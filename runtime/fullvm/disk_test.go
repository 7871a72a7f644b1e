package fullvm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec/e2e/vm"
	"github.com/opendsec/dsec/internal/debian"
	"github.com/opendsec/dsec/internal/diskimage"
	"github.com/opendsec/dsec/internal/embedded"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/microvm/boot"
	"github.com/opendsec/dsec/runtime/runtimetest/layertest"
)

// The small disk is a system that boots in seconds where nothing but emulation is to be had: the pinned kernel,
// busybox and the guest agent as a service. It boots with a BIOS and with UEFI.
//
// It has about 10 MiB free, less than a sandbox of the conformance suite may write, so that it is its own
// file system that says that it is full.
const (
	smallESP  = 4 // MiB
	smallRoot = 33
	smallUUID = "64736563-6469-736b-8000-000000000002"
)

// smallModules are what the kernel, which has no driver of SATA, needs to find its disk and the agent's port.
var smallModules = []string{"virtio_pci", "virtio_blk", "virtio_console", "ext4"}

// long is for the full lengths.
var long = os.Getenv("DSEC_LONG") != ""

// modest is what the small disk needs.
func modest(r *runtime.Request) {
	r.Spec.Limits.CPU, r.Spec.Limits.Memory, r.Spec.Limits.Disk = 1, 128<<20, 64<<20
}

var smallDisk struct {
	sync.Once
	dir  string
	size int64
	err  error
}

// smallImage is the disk, made once.
func smallImage(t testing.TB) (name string, size int64) {
	t.Helper()
	smallDisk.Do(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
		defer cancel()
		if smallDisk.dir, smallDisk.err = os.MkdirTemp("", "dsec-fullvm-small-"); smallDisk.err == nil {
			smallDisk.size, smallDisk.err = makeSmallDisk(ctx, smallDisk.dir)
		}
	})
	if smallDisk.err != nil {
		t.Fatal(smallDisk.err)
	}
	return filepath.Join(smallDisk.dir, "disk"), smallDisk.size
}

// smallLayer is a layer of it.
func smallLayer(t testing.TB, change ...func(*diskimage.Manifest)) layer.Local {
	t.Helper()
	name, size := smallImage(t)
	f, err := os.Open(name)
	must(t, err)
	defer f.Close()
	m := diskimage.New(size)
	m.Agent = true
	for _, c := range change {
		c(&m)
	}
	return buildLayer(t, t.TempDir(), m, diskimage.Source{Size: size, Reader: f})
}

func makeSmallDisk(ctx context.Context, dir string) (int64, error) {
	root := filepath.Join(dir, "root")
	if err := os.Mkdir(root, 0o755); err != nil {
		return 0, err
	}
	if err := errors.Join(layertest.Busybox(root), smallSystem(root), smallKernel(ctx, filepath.Join(root, "boot"))); err != nil {
		return 0, err
	}
	cfg := fmt.Sprintf("search.fs_uuid %s root\nlinux /boot/vmlinuz quiet loglevel=4 console=ttyS0 mitigations=off random.trust_cpu=on cryptomgr.notests audit=0 apparmor=0 selinux=0 "+
		"nokaslr tsc=reliable no_timer_check panic=-1\ninitrd /boot/initrd\nboot\n", smallUUID)
	if err := os.WriteFile(filepath.Join(dir, "grub.cfg"), []byte(cfg), 0o644); err != nil {
		return 0, err
	}
	script := exec.CommandContext(ctx, "sh", "-eu", "testdata/disk.sh", dir, smallUUID, fmt.Sprint(smallESP), fmt.Sprint(smallRoot))
	if out, err := script.CombinedOutput(); err != nil {
		return 0, fmt.Errorf("testdata/disk.sh: %w\n%s", err, out)
	}
	return (1 + smallESP + smallRoot + 1) << 20, os.RemoveAll(root)
}

// smallSystem is what the root has besides busybox.
func smallSystem(root string) error {
	agent, err := embedded.Guest()
	if err != nil {
		return err
	}
	init, err := os.ReadFile("testdata/init.sh")
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
	return errors.Join(err, os.WriteFile(filepath.Join(root, "usr/sbin/dsec-guest"), agent, 0o755), os.WriteFile(filepath.Join(root, "sbin/init"), init, 0o755))
}

// smallKernel is the pinned kernel as a boot loader takes it, and an initramfs that finds the root.
func smallKernel(ctx context.Context, dir string) error {
	cache, err := filepath.Abs("../../.cache/vm")
	if err != nil {
		return err
	}
	k, err := vm.Fetch(ctx, cache) // the package of the kernel comes through the machine's apt
	if err != nil {
		return err
	}
	k.Close()
	busybox, err := os.ReadFile("/bin/busybox")
	if err != nil {
		return err
	}
	init, err := os.ReadFile("testdata/initramfs.sh")
	if err != nil {
		return err
	}
	built, err := boot.Build(ctx, boot.Config{Cache: cache, Init: init, Modules: smallModules, Files: []boot.File{{Name: "bin/busybox", Mode: 0o755, Content: busybox}}})
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
