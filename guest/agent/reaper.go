package agent

import (
	"os"
	"os/signal"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// ending is how a process ended.
type ending struct {
	code   int // 0 if a signal ended it
	signal int
	cpu    time.Duration // it and what it waited for
}

// reaper waits for every child of the process: those it started, and orphans
// that the kernel gave to it as PID 1.
type reaper struct {
	mu       sync.Mutex
	starting int                   // starts whose pid is not known yet
	early    map[int]ending        // ends while there are such
	waiting  map[int]chan<- ending // by pid
	wake     chan os.Signal
}

func newReaper() *reaper {
	r := &reaper{early: map[int]ending{}, waiting: map[int]chan<- ending{}, wake: make(chan os.Signal, 1)}
	signal.Notify(r.wake, unix.SIGCHLD)
	go r.run()
	return r
}

func (r *reaper) run() {
	for range r.wake {
		for r.one() {
		}
	}
}

// one reaps one child. The lock is held from before the kernel forgets the pid
// until its end is filed, so that no start can have the same pid meanwhile.
func (r *reaper) one() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	var ws unix.WaitStatus
	var ru unix.Rusage
	pid, err := unix.Wait4(-1, &ws, unix.WNOHANG|unix.WALL, &ru)
	if err == unix.EINTR {
		return true
	}
	if err != nil || pid <= 0 {
		return false
	}
	e := ending{cpu: time.Duration(ru.Utime.Nano() + ru.Stime.Nano())}
	if ws.Signaled() {
		e.signal = int(ws.Signal())
	} else {
		e.code = ws.ExitStatus()
	}
	if ch := r.waiting[pid]; ch != nil {
		delete(r.waiting, pid)
		ch <- e // has room for it
	} else if r.starting > 0 {
		r.early[pid] = e
	}
	return true
}

// start runs f, which starts a child, and returns a channel on which its end
// comes.
func (r *reaper) start(f func() (pid int, err error)) (int, <-chan ending, error) {
	r.mu.Lock()
	r.starting++
	r.mu.Unlock()
	pid, err := f()
	r.mu.Lock()
	defer r.mu.Unlock()
	ch := make(chan ending, 1)
	if err == nil {
		if e, ok := r.early[pid]; ok {
			ch <- e
		} else {
			r.waiting[pid] = ch
		}
	}
	delete(r.early, pid)
	if r.starting--; r.starting == 0 {
		clear(r.early)
	}
	return pid, ch, err
}
