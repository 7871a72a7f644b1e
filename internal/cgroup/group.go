package cgroup

import (
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/within"
)

// Group is one sandbox's.
type Group struct {
	member

	mu  sync.Mutex
	now settings
}

var (
	_ Member = (*Group)(nil)
	_ Member = (*Child)(nil)
)

func newGroup(r *Root, name string, s settings) *Group {
	g := &Group{member: member{root: r, name: name, path: name}, now: s}
	g.group = g
	return g
}

func (g *Group) current() settings {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.now
}

// Limits are those set last.
func (g *Group) Limits() Limits { return g.current().Limits }

// CPUs are the ones chosen for Visible; nil: all that the Root has.
func (g *Group) CPUs() []int { return g.current().CPUs }

// Remove kills what is inside, waits for its end and removes the group.
func (g *Group) Remove(ctx context.Context) error { return g.root.remove(ctx, g.name) }

// Child is one command's part of a group. Its name is under the same rule.
type Child struct{ member }

// Child makes the group of one command, or returns an existing one.
func (g *Group) Child(name string) (*Child, error) {
	const op = "create control group"
	if !validName.MatchString(name) {
		return nil, dsec.Errorf(dsec.Invalid, op, dsec.Quote(name), "want %s", validName)
	}
	c := &Child{member{root: g.root, group: g, name: name, path: g.name + "/" + name}}
	if err := g.root.unified.mkdir(c.path); err != nil && classOf(err) != dsec.AlreadyExists {
		return nil, dsec.E(classOf(err), op, c.path, err)
	}
	return c, nil
}

// Children names them.
func (g *Group) Children() ([]string, error) {
	names, err := g.root.unified.dirs(g.name)
	if err != nil {
		return nil, dsec.E(dsec.Internal, "list control groups", g.name, err)
	}
	return names, nil
}

// Remove kills what is inside, waits for its end and removes the child.
func (c *Child) Remove(ctx context.Context) error {
	if !c.root.unified.exists(c.path) {
		return nil
	}
	err := c.kill()
	if err == nil {
		err = c.waitEmpty(ctx)
	}
	if err == nil || classOf(err) == dsec.NotFound {
		err = c.root.removeBelow(ctx, c.path)
	}
	return c.wrap("remove control group", err)
}

// Freeze stops every process and returns when all have stopped. If ctx ends
// first the freeze is taken back.
func (g *Group) Freeze(ctx context.Context) error {
	d := g.root.unified
	err := d.write(g.path+"/cgroup.freeze", "1")
	if err == nil {
		err = g.waitEvent(ctx, "frozen", 1)
		if err != nil {
			_ = d.write(g.path+"/cgroup.freeze", "0")
		}
	}
	return g.wrap("freeze control group", err)
}

// Thaw undoes Freeze.
func (g *Group) Thaw(ctx context.Context) error {
	err := g.root.unified.write(g.path+"/cgroup.freeze", "0")
	if err == nil {
		err = g.waitEvent(ctx, "frozen", 0)
	}
	return g.wrap("thaw control group", err)
}

// Frozen reports whether Freeze is in force.
func (g *Group) Frozen() (bool, error) {
	n, err := g.root.unified.number(g.path + "/cgroup.freeze")
	return n == 1, g.wrap("look at control group", err)
}

// Update changes the limits of a living group; Devices stay as they are.
func (g *Group) Update(ctx context.Context, l Limits) error {
	const op = "limit control group"
	if err := l.check(); err != nil {
		return dsec.E(dsec.Invalid, op, g.name, err)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	l.Devices = g.now.Limits.Devices
	next := settings{Limits: l, CPUs: g.now.CPUs}
	g.root.cpus.count(g.now.CPUs, -g.now.Limits.cores())
	if l.Visible != g.now.Limits.Visible {
		next.CPUs = g.root.cpus.pick(l.Visible, l.cores())
	} else {
		g.root.cpus.count(next.CPUs, l.cores())
	}
	err := g.root.writeSettings(g.name, next)
	if err == nil {
		err = g.root.change(ctx, g.name, g.now, next)
	}
	if err != nil {
		g.root.cpus.count(next.CPUs, -l.cores())
		g.root.cpus.count(g.now.CPUs, g.now.Limits.cores())
		_ = g.root.writeSettings(g.name, g.now)
		_ = g.root.change(context.WithoutCancel(ctx), g.name, next, g.now)
		return g.wrap(op, err)
	}
	g.now = next
	return nil
}

func (r *Root) change(ctx context.Context, name string, was, next settings) error {
	if r.layout.version == V2 {
		return r.limitV2(name, next)
	}
	if err := r.limitV1(name, next.Limits, was.Limits); err != nil {
		return err
	}
	if next.equal(was) {
		return nil
	}
	if err := r.shareCPUs(next.CPUs); err != nil {
		return err
	}
	return r.moveThreads(ctx, name, "cpuset", cpusGroup(next.CPUs))
}

// Handles of a sandbox's own group.
func (r *Root) handles(path string, g *Group) (*Handles, error) {
	h := &Handles{}
	var err error
	if h.Unified, err = r.unified.open(path, unix.O_RDONLY|unix.O_DIRECTORY); err != nil {
		return nil, err
	}
	if r.layout.version == V2 {
		return h, nil
	}
	for _, t := range g.v1Groups() {
		f, err := r.v1[t.controller].open(t.group+"/tasks", unix.O_WRONLY)
		if err != nil {
			h.Close()
			return nil, err
		}
		h.Tasks = append(h.Tasks, f)
	}
	return h, nil
}

// KillChildren sends SIGKILL to every process of every child but those to keep, frozen
// ones too, until none is left in any. What lives in the group itself is not touched.
func (g *Group) KillChildren(ctx context.Context, keep func(name string) bool) error {
	return g.wrap("kill children of control group", g.killChildren(ctx, keep))
}

func (g *Group) killChildren(ctx context.Context, keep func(name string) bool) error {
	for wait := 50 * time.Microsecond; ; wait = min(2*wait, 20*time.Millisecond) { // who started a command removes its group, and then there is no event
		names, err := g.Children()
		if err != nil {
			return err
		}
		alive := false
		for _, n := range names {
			if keep(n) {
				continue
			}
			c := g.child(n)
			there, err := c.event("populated")
			if gone(err) || err == nil && there == 0 {
				continue
			}
			alive = true
			if err == nil {
				err = c.kill()
			}
			if err != nil && !gone(err) {
				return err
			}
		}
		if !alive {
			return nil
		}
		if err := within.Sleep(ctx, wait); err != nil {
			return err
		}
	}
}

func (g *Group) child(name string) *member {
	return &member{root: g.root, group: g, name: name, path: g.name + "/" + name}
}

// InChildren counts the processes of all children but those to leave out.
func (g *Group) InChildren(without func(name string) bool) (n int, err error) {
	names, err := g.Children()
	for _, c := range names {
		if without(c) {
			continue
		}
		text, err := g.root.unified.read(g.child(c).path + "/cgroup.procs")
		if err != nil && !gone(err) {
			return n, g.wrap("count in control group", err)
		}
		n += len(strings.Fields(text))
	}
	return n, err
}

func gone(err error) bool { return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV) }
