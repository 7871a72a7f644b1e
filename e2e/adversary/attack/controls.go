package main

import (
	"os"

	"golang.org/x/sys/unix"
)

// controls are ioctls by which a file system, its blocks or its quotas are changed
// behind the files. One of them (XFS_IOC_SWAPEXT) has ended a file system that
// thousands of sandboxes shared.
func controls() map[string]technique {
	all := map[string]technique{}
	for name, nr := range map[string]uint64{
		"ioctl-xfs-swap-extents":   0xc0c0586d,
		"ioctl-xfs-exchange-range": 0x40285881,
		"ioctl-xfs-shutdown":       0x8004587d,
		"ioctl-ext4-move-extents":  0xc028660f,
		"ioctl-ext4-swap-boot":     0x6611,
		"ioctl-immutable":          0x40086602,
		"ioctl-project-quota":      0x401c5820,
		"ioctl-freeze":             0xc0045877,
		"ioctl-thaw":               0xc0045878,
		"ioctl-trim":               0xc0185879,
		"ioctl-dedupe":             0xc0189436,
		"ioctl-btrfs-subvolume":    0x5000940e,
		"ioctl-btrfs-destroy":      0x5000940f,
		"ioctl-btrfs-quota":        0x8030942b,
		"ioctl-btrfs-quota-off":    0xc0109428,
		"ioctl-btrfs-tree-search":  0xd0009411,
		"ioctl-btrfs-logical":      0xc0389424,
		"ioctl-verity":             0x40806685,
		"ioctl-encryption-key":     0xc0506617,
		"ioctl-f2fs":               0xf501,
		"ioctl-high-bits":          0xdeadbeef_c0c0586d,
	} {
		all[name] = func() error {
			_, _, e := unix.RawSyscall(unix.SYS_IOCTL, ownFile(), uintptr(nr), at(0x10))
			return reached("ioctl", e)
		}
	}
	all["ioctl-generation"] = func() error { return onRoot("FS_IOC_SETVERSION", 0x40087602) }
	all["ioctl-fibmap"] = func() error { return onRoot("FIBMAP", 1) }
	return all
}

// onRoot is for ioctls that only the file system itself refuses.
func onRoot(name string, nr uintptr) error {
	_, _, e := unix.RawSyscall(unix.SYS_IOCTL, ownFile(), nr, at(1))
	if e != 0 {
		return os.NewSyscallError("ioctl "+name, e)
	}
	return worked(name + " succeeds")
}
