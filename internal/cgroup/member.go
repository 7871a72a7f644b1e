package cgroup

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// member is a directory of the v2 tree.
type member struct {
	root  *Root
	group *Group // whose limits hold; nil for one that is only removed
	name  string
	path  string // below the Root
}

func (m *member) wrap(op string, err error) error {
	if err == nil {
		return nil
	}
	return dsec.E(classOf(err), op, m.path, err)
}

// Name is the one given at its creation.
func (m *member) Name() string { return m.name }

// Handles opens what is needed to start a process in it; close them after.
func (m *member) Handles() (*Handles, error) {
	h, err := m.root.handles(m.path, m.group)
	return h, m.wrap("open control group", err)
}

func (m *member) kill() error { return m.root.unified.write(m.path+"/cgroup.kill", "1") }

// Kill sends SIGKILL to every process in it and below, frozen ones too.
func (m *member) Kill() error { return m.wrap("kill control group", m.kill()) }

func (m *member) event(key string) (int64, error) {
	ev, err := m.root.unified.keyed(m.path + "/cgroup.events")
	return ev[key], err
}

// waitEvent returns when cgroup.events has the value.
func (m *member) waitEvent(ctx context.Context, key string, want int64) error {
	d := m.root.unified
	return m.root.watch.until(ctx, d.path+"/"+m.path+"/cgroup.events", func() (bool, error) {
		n, err := m.event(key)
		return n == want, err
	})
}

func (m *member) waitEmpty(ctx context.Context) error {
	err := m.waitEvent(ctx, "populated", 0)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV) {
		return nil // removed meanwhile
	}
	return err
}

// Populated reports whether a process lives in it or below.
func (m *member) Populated() (bool, error) {
	n, err := m.event("populated")
	return n == 1, m.wrap("look at control group", err)
}

// WaitEmpty returns when none does.
func (m *member) WaitEmpty(ctx context.Context) error {
	return m.wrap("wait for control group", m.waitEmpty(ctx))
}

// CPUTime is what its processes have used, those that ended included.
func (m *member) CPUTime() (time.Duration, error) {
	st, err := m.root.unified.keyed(m.path + "/cpu.stat")
	return time.Duration(st["usage_usec"]) * time.Microsecond, m.wrap("look at control group", err)
}

// killListed kills what a group lists, each through a descriptor of the
// process that was looked at again after it was opened.
func killListed(d dir, name string) error {
	listed := func() (map[string]bool, error) {
		text, err := d.read(name + "/cgroup.procs")
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV) {
			return nil, nil
		}
		set := map[string]bool{}
		for pid := range strings.FieldsSeq(text) {
			set[pid] = true
		}
		return set, err
	}
	first, err := listed()
	if err != nil || len(first) == 0 {
		return err
	}
	fds := map[string]int{}
	for pid := range first {
		n, err := strconv.Atoi(pid)
		if err != nil {
			continue
		}
		if fd, err := unix.PidfdOpen(n, 0); err == nil {
			fds[pid] = fd
			defer func() { _ = unix.Close(fd) }()
		}
	}
	again, err := listed()
	if err != nil {
		return err
	}
	for pid, fd := range fds {
		if again[pid] {
			_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0) // it may be gone
		}
	}
	return nil
}

// moveThreads moves every thread of a sandbox to another v1 group, until a
// look finds none that has not been moved: new ones are born where their
// parent is.
func (r *Root) moveThreads(ctx context.Context, name, controller, to string) error {
	moved := map[string]bool{}
	for {
		threads, err := r.threads(name)
		if err != nil {
			return err
		}
		fresh := 0
		for _, t := range threads {
			if moved[t] {
				continue
			}
			fresh++
			moved[t] = true
			if err := r.v1[controller].write(to+"/tasks", t); err != nil && !errors.Is(err, unix.ESRCH) {
				return err
			}
		}
		if fresh == 0 {
			return nil
		}
		if err := context.Cause(ctx); err != nil {
			return err
		}
	}
}

// threads lists those of a v2 group and all below it.
func (r *Root) threads(name string) ([]string, error) {
	text, err := r.unified.read(name + "/cgroup.threads")
	if err != nil {
		return nil, err
	}
	all := strings.Fields(text)
	below, err := r.unified.dirs(name)
	for _, n := range below {
		var more []string
		if more, err = r.threads(name + "/" + n); err != nil && !errors.Is(err, unix.ENOENT) {
			return nil, err
		}
		all = append(all, more...)
	}
	return all, err
}
