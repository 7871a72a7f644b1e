package cgroup

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// Root is where the groups of one node are.
type Root struct {
	name    string
	layout  layout
	unified dir
	v1      map[string]dir // by controller, except that cpuset and devices hold shared groups
	watch   *watcher
	cpus    *picker

	mu     sync.Mutex
	groups map[string]*Group        // those asked for since Open
	walls  map[string]*ebpf.Program // v2: loaded device programs, by key
	shared map[string]bool          // v1: shared groups known to exist, "controller/name"
}

// perSandbox are the v1 controllers in which each sandbox has its own group.
var perSandbox = []string{"memory", "cpu", "pids"}

var (
	validName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._]{0,63}$`)
	validRoot = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`)
)

// servicePrefix marks the groups of the node's own processes. No sandbox's
// name can begin with it.
const servicePrefix = "_"

// Open finds or makes the Root of that name.
func Open(name string) (*Root, error) {
	const op = "open control groups"
	if !validRoot.MatchString(name) {
		return nil, dsec.Errorf(dsec.Invalid, op, dsec.Quote(name), "want %s", validRoot)
	}
	l, err := machineLayout()
	if err != nil {
		return nil, dsec.E(dsec.Unsupported, op, name, err)
	}
	r := &Root{name: name, layout: l, v1: map[string]dir{}, groups: map[string]*Group{},
		walls: map[string]*ebpf.Program{}, shared: map[string]bool{}}
	for _, step := range []func() error{r.openUnified, r.openV1, r.openCPUs, r.openWatcher} {
		if err := step(); err != nil {
			_ = r.Close()
			return nil, dsec.E(classOf(err), op, name, err)
		}
	}
	return r, nil
}

// classOf says what a refused operation on the tree means.
func classOf(err error) dsec.Class {
	switch {
	case errors.Is(err, unix.EROFS), errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return dsec.Unsupported
	case errors.Is(err, unix.EEXIST):
		return dsec.AlreadyExists
	case errors.Is(err, unix.ENOENT):
		return dsec.NotFound
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EAGAIN), errors.Is(err, unix.ENOMEM), errors.Is(err, unix.EBUSY):
		return dsec.ResourceExhausted
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return dsec.ClassOf(err)
	}
	return dsec.Internal
}

func ensureDir(p string) (dir, error) {
	if err := os.MkdirAll(p, 0o755); err != nil {
		return dir{}, err
	}
	return openDir(p)
}

func (r *Root) openUnified() error {
	base, delegated := r.layout.unifiedBase()
	if r.layout.version == V2 {
		b, err := openDir(base)
		if err != nil {
			return err
		}
		defer func() { _ = unix.Close(b.fd) }()
		if err := enableControllers(b, delegated); err != nil {
			return err
		}
	}
	var err error
	if r.unified, err = ensureDir(path.Join(base, r.name)); err != nil {
		return err
	}
	if r.layout.version == V2 {
		return enableControllers(r.unified, false)
	}
	return nil
}

// enableControllers lets the groups below d be limited. If processes are in d
// itself and d is ours, they move to a leaf first: v2 allows no others.
func enableControllers(d dir, moveOut bool) error {
	have, err := d.read("cgroup.controllers")
	if err != nil {
		return err
	}
	want := ""
	for _, c := range []string{"memory", "cpu", "pids", "cpuset"} {
		if slices.Contains(strings.Fields(have), c) {
			want += " +" + c
		} else if c != "cpuset" {
			return fmt.Errorf("%s has no %s controller: %w", d.path, c, unix.EPERM)
		}
	}
	err = d.write("cgroup.subtree_control", strings.TrimSpace(want))
	if !errors.Is(err, unix.EBUSY) || !moveOut {
		return err
	}
	if err := d.mkdir("node"); err != nil && !errors.Is(err, unix.EEXIST) {
		return err
	}
	pids, err := d.read("cgroup.procs")
	if err != nil {
		return err
	}
	for pid := range strings.FieldsSeq(pids) {
		if err := d.write("node/cgroup.procs", pid); err != nil && !errors.Is(err, unix.ESRCH) {
			return err
		}
	}
	return d.write("cgroup.subtree_control", strings.TrimSpace(want))
}

