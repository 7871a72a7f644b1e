package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// What uses up a thing until somebody says no. Each ends by itself, some by being
// killed; that the limit is the sandbox's own is what the tests look at.
var damage = map[string]technique{
	"fork-bomb":   forkBomb,
	"memory":      eatMemory,
	"disk":        fillDisk,
	"inodes":      manyFiles,
	"sparse-file": sparseFile,
	"deep-tree":   deepTree,
	"tmpfs":       func() error { return fill("/dev/shm/full") },
	"descriptors": func() error {
		return until(func(int) error { _, err := unix.Open("/dev/null", unix.O_RDONLY, 0); return err })
	},
	"inotify": func() error { return until(func(int) error { _, err := unix.InotifyInit1(0); return err }) },
	"events":  func() error { return until(func(int) error { _, err := unix.Eventfd(0, 0); return err }) },
	"terminals": func() error {
		return until(func(int) error { _, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY, 0); return err })
	},
	"pipes":          func() error { return until(fullPipe) },
	"sockets-flight": func() error { return until(inFlight) },
	"timers":         func() error { return until(func(int) error { return timer() }) },
	"signal-queue":   signalQueue,
	"message-queues": func() error { return until(messageQueue) },
	"shared-memory": func() error {
		return until(func(int) error { _, err := unix.SysvShmGet(unix.IPC_PRIVATE, 64<<20, unix.IPC_CREAT|0o600); return err })
	},
	"mappings":        func() error { return until(mapping) },
	"file-locks":      fileLocks,
	"output-flood":    outputFlood,
	"stubborn-tree":   stubborn,
	"vfork-wait":      vforkWait,
	"descriptor-bomb": descriptorBomb,
}

// seconds is how long a technique may go on.
func seconds() time.Duration {
	n, err := strconv.Atoi(os.Getenv("ATTACK_SECONDS"))
	if err != nil {
		n = 2
	}
	return time.Duration(n) * time.Second
}

// most is how often a thing is done where nothing stops it.
func most() int {
	n, err := strconv.Atoi(os.Getenv("ATTACK_MOST"))
	if err != nil {
		n = 20_000
	}
	return n
}

// until does a thing until it is refused, and says how often it was not.
func until(one func(n int) error) error {
	end := time.Now().Add(seconds())
	for n := 0; n < most(); n++ {
		if err := one(n); err != nil {
			return fmt.Errorf("after %d: %w", n, err)
		}
		if n%64 == 0 && time.Now().After(end) {
			return blockedBy(fmt.Sprintf("after %d the time is over", n))
		}
	}
	return blockedBy(fmt.Sprintf("after %d there is enough", most()))
}

func forkBomb() error {
	return until(func(int) error {
		cmd := exec.Command(self(), "-wait")
		if _, err := cmd.StdinPipe(); err != nil {
			return err
		}
		return cmd.Start()
	})
}

// eatMemory is killed.
func eatMemory() error {
	for n := 0; ; n += 16 {
		b, err := unix.Mmap(-1, 0, 16<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_POPULATE)
		if err != nil {
			return fmt.Errorf("after %d MiB: %w", n, err)
		}
		b[0] = 1
		if n > 4<<10 {
			return worked("has 4 GiB")
		}
	}
}

func fillDisk() error {
	defer func() { _ = os.Remove("full") }()
	return fill("full")
}

func fill(name string) error {
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	b := bytes.Repeat([]byte("noise"), 1<<18)
	for n := int64(0); n < 8<<30; n += int64(len(b)) {
		if _, err := f.Write(b); err != nil {
			return fmt.Errorf("after %d MiB: %w", n>>20, err)
		}
	}
	return worked("wrote 8 GiB")
}

func manyFiles() error {
	dir("many")
	return until(func(n int) error {
		if n%1000 == 0 {
			dir(fmt.Sprintf("many/%d", n/1000))
		}
		return os.WriteFile(fmt.Sprintf("many/%d/%d", n/1000, n), nil, 0o600)
	})
}

// sparseFile seems to be larger than any disk.
func sparseFile() error {
	f, err := os.Create("sparse")
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	for shift := 62; shift > 30; shift-- {
		if err = f.Truncate(1<<shift - 4096); err == nil {
			_, err = f.WriteAt([]byte("end"), 1<<shift-5000)
			return blockedBy(fmt.Sprintf("a file seems to have 2^%d bytes, %v", shift, err))
		}
	}
	return err
}

// deepTree is one whose paths no call can name.
func deepTree() error {
	defer func() { _ = os.Chdir("/") }()
	for n := range 5000 {
		if err := os.Mkdir("deep", 0o755); err != nil {
			return fmt.Errorf("after %d: %w", n, err)
		}
		if err := unix.Chdir("deep"); err != nil {
			return err
		}
	}
	return blockedBy("5000 directories in each other")
}

