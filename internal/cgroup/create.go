package cgroup

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/within"
)

// settings is what is noted on a group.
type settings struct {
	Limits Limits
	CPUs   []int `json:",omitempty"` // those chosen; none: no restriction
}

func (r *Root) readSettings(name string) (s settings, err error) {
	text, err := r.unified.noted(name, "settings")
	if err == nil {
		err = json.Unmarshal([]byte(text), &s)
	}
	return s, err
}

func (r *Root) writeSettings(name string, s settings) error {
	text, err := json.Marshal(s)
	if err != nil {
		return err
	}
	return r.unified.note(name, "settings", string(text))
}

// Create makes a group and sets its limits.
func (r *Root) Create(name string, l Limits) (*Group, error) {
	const op = "create control group"
	if !validName.MatchString(name) {
		return nil, dsec.Errorf(dsec.Invalid, op, dsec.Quote(name), "want %s", validName)
	}
	if err := l.check(); err != nil {
		return nil, dsec.E(dsec.Invalid, op, name, err)
	}
	return r.create(name, l)
}

func (r *Root) create(name string, l Limits) (*Group, error) {
	const op = "create control group"
	if err := r.unified.mkdir(name); err != nil {
		return nil, dsec.E(classOf(err), op, name, err)
	}
	s := settings{Limits: l, CPUs: r.cpus.pick(l.Visible, l.cores())}
	if err := r.build(name, s); err != nil {
		r.cpus.count(s.CPUs, -l.cores())
		ctx, cancel := context.WithTimeout(context.Background(), undoTime)
		defer cancel()
		return nil, dsec.E(classOf(err), op, name, errors.Join(err, r.removeTrees(ctx, name)))
	}
	g := newGroup(r, name, s)
	r.mu.Lock()
	r.groups[name] = g
	r.mu.Unlock()
	return g, nil
}

// undoTime bounds the removal of what a failed Create made.
const undoTime = 10 * time.Second

func (r *Root) build(name string, s settings) error {
	if err := r.writeSettings(name, s); err != nil {
		return err
	}
	if r.layout.version == V2 {
		if err := r.limitV2(name, s); err != nil {
			return err
		}
		return r.attachWall(name, s.Limits.Devices)
	}
	for _, c := range perSandbox {
		if err := r.v1[c].mkdir(name); err != nil && !errors.Is(err, unix.EEXIST) {
			return err // one that exists is what a killed Remove left: empty
		}
	}
	if err := r.limitV1(name, s.Limits, Limits{}); err != nil {
		return err
	}
	if err := r.shareCPUs(s.CPUs); err != nil {
		return err
	}
	return r.shareDevices(s.Limits.Devices)
}

// Group returns an existing group, or NotFound.
func (r *Root) Group(name string) (*Group, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if g := r.groups[name]; g != nil {
		return g, nil
	}
	s, err := r.readSettings(name)
	if err != nil {
		return nil, dsec.E(dsec.NotFound, "open control group", name, err)
	}
	g := newGroup(r, name, s)
	r.groups[name] = g
	return g, nil
}

// Service returns a group without limits for a process of the node itself,
// made if missing. It is not in List.
func (r *Root) Service(name string) (*Group, error) {
	if !validName.MatchString(name) {
		return nil, dsec.Errorf(dsec.Invalid, "create control group", dsec.Quote(name), "want %s", validName)
	}
	g, err := r.create(servicePrefix+name, Limits{})
	if errors.Is(err, dsec.AlreadyExists.Err()) {
		return r.Group(servicePrefix + name)
	}
	return g, err
}

// Remove removes a group by name, whatever is left of it.
func (r *Root) Remove(ctx context.Context, name string) error {
	if !validName.MatchString(name) {
		return dsec.Errorf(dsec.Invalid, "remove control group", dsec.Quote(name), "want %s", validName)
	}
	return r.remove(ctx, name)
}

func (r *Root) remove(ctx context.Context, name string) error {
	r.mu.Lock()
	known := r.groups[name]
	r.mu.Unlock()
	var s settings
	var noted error
	if known == nil { // only what another process made has to be read
		s, noted = r.readSettings(name)
	}
	if err := r.removeTrees(ctx, name); err != nil {
		return dsec.E(classOf(err), "remove control group", name, err)
	}
	r.mu.Lock()
	counted := r.groups[name] == known // by no other Remove meanwhile
	delete(r.groups, name)
	r.mu.Unlock()
	if known != nil {
		s = known.current()
	}
	if counted && noted == nil {
		r.cpus.count(s.CPUs, -s.Limits.cores())
	}
	return nil
}

// removeTrees empties the v2 group, then removes the v1 groups, then itself:
// as long as something is left, List names it.
func (r *Root) removeTrees(ctx context.Context, name string) error {
	// Usually everything has ended, and one look is cheaper than the order to die.
	m := member{root: r, path: name}
	populated, err := m.event("populated")
	if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENODEV) {
		return err
	}
	if populated != 0 {
		if err := m.kill(); err != nil && !errors.Is(err, unix.ENOENT) {
			return err
		}
		if err := m.waitEmpty(ctx); err != nil {
			return err
		}
	}
	for _, c := range perSandbox {
		if d, ok := r.v1[c]; ok {
			if err := removeBusy(ctx, d, name); err != nil {
				return err
			}
		}
	}
	if err := r.unified.rmdir(name); !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.ENOTEMPTY) {
		return err
	}
	return r.removeBelow(ctx, name)
}

// removeBelow removes a v2 group and all below it, deepest first.
func (r *Root) removeBelow(ctx context.Context, name string) error {
	below, err := r.unified.dirs(name)
	if err != nil {
		return err
	}
	for _, n := range below {
		if err := r.removeBelow(ctx, name+"/"+n); err != nil {
			return err
		}
	}
	return removeBusy(ctx, r.unified, name)
}

// removeBusy removes one group. It is busy while a process that was told to
// die is still in it, or one that never was in the v2 group: those are killed.
func removeBusy(ctx context.Context, d dir, name string) error {
	for wait := 50 * time.Microsecond; ; wait = min(2*wait, 20*time.Millisecond) { // v1 has no event for "empty"
		err := d.rmdir(name)
		if !errors.Is(err, unix.EBUSY) {
			return err
		}
		if err := killListed(d, name); err != nil {
			return err
		}
		if within.Sleep(ctx, wait) != nil {
			return errors.Join(context.Cause(ctx), err)
		}
	}
}

// equal says whether two settings put a process into the same v1 groups.
func (s settings) equal(o settings) bool { return slices.Equal(s.CPUs, o.CPUs) }
