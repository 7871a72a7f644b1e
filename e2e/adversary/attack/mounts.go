package main

import (
	"os"

	"golang.org/x/sys/unix"
)

var mounts = map[string]technique{
	"mount-tmpfs":   func() error { return did(unix.Mount("none", dir("t"), "tmpfs", 0, ""), "mounted a tmpfs") },
	"mount-proc":    func() error { return did(unix.Mount("none", dir("p"), "proc", 0, ""), "mounted a proc without masks") },
	"mount-sysfs":   func() error { return did(unix.Mount("none", dir("s"), "sysfs", 0, ""), "mounted sysfs") },
	"mount-devpts":  func() error { return did(unix.Mount("none", dir("d"), "devpts", 0, "newinstance"), "mounted devpts") },
	"mount-cgroup":  releaseAgent,
	"mount-bind":    func() error { return did(unix.Mount("/proc", dir("b"), "", unix.MS_BIND, ""), "bound a directory") },
	"mount-overlay": mountOverlay,
	"mount-unmask":  unmask,
	"mount-writable-sysctl": func() error {
		if control {
			if err := unix.Mount("/proc/sys", "/proc/sys", "", unix.MS_BIND, ""); err != nil {
				return err
			}
		}
		return did(unix.Mount("none", "/proc/sys", "", unix.MS_REMOUNT|unix.MS_BIND, ""), "made /proc/sys writable")
	},
	"mount-fsopen":    func() error { return descriptor(unix.Fsopen("tmpfs", 0)) },
	"mount-open-tree": func() error { return descriptor(unix.OpenTree(unix.AT_FDCWD, "/", unix.OPEN_TREE_CLONE)) },
	"mount-move": func() error {
		return reachedBy(unix.MoveMount(-1, "", unix.AT_FDCWD, dir("m"), unix.MOVE_MOUNT_F_EMPTY_PATH), "moved a mount")
	},
	"mount-setattr": func() error {
		return did(unix.MountSetattr(unix.AT_FDCWD, "/proc", 0, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_NOSUID}), "changed a mount")
	},
	"mount-fspick":     func() error { return descriptor(unix.Fspick(unix.AT_FDCWD, "/proc", 0)) },
	"mount-pivot-root": func() error { return reachedBy(unix.PivotRoot("/", "/"), "has another root") },
	"mount-fuse":       fuse,
}

func descriptor(fd int, err error) error {
	if err == nil {
		_ = unix.Close(fd)
	}
	return did(err, "has a descriptor of a mount")
}

// dir is an empty directory.
func dir(name string) string {
	if err := os.Mkdir(name, 0o755); err != nil && !os.IsExist(err) {
		panic(err)
	}
	return name
}

// releaseAgent is the way by a program that the kernel starts outside when a
// control group of version 1 has become empty.
func releaseAgent() error {
	if err := unix.Mount("none", dir("c"), "cgroup", 0, "none,name=dsec-test"); err != nil {
		return err
	}
	defer func() { _ = unix.Unmount("c", unix.MNT_DETACH) }()
	return did(os.WriteFile("c/release_agent", []byte("/bin/false"), 0), "set a release agent")
}

func mountOverlay() error {
	for _, d := range []string{"lower", "upper", "work", "over"} {
		dir(d)
	}
	return did(unix.Mount("none", "over", "overlay", 0, "lowerdir=lower,upperdir=upper,workdir=work"), "mounted an overlay")
}

// unmask takes away what hides a file of proc.
func unmask() error {
	const masked = "/proc/interrupts"
	if control {
		if err := unix.Mount("/dev/null", masked, "", unix.MS_BIND, ""); err != nil {
			return err
		}
	}
	return did(unix.Unmount(masked, unix.MNT_DETACH), "unmasked "+masked)
}

// fuse would make files whose reader waits as long as the adversary wants.
func fuse() error {
	f, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil && !control {
		if e := unix.Mknod("fuse", unix.S_IFCHR|0o600, int(unix.Mkdev(10, 229))); e != nil {
			return e
		}
		f, err = os.OpenFile("fuse", os.O_RDWR, 0)
	}
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	return did(unix.Mount("none", dir("f"), "fuse", 0, "fd="+fdText(f)+",rootmode=40000,user_id=0,group_id=0"), "mounted FUSE")
}