func fullPipe(int) error {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_NONBLOCK); err != nil {
		return err
	}
	_, _ = unix.FcntlInt(uintptr(p[1]), unix.F_SETPIPE_SZ, 1<<20) // it may be refused
	_, err := unix.Write(p[1], make([]byte, 1<<20))
	return err
}

// inFlight leaves a socket in a message that nobody reads.
func inFlight(int) error {
	p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		return err
	}
	err = unix.Sendmsg(p[0], []byte("x"), unix.UnixRights(p[0], p[1]), nil, 0)
	_ = unix.Close(p[0])
	_ = unix.Close(p[1])
	return err
}

func timer() error {
	var id [128]byte
	_, _, e := unix.RawSyscall(unix.SYS_TIMER_CREATE, unix.CLOCK_MONOTONIC, 0, atBytes(&id))
	if e != 0 {
		return e
	}
	return nil
}

// signalQueue fills the queue of its own user with a signal that is blocked.
func signalQueue() error {
	var set unix.Sigset_t
	set.Val[0] = 1 << (unix.SIGUSR1 - 1)
	if err := unix.PthreadSigmask(unix.SIG_BLOCK, &set, nil); err != nil {
		return err
	}
	return until(func(int) error {
		const realtime = 60
		info := [128]byte{0: realtime, 8: 0xff, 9: 0xff, 10: 0xff, 11: 0xff} // si_code SI_QUEUE
		set.Val[0] |= 1 << (realtime - 1)
		_ = unix.PthreadSigmask(unix.SIG_BLOCK, &set, nil) // as above
		_, _, e := unix.RawSyscall6(unix.SYS_RT_TGSIGQUEUEINFO, uintptr(unix.Getpid()), uintptr(unix.Gettid()), realtime, atBytes(&info), 0, 0)
		if e != 0 {
			return e
		}
		return nil
	})
}

func messageQueue(n int) error {
	_, _, e := unix.RawSyscall6(unix.SYS_MQ_OPEN, text(fmt.Sprintf("q%d", n)), unix.O_CREAT|unix.O_RDWR, 0o600, 0, 0, 0)
	if e != 0 {
		return e
	}
	return nil
}

// mapping is one that no neighbour is joined with.
func mapping(n int) error {
	_, err := unix.Mmap(-1, 0, 4096, []int{unix.PROT_READ, unix.PROT_WRITE}[n%2], unix.MAP_PRIVATE|unix.MAP_ANON)
	return err
}

// fileLocks holds a lock on each second byte of a file.
func fileLocks() error {
	fd := ownFile()
	return until(func(n int) error {
		return unix.FcntlFlock(fd, unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Start: int64(2 * n), Len: 1})
	})
}

// outputFlood is what yes does.
func outputFlood() error {
	b := []byte(strings.Repeat("y\n", 1<<15))
	total := 0
	for end := time.Now().Add(seconds()); time.Now().Before(end); {
		n, err := os.Stdout.Write(b)
		total += n
		if err != nil {
			return err
		}
	}
	fmt.Println()
	return blockedBy(fmt.Sprintf("wrote %d MiB, of which the most are dropped", total>>20))
}

// stubborn leaves processes that no signal but SIGKILL ends, in sessions of their own.
func stubborn() error {
	cmd := exec.Command(self(), "-deaf", "6")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	return left(cmd)
}

func left(cmd *exec.Cmd) error {
	if err := cmd.Start(); err != nil {
		return err
	}
	return blockedBy("left a process that goes on")
}

// deaf has a child like itself, as deep as it is told to.
func deaf(args []string) {
	signal.Ignore(unix.SIGTERM, unix.SIGINT, unix.SIGHUP, unix.SIGQUIT, unix.SIGPIPE, unix.SIGUSR1, unix.SIGUSR2, unix.SIGALRM)
	if n, err := strconv.Atoi(args[0]); err == nil && n > 0 {
		cmd := exec.Command(self(), "-deaf", strconv.Itoa(n-1))
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		_ = cmd.Start() // the limit of processes may be reached
	}
	time.Sleep(time.Hour)
}

// vforkWait leaves a process that waits, uninterruptible, for a child that opens a
// FIFO nobody writes to.
func vforkWait() error {
	if err := unix.Mkfifo("fifo", 0o600); err != nil && !errors.Is(err, unix.EEXIST) {
		return err
	}
	cmd := exec.Command(self(), "-vfork")
	return left(cmd)
}

// descriptorBomb has many processes with many open files each.
func descriptorBomb() error {
	for range 8 {
		cmd := exec.Command(self(), "descriptors")
		if err := cmd.Start(); err != nil {
			return err
		}
		defer func() { _ = cmd.Wait() }()
	}
	all, err := filepath.Glob("/proc/[0-9]*/fd")
	return did(errors.Join(err, blockedBy(fmt.Sprintf("of %d processes each has its own limit", len(all)))), "")
}
