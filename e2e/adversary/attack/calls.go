package main

import (
	"os/exec"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// a call that no sandbox may make, with arguments that harm nobody.
type call struct {
	name string
	nr   uintptr
	args [6]uintptr
}

func text(s string) uintptr {
	b, err := unix.BytePtrFromString(s)
	if err != nil {
		panic(err)
	}
	kept = append(kept, b)
	return uintptr(unsafe.Pointer(b))
}

// kept is what the kernel has been told the address of.
var kept []any

// at is memory that begins with words, which the kernel may read and fill.
func at(words ...uint64) uintptr {
	p := append(words, make([]uint64, 32)...)
	kept = append(kept, p)
	return uintptr(unsafe.Pointer(&p[0]))
}

const (
	keySession  = ^uintptr(2) // KEY_SPEC_SESSION_KEYRING
	noFD        = ^uintptr(0)
	own         = ^uintptr(41) // stands for ownFile
	noCommand   = 0x1234       // of reboot: who may give commands is told that it is none
	mapArray    = 2
	softwareNop = 1 | 128<<32 // type and size of perf's attributes
	fileSetattr = 469
	memfdSecret = 447
)

func refusedCalls() []call {
	return []call{
		{"bpf", unix.SYS_BPF, [6]uintptr{0, at(mapArray|4<<32, 4|1<<32), 72}},
		{"perf", unix.SYS_PERF_EVENT_OPEN, [6]uintptr{at(softwareNop, 9), 0, noFD, noFD, 0}},
		{"io-uring", unix.SYS_IO_URING_SETUP, [6]uintptr{1, at()}},
		{"userfaultfd", unix.SYS_USERFAULTFD, [6]uintptr{}},
		{"add-key", unix.SYS_ADD_KEY, [6]uintptr{text("user"), text("dsec-test"), text("x"), 1, ^uintptr(1)}},
		{"keyctl", unix.SYS_KEYCTL, [6]uintptr{0, keySession, 0}},
		{"request-key", unix.SYS_REQUEST_KEY, [6]uintptr{text("user"), text("nothing"), 0, 0}},
		{"init-module", unix.SYS_INIT_MODULE, [6]uintptr{text("x"), 1, text("")}},
		{"finit-module", unix.SYS_FINIT_MODULE, [6]uintptr{noFD, text(""), 0}},
		{"delete-module", unix.SYS_DELETE_MODULE, [6]uintptr{text("no_such_module"), 0}},
		{"kexec-load", unix.SYS_KEXEC_LOAD, [6]uintptr{0, 0, 0, 0}},
		{"kexec-file-load", unix.SYS_KEXEC_FILE_LOAD, [6]uintptr{noFD, noFD, 0, 0, 0}},
		{"reboot", unix.SYS_REBOOT, [6]uintptr{unix.LINUX_REBOOT_MAGIC1, unix.LINUX_REBOOT_MAGIC2, noCommand, 0}},
		{"swapon", unix.SYS_SWAPON, [6]uintptr{text("/no/such/file"), 0}},
		{"swapoff", unix.SYS_SWAPOFF, [6]uintptr{text("/no/such/file")}},
		{"acct", unix.SYS_ACCT, [6]uintptr{text("/no/such/file")}},
		{"settimeofday", unix.SYS_SETTIMEOFDAY, [6]uintptr{0, at(99999)}},
		{"clock-settime", unix.SYS_CLOCK_SETTIME, [6]uintptr{unix.CLOCK_REALTIME, at(0, 1<<40)}},
		{"adjtimex", unix.SYS_ADJTIMEX, [6]uintptr{at()}},
		{"sethostname", unix.SYS_SETHOSTNAME, [6]uintptr{text("stolen"), 6}},
		{"kernel-log", unix.SYS_SYSLOG, [6]uintptr{3, at(make([]uint64, 512)...), 4096}},
		{"quotactl", unix.SYS_QUOTACTL, [6]uintptr{0x80000100, 0, 0, 0}},
		{"fanotify", unix.SYS_FANOTIFY_INIT, [6]uintptr{0, 0}},
		{"vhangup", unix.SYS_VHANGUP, [6]uintptr{}},
		{"move-pages", unix.SYS_MOVE_PAGES, [6]uintptr{0, 0, 0, 0, 0, 0}},
		{"migrate-pages", unix.SYS_MIGRATE_PAGES, [6]uintptr{0, 0, 0, 0}},
		{"personality-read-implies-exec", unix.SYS_PERSONALITY, [6]uintptr{0x400000}},
		{"memfd-secret", memfdSecret, [6]uintptr{}},
		{"kcmp", unix.SYS_KCMP, [6]uintptr{uintptr(unix.Getpid()), uintptr(unix.Getpid()), 1, 0, 0}},
		{"file-setattr", fileSetattr, [6]uintptr{noFD, text(""), 0, 0, 0}},
		{"process-madvise", unix.SYS_PROCESS_MADVISE, [6]uintptr{noFD, 0, 0, 0, 0}},
		{"ptrace-traceme", unix.SYS_PTRACE, [6]uintptr{0}},
		{"lease", unix.SYS_FCNTL, [6]uintptr{own, unix.F_SETLEASE, unix.F_WRLCK}},
		{"open-by-handle-anything", unix.SYS_OPEN_BY_HANDLE_AT, [6]uintptr{own, at(8|1<<32, 2), 0}},
		{"call-of-tomorrow", 1023, [6]uintptr{}},
	}
}

// ownFile is a file nobody else has open.
func ownFile() uintptr {
	fd, err := unix.Open(".", unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		if fd, err = unix.Open("own", unix.O_CREAT|unix.O_RDWR|unix.O_CLOEXEC, 0o600); err != nil {
			panic(err)
		}
	}
	return uintptr(fd)
}

func calls() map[string]technique {
	all := map[string]technique{"old-entry": oldEntryOfTheKernel}
	for _, c := range append(refusedCalls(), callsOfTheMachine()...) {
		all[c.name] = func() error {
			if c.args[0] == own {
				c.args[0] = ownFile()
			}
			_, _, e := unix.RawSyscall6(c.nr, c.args[0], c.args[1], c.args[2], c.args[3], c.args[4], c.args[5])
			return reached(c.name, e)
		}
	}
	return all
}

// oldEntryOfTheKernel has other numbers, which no filter for the new ones means.
func oldEntryOfTheKernel() error {
	err := exec.Command(self(), "-entry").Run()
	if ee, ok := err.(interface{ Sys() any }); ok {
		if ws, ok := ee.Sys().(syscall.WaitStatus); ok && ws.Signal() == unix.SIGSYS {
			return blockedBy("SIGSYS: the process is killed")
		}
	}
	return did(err, "a 32-bit call was made")
}

// blockedBy is what stopped a technique and is no errno.
type blockedBy string

func (b blockedBy) Error() string { return string(b) }