// openV1 uses the places noted by the process that made the Root, if they are
// still there; else it makes them below its own and notes them.
func (r *Root) openV1() error {
	if r.layout.version == V2 {
		return nil
	}
	places := map[string]string{}
	if text, err := r.unified.noted(".", "places"); err == nil && json.Unmarshal([]byte(text), &places) == nil {
		if r.openPlaces(places) == nil {
			return nil
		}
		r.closeV1()
	}
	for _, c := range controllers {
		places[c] = path.Join(r.layout.v1[c].mount, r.layout.v1[c].own, r.name)
		if err := os.MkdirAll(places[c], 0o755); err != nil {
			return err
		}
	}
	if err := r.openPlaces(places); err != nil {
		return err
	}
	if err := inheritCPUs(r.v1["cpuset"]); err != nil {
		return err
	}
	if r.v1["memory"].exists("memory.use_hierarchy") {
		if err := r.v1["memory"].write("memory.use_hierarchy", "1"); err != nil {
			return err
		}
	}
	text, err := json.Marshal(places)
	if err != nil {
		return err
	}
	return r.unified.note(".", "places", string(text))
}

func (r *Root) openPlaces(places map[string]string) error {
	for _, c := range controllers {
		d, err := openDir(places[c])
		if err != nil {
			return err
		}
		r.v1[c] = d
	}
	return nil
}

func (r *Root) closeV1() {
	for c, d := range r.v1 {
		_ = unix.Close(d.fd)
		delete(r.v1, c)
	}
}

func (r *Root) openWatcher() (err error) {
	r.watch, err = newWatcher()
	return err
}

// Close lets go of the Root; the groups stay.
func (r *Root) Close() error {
	if r.watch != nil {
		r.watch.close()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for k, p := range r.walls {
		_ = p.Close()
		delete(r.walls, k)
	}
	r.closeV1()
	if r.unified.path != "" {
		_ = unix.Close(r.unified.fd)
		r.unified = dir{}
	}
	return nil
}

// Version says which layout this machine has.
func (r *Root) Version() Version { return r.layout.version }

// Describe says in one line where the groups are.
func (r *Root) Describe() string {
	s := "cgroup " + r.layout.version.String() + ", groups in " + r.unified.path
	if r.layout.version == Hybrid {
		s += ", memory in " + r.v1["memory"].path
	}
	return s
}

// List names every group, half-made ones included.
func (r *Root) List() ([]string, error) {
	all, err := r.all()
	return slices.DeleteFunc(all, func(n string) bool { return !validName.MatchString(n) }), err
}

func (r *Root) all() ([]string, error) {
	names, err := r.unified.dirs(".")
	for _, c := range perSandbox {
		if d, ok := r.v1[c]; ok && err == nil {
			var more []string
			more, err = d.dirs(".")
			names = append(names, more...)
		}
	}
	if err != nil {
		return nil, dsec.E(dsec.Internal, "list control groups", r.name, err)
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

// RemoveAll removes the Root and everything in it, services too, and closes it.
func (r *Root) RemoveAll(ctx context.Context) error {
	names, err := r.all()
	if err != nil {
		return err
	}
	for _, n := range names {
		if err := r.remove(ctx, n); err != nil {
			return err
		}
	}
	paths := []string{r.unified.path}
	for _, d := range r.v1 {
		paths = append(paths, d.path)
	}
	for _, c := range []string{"cpuset", "devices"} {
		d, ok := r.v1[c]
		if !ok {
			continue
		}
		shared, err := d.dirs(".")
		if err != nil {
			return dsec.E(dsec.Internal, "list control groups", r.name, err)
		}
		for _, n := range shared {
			if err := d.rmdir(n); err != nil {
				return dsec.E(classOf(err), "remove control groups", r.name, err)
			}
		}
	}
	_ = r.Close()
	for _, p := range paths {
		if err := os.Remove(p); err != nil && !errors.Is(err, os.ErrNotExist) {
			return dsec.E(classOf(err), "remove control groups", r.name, err)
		}
	}
	return nil
}
