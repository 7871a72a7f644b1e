package main

import (
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// What processes do to others, and to their own rights.
var processes = map[string]technique{
	"ptrace-first":      func() error { return did(unix.PtraceAttach(victim()), "traces another process") },
	"ptrace-seize":      func() error { return did(unix.PtraceSeize(victim()), "traces another process") },
	"read-memory-first": readMemory,
	"process-vm-read": func() error {
		b := make([]byte, 1)
		n, err := unix.ProcessVMReadv(victim(), []unix.Iovec{{Base: &b[0], Len: 1}}, []unix.RemoteIovec{{Base: uintptr(unsafe.Pointer(&b[0])), Len: 1}}, 0)
		return reachedBy(err, fmt.Sprint("read ", n, " bytes of another process"))
	},
	"process-vm-write": func() error {
		b := make([]byte, 1)
		_, err := unix.ProcessVMWritev(victim(), []unix.Iovec{{Base: &b[0], Len: 1}}, []unix.RemoteIovec{{Base: uintptr(unsafe.Pointer(&b[0])), Len: 1}}, 0)
		return reachedBy(err, "may write the memory of another process")
	},
	"pidfd-getfd": func() error {
		p, err := unix.PidfdOpen(victim(), 0)
		if err != nil {
			return err
		}
		_, err = unix.PidfdGetfd(p, 0, 0)
		return did(err, "has a descriptor of another process")
	},
	"environ-first":     func() error { return readAny("environ") },
	"descriptors-first": func() error { return listAny("fd") },
	"root-of-first":     func() error { return listAny("root/") },
	"map-files-first":   func() error { return listAny("map_files") },
	"executable-first":  executable,
	"kill-first":        killFirst,
	"limit-of-init": func() error {
		return did(unix.Prlimit(victim(), unix.RLIMIT_CORE, &unix.Rlimit{}, nil), "set another's limit")
	},
	"setuid-unmapped":    func() error { return did(unix.Setresuid(70000, 70000, 70000), "is a user of another sandbox") },
	"setgroups-unmapped": func() error { return did(unix.Setgroups([]int{70000}), "is of a group of another sandbox") },
	"uid-map": func() error {
		return did(os.WriteFile("/proc/self/uid_map", []byte("0 0 1\n"), 0), "mapped users anew")
	},
	"raise-capabilities": raise,
	"ambient-capability": func() error {
		inherit()
		return did(unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_RAISE, unix.CAP_SYS_ADMIN, 0, 0), "raised an ambient capability")
	},
	"replace-exe-link": func() error { return did(setExe(), "says it is another program") },
	"drop-seccomp":     func() error { return did(unix.Prctl(unix.PR_SET_SECCOMP, 0, 0, 0, 0), "has no filter") },
	"realtime": func() error {
		return did(unix.SchedSetAttr(0, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_FIFO, Priority: 1}, 0), "runs before everybody")
	},
	"deadline": func() error {
		return did(unix.SchedSetAttr(0, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_DEADLINE, Runtime: 1e6, Deadline: 1e7, Period: 1e7}, 0), "has a deadline")
	},
	"nice-down": func() error { return did(unix.Setpriority(unix.PRIO_PROCESS, 0, -20), "is more important") },
	"io-realtime": func() error {
		_, _, e := unix.RawSyscall(unix.SYS_IOPRIO_SET, 1, 0, 1<<13)
		if e != 0 {
			return e
		}
		return worked("has real-time input and output")
	},
	"raise-nofile": func() error {
		var l unix.Rlimit
		_ = unix.Getrlimit(unix.RLIMIT_NOFILE, &l) // it always can
		l.Max++
		return did(unix.Setrlimit(unix.RLIMIT_NOFILE, &l), "may open more")
	},
	"lock-memory": func() error {
		b, err := unix.Mmap(-1, 0, 32<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
		if err != nil {
			return err
		}
		return did(unix.Mlock(b), "locked memory")
	},
	"oom-immunity": func() error {
		return did(os.WriteFile("/proc/self/oom_score_adj", []byte("-1"), 0), "is killed after everybody else")
	},
	"memory-of-same-user": memoryOfSameUser,
}

func ofVictim(name string) string { return fmt.Sprintf("/proc/%d/%s", victim(), name) }

func readAny(name string) error {
	b, err := os.ReadFile(ofVictim(name))
	return did(err, fmt.Sprintf("read %d bytes of %s", len(b), name))
}

func listAny(name string) error {
	all, err := os.ReadDir(ofVictim(name))
	return did(err, fmt.Sprintf("sees %d entries of %s", len(all), name))
}

func readMemory() error {
	f, err := os.OpenFile(ofVictim("mem"), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	_, err = f.ReadAt(make([]byte, 1), 0x400000)
	return reachedBy(err, "opened the memory of another process")
}

// executable is CVE-2019-5736: the program of the supervisor is opened by the
// process that it left inside, and written to.
func executable() error {
	f, err := os.OpenFile(ofVictim("exe"), os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	if control {
		return worked("opened the program of another process")
	}
	err = unix.Access(fmt.Sprintf("/proc/self/fd/%d", f.Fd()), unix.W_OK)
	return worked(fmt.Sprintf("opened the program of the first process, writable: %v", err))
}

// killFirst ends the first process: no signal without a handler reaches it.
func killFirst() error {
	if err := unix.Kill(victim(), unix.SIGKILL); err != nil {
		return err
	}
	if control {
		return worked("killed another process")
	}
	for range 100 {
		if err := unix.Kill(1, 0); err == unix.ESRCH {
			return worked("the first process is gone")
		}
	}
	return blockedBy("the signal is ignored by the first process of the namespace")
}

func raise() error {
	h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var d [2]unix.CapUserData
	if err := unix.Capget(&h, &d[0]); err != nil {
		return err
	}
	d[0].Permitted |= 1 << unix.CAP_SYS_ADMIN
	d[0].Effective |= 1 << unix.CAP_SYS_ADMIN
	return did(unix.Capset(&h, &d[0]), "has CAP_SYS_ADMIN")
}

// inherit lets children have what an ambient capability must be besides.
func inherit() {
	h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var d [2]unix.CapUserData
	if unix.Capget(&h, &d[0]) == nil {
		d[0].Inheritable |= 1 << unix.CAP_SYS_ADMIN
		_ = unix.Capset(&h, &d[0]) // it may be refused, and then so is the rest
	}
}

// setExe has /proc/self/exe name another file.
func setExe() error {
	fd, err := unix.Open("/proc/self/exe", unix.O_RDONLY, 0)
	if err != nil {
		return err
	}
	return unix.Prctl(unix.PR_SET_MM, unix.PR_SET_MM_EXE_FILE, uintptr(fd), 0, 0)
}
