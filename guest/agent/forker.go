package agent

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/linux"
)

// kindOfForker is what a forker's thread gave up, and so what its children have.
type kindOfForker struct {
	caps       uint64 // their bounding set
	noNewPrivs bool
	inside     bool // in all namespaces of the sandbox; else in the agent's
}

// forker is a thread that starts processes.
type forker struct {
	work chan func()
	gone chan struct{} // closed when it has ended
}

// forkers are made as they are needed.
type forkers struct {
	spaces []space
	tasks  []string // files of control groups that the threads join

	mu     sync.Mutex
	all    map[kindOfForker]*forker
	closed bool
}

// space is a namespace to join.
type space struct {
	file *os.File
	kind int
}

// maxForkers bounds threads: kinds come from the node, which knows a few.
const maxForkers = 64

// on runs f on the thread of a kind.
func (s *forkers) on(k kindOfForker, f func()) error {
	s.mu.Lock()
	fk := s.all[k]
	if s.closed {
		s.mu.Unlock()
		return errors.New("the sandbox has ended")
	}
	if fk == nil {
		if len(s.all) >= maxForkers {
			s.mu.Unlock()
			return errors.New("too many kinds of commands")
		}
		fk = &forker{work: make(chan func()), gone: make(chan struct{})}
		if err := fk.begin(s, k); err != nil {
			s.mu.Unlock()
			return err
		}
		s.all[k] = fk
	}
	s.mu.Unlock()
	done := make(chan struct{})
	fk.work <- func() { defer close(done); f() }
	<-done
	return nil
}

// close ends the threads, and lets go of the namespaces.
func (s *forkers) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for k, fk := range s.all {
		close(fk.work)
		<-fk.gone
		delete(s.all, k)
	}
	closeSpaces(s.spaces)
	s.spaces, s.closed = nil, true
}

func (fk *forker) begin(s *forkers, k kindOfForker) error {
	ready := make(chan error, 1)
	go func() {
		defer close(fk.gone)
		_ = linux.OnThread(func() error {
			err := s.enter(k)
			ready <- err
			if err != nil {
				return err
			}
			for f := range fk.work {
				f()
			}
			return nil
		})
	}()
	return <-ready
}

// enter makes of the calling thread what its children shall be.
func (s *forkers) enter(k kindOfForker) error {
	if k.inside {
		for _, t := range s.tasks {
			if err := os.WriteFile(t, []byte(strconv.Itoa(unix.Gettid())), 0); err != nil {
				return err
			}
		}
		for _, sp := range s.spaces {
			if err := linux.JoinNS(sp.file, sp.kind); err != nil {
				return err
			}
		}
	}
	return confineThread(k.caps, k.noNewPrivs)
}

// confineThread takes from the bounding set what is not in caps: no program
// that is started from here, whoever runs it, can get more.
func confineThread(caps uint64, noNewPrivs bool) error {
	for c := range uint(64) {
		if caps&(1<<c) != 0 {
			continue
		}
		err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(c), 0, 0, 0)
		if err == unix.EINVAL { // beyond the last that the kernel knows
			break
		}
		if err != nil {
			return os.NewSyscallError("drop capability", err)
		}
	}
	if noNewPrivs {
		return os.NewSyscallError("prctl", unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
	}
	return nil
}

// spacesOf opens the namespaces of a process, in the order in which they are joined.
func spacesOf(pid int) (all []space, err error) {
	for _, n := range []struct {
		name string
		kind int
	}{{"ipc", unix.CLONE_NEWIPC}, {"uts", unix.CLONE_NEWUTS}, {"cgroup", unix.CLONE_NEWCGROUP}, {"pid", unix.CLONE_NEWPID}, {"mnt", unix.CLONE_NEWNS}} {
		f, err := os.Open(filepath.Join("/proc", strconv.Itoa(pid), "ns", n.name))
		if err != nil {
			closeSpaces(all)
			return nil, err
		}
		all = append(all, space{f, n.kind})
	}
	return all, nil
}

func closeSpaces(all []space) {
	for _, s := range all {
		_ = s.file.Close()
	}
}

// asUser runs f on a forker's thread with the rights on files of a user.
func asUser(uid, gid uint32, groups []uint32, f func() error) error {
	set := func(uid, gid uint32, groups []uint32) error {
		var p *uint32
		if len(groups) > 0 {
			p = &groups[0]
		}
		if err := setGroups(p, len(groups)); err != nil {
			return err
		}
		_ = unix.Setfsgid(int(gid)) // what they return does not tell
		_ = unix.Setfsuid(int(uid))
		return nil
	}
	if err := set(uid, gid, groups); err != nil {
		return os.NewSyscallError("setgroups", err)
	}
	err := f()
	_ = unix.Setfsuid(0)
	return errors.Join(err, set(0, 0, nil))
}
