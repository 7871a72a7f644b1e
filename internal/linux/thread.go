package linux

import (
	"errors"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// OnThread runs f on an OS thread of its own, which ends with it: f may move
// that thread into namespaces and need not move back. It returns when f has.
func OnThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		// The main thread never ends, and /proc/self shows what it sees: while it is
		// locked here, another one is used.
		if unix.Gettid() == unix.Getpid() {
			done <- OnThread(f)
			runtime.UnlockOSThread()
			return
		}
		done <- f() // still locked, so the thread ends with the goroutine
	}()
	return <-done
}

// JoinNS moves the calling thread into a namespace of the given kind
// (unix.CLONE_NEW*); only inside OnThread. Joining a mount namespace first
// gives the thread a root and working directory of its own.
func JoinNS(ns *os.File, kind int) error {
	if kind == unix.CLONE_NEWNS {
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			return os.NewSyscallError("unshare fs", err)
		}
	}
	if err := retry(func() error { return unix.Setns(int(ns.Fd()), kind) }); err != nil {
		return &os.PathError{Op: "join namespace", Path: ns.Name(), Err: err}
	}
	return nil
}

// NewMountNS makes a private mount namespace that holds nothing but an empty
// tmpfs as its root and returns its descriptor; it lives while that is open.
func NewMountNS() (ns *os.File, err error) {
	err = OnThread(func() error {
		if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
			return os.NewSyscallError("unshare mount namespace", err)
		}
		if ns, err = os.Open("/proc/thread-self/ns/mnt"); err != nil {
			return err
		}
		return emptyRoot()
	})
	if err != nil && ns != nil {
		ns.Close()
		return nil, err
	}
	return ns, err
}

// emptyRoot replaces everything the calling thread's mount namespace shows by
// an empty tmpfs.
func emptyRoot() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return os.NewSyscallError("make mounts private", err)
	}
	root, err := NewFS("tmpfs").String("mode", "0700").String("size", "1m").
		Mount(unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC | unix.MOUNT_ATTR_NOSUID)
	if err != nil {
		return err
	}
	defer root.Close()
	if err := Move(root, nil, "/"); err != nil {
		return err
	}
	if err := unix.Fchdir(int(root.Fd())); err != nil {
		return os.NewSyscallError("enter new root", err)
	}
	// Stacking the old root below the new one and detaching it leaves one mount.
	// The root of an initramfs cannot be pivoted away; there it stays underneath.
	err = unix.PivotRoot(".", ".")
	if errors.Is(err, unix.EINVAL) {
		return os.NewSyscallError("change root", unix.Chroot("."))
	}
	if err != nil {
		return os.NewSyscallError("pivot root", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return os.NewSyscallError("detach old root", err)
	}
	return os.NewSyscallError("change directory", unix.Chdir("/"))
}
