package main

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"
)

var devices = map[string]technique{
	"mknod-disk": func() error {
		return node("disk", unix.S_IFBLK, uint32(number("ATTACK_DISK_MAJOR")), uint32(number("ATTACK_DISK_MINOR")))
	},
	"mknod-memory":   func() error { return node("mem", unix.S_IFCHR, 1, 1) },
	"mknod-kmsg":     func() error { return node("kmsg", unix.S_IFCHR, 1, 11) },
	"mknod-tun":      func() error { return node("tun", unix.S_IFCHR, 10, 200) },
	"mknod-loop":     func() error { return node("loop", unix.S_IFCHR, 10, 237) },
	"mknod-in-tmpfs": func() error { return node("/dev/shm/kmsg", unix.S_IFCHR, 1, 11) },
	"mknod-whiteout": whiteout,
	"layer-disk":     func() error { return openNode("/evil/disk") },
	"layer-kmsg":     func() error { return openNode("/evil/kmsg") },
	"layer-null":     func() error { return openNode("/evil/null") },
	"dev-unexpected": unexpected,
	"dev-disk-ioctl": controlOfDevices,
}

// node makes one, and opens it.
func node(name string, kind, major, minor uint32) error {
	_ = os.Remove(name) // of a try before
	if err := unix.Mknod(name, kind|0o600, int(unix.Mkdev(major, minor))); err != nil {
		return err
	}
	return openNode(name)
}

func openNode(name string) error {
	if control && filepath.Dir(name) == "/evil" {
		name = os.Getenv("ATTACK_EVIL") + name
	}
	fd, err := unix.Open(name, unix.O_RDONLY|unix.O_NONBLOCK, 0)
	if err == nil {
		_ = unix.Close(fd)
	}
	return did(err, "opened the device "+name)
}

// whiteout would delete a file of a layer behind overlayfs.
func whiteout() error {
	_ = os.Remove("whiteout")
	return did(unix.Mknod("whiteout", unix.S_IFCHR|0o600, 0), "made a whiteout")
}

// unexpected looks for a device in /dev that a sandbox has no need of.
func unexpected() error {
	harmless := []string{"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/ptmx", "/dev/pts/ptmx", "/dev/console"}
	var bad []string
	_ = filepath.WalkDir("/dev", func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type()&fs.ModeDevice != 0 && filepath.Dir(path) != "/dev/pts" && !slices.Contains(harmless, path) {
			bad = append(bad, path)
		}
		return nil
	})
	if len(bad) > 0 {
		return worked(fmt.Sprintf("there are %q", bad[:min(len(bad), 8)]))
	}
	return blockedBy("no device beside the harmless ones")
}

// controlOfDevices reprograms the random number generator, which is of all.
func controlOfDevices() error {
	fd, err := unix.Open("/dev/urandom", unix.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	_, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.RNDADDTOENTCNT, at(0))
	if e != 0 {
		return os.NewSyscallError("ioctl RNDADDTOENTCNT", e)
	}
	return worked("credited entropy")
}
