package main

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// kernelFiles are files of the kernel that show or change the whole machine.
func kernelFiles() map[string]technique {
	all := map[string]technique{
		"sysrq":           func() error { return write("/proc/sysrq-trigger", []byte("h")) }, // h prints help
		"core-pattern":    func() error { return writeBack("/proc/sys/kernel/core_pattern") },
		"modprobe-path":   func() error { return writeBack("/proc/sys/kernel/modprobe") },
		"sysctl-any":      anySysctl,
		"uevent-helper":   func() error { return writeBack("/sys/kernel/uevent_helper") },
		"release-agent":   func() error { return findWritable("/sys/fs/cgroup", "release_agent") },
		"notify-on-empty": func() error { return findWritable("/sys/fs/cgroup", "notify_on_release") },
		"cgroup-limits":   cgroupLimits,
		"binfmt-misc": func() error {
			return write("/proc/sys/fs/binfmt_misc/register", []byte(":dsec-test:M::x::/bin/false:"))
		},
		"debugfs":          func() error { return listHost("/sys/kernel/debug") },
		"tracefs":          func() error { return listHost("/sys/kernel/tracing") },
		"bpffs":            func() error { return listHost("/sys/fs/bpf") },
		"firmware":         func() error { return listHost("/sys/firmware") },
		"block-devices":    func() error { return listHost("/sys/block") },
		"recursive-reader": recursiveReader,
	}
	for _, name := range []string{"kcore", "kallsyms", "kpagecgroup", "kpagecount", "kpageflags", "kmsg", "timer_list", "vmallocinfo",
		"slabinfo", "keys", "key-users", "interrupts", "cmdline", "sched_debug", "latency_stats"} {
		all["proc-"+name] = func() error { return readKernel("/proc/" + name) }
	}
	return all
}

// readKernel wants bytes of it.
func readKernel(name string) error {
	fd, err := unix.Open(name, unix.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	n, err := unix.Read(fd, make([]byte, 4096))
	if err == nil && n == 0 {
		return blockedBy("empty: " + name)
	}
	return did(err, fmt.Sprintf("read %d bytes of %s", n, name))
}

func write(name string, b []byte) error {
	f, err := os.OpenFile(name, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if e := f.Close(); err == nil {
		err = e
	}
	if err == nil && !control && isNull(name) {
		return blockedBy("null device: " + name)
	}
	return did(err, "wrote to "+name)
}

// isNull says whether a name is the null device, which swallows.
func isNull(name string) bool {
	var st unix.Stat_t
	return unix.Stat(name, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == unix.Mkdev(1, 3)
}

// writeBack writes what is there already.
func writeBack(name string) error {
	now, err := os.ReadFile(name)
	if err != nil {
		return err
	}
	return write(name, now)
}

// anySysctl looks for one setting that it may write.
func anySysctl() error {
	if control {
		return writeBack("/proc/sys/vm/swappiness")
	}
	tried := 0
	var open string
	err := filepath.WalkDir("/proc/sys", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return nil // it cannot be read: the next
		}
		tried++
		if f, err := os.OpenFile(path, os.O_WRONLY, 0); err == nil {
			open = path
			_ = f.Close()
			return filepath.SkipAll
		}
		return nil
	})
	if err == nil && open == "" && tried > 100 {
		return blockedBy(fmt.Sprintf("none of %d settings opens for writing", tried))
	}
	return did(err, fmt.Sprintf("of %d settings %q opens for writing", tried, open))
}

// findWritable looks for a file of that name that opens for writing.
func findWritable(root, name string) error {
	if control {
		if root = os.Getenv("ATTACK_CGROUP"); root == "" {
			return untried("this machine has no control group of version 1")
		}
	}
	found := 0
	var open string
	_ = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.Name() != name {
			return nil
		}
		found++
		if f, err := os.OpenFile(path, os.O_WRONLY, 0); err == nil {
			open = path
			_ = f.Close()
			return filepath.SkipAll
		}
		return nil
	})
	if open == "" {
		return blockedBy(fmt.Sprintf("%d files %s, none opens for writing", found, name))
	}
	return worked(open + " opens for writing")
}

// cgroupLimits raises one's own limits.
func cgroupLimits() error {
	if control {
		return writeBack(filepath.Join(os.Getenv("ATTACK_CGROUP"), "cgroup.clone_children"))
	}
	for _, name := range []string{"memory.max", "memory.limit_in_bytes", "memory/memory.limit_in_bytes", "pids.max", "pids/pids.max", "cpu.max",
		"cpu/cpu.cfs_quota_us", "cgroup.procs", "memory/cgroup.procs"} {
		fd, err := unix.Open(filepath.Join("/sys/fs/cgroup", name), unix.O_WRONLY, 0)
		if err != nil {
			continue
		}
		var st unix.Statfs_t
		kernels := unix.Fstatfs(fd, &st) == nil && (st.Type == unix.CGROUP_SUPER_MAGIC || st.Type == unix.CGROUP2_SUPER_MAGIC)
		_ = unix.Close(fd)
		if kernels {
			return worked(name + " opens for writing")
		}
	}
	return blockedBy("no limit of the kernel is below /sys/fs/cgroup")
}

// listHost wants entries of a directory that are the machine's.
func listHost(name string) error {
	all, err := os.ReadDir(name)
	if err == nil && len(all) == 0 {
		return blockedBy("empty: " + name)
	}
	return did(err, fmt.Sprintf("sees %d entries of %s", len(all), name))
}

// recursiveReader reads everything below /proc and /sys a little, as a recursive
// grep over the root does: that crashed a machine once. It is stopped from
// nothing; what counts is that everybody lives.
func recursiveReader() error {
	read := 0
	for _, root := range []string{"/proc", "/sys"} {
		_ = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || strings.HasPrefix(path, "/proc/self/task") {
				return nil
			}
			if fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK, 0); err == nil {
				if n, err := unix.Read(fd, make([]byte, 512)); err == nil && n > 0 {
					read++
				}
				_ = unix.Close(fd)
			}
			return nil
		})
	}
	return blockedBy(fmt.Sprintf("read %d files, and lives", read))
}
