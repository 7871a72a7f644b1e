package diskpool

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// projectPool is a directory per entry on the file system that has the data
// directory, each a quota project of its own.
type projectPool struct {
	base
	dir *os.File

	mu      sync.Mutex
	used    map[uint32]bool // projects of entries, removed ones until they are gone
	gone    sync.WaitGroup  // removals under way
	closing sync.Once
}

const (
	firstProject = 0x64730001 // "ds": ours are told from others' by it
	lastProject  = 0x6473ffff
	gonePrefix   = ".gone-"
)

func openProject(_ context.Context, o Options) (Pool, error) {
	const op = "open disk pool"
	dir, err := os.Open(o.Dir)
	if err != nil {
		return nil, dsec.E(dsec.Internal, op, o.Dir, err)
	}
	p := &projectPool{base: base{o: o}, dir: dir, used: map[uint32]bool{}}
	if err := p.probe(); err != nil {
		_ = dir.Close()
		return nil, dsec.E(dsec.Unsupported, op, o.Dir, err)
	}
	if err := p.adopt(); err != nil {
		_ = p.Close()
		return nil, wrap(op, o.Dir, err)
	}
	return p, nil
}

// probe tries all of it: accounting may be on without the limit being
// enforced, and a file system may know projects but no quota.
func (p *projectPool) probe() error {
	const size = 1 << 20
	d, err := p.make(".probe", lastProject, size)
	if err != nil {
		return err
	}
	defer func() {
		_ = limitProject(p.dir, lastProject, 0)
		_ = d.Close()
		_ = os.RemoveAll(filepath.Join(p.o.Dir, ".probe"))
	}()
	fd, err := unix.Openat(int(d.Fd()), "f", unix.O_CREAT|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return &os.PathError{Op: "create", Path: d.Name() + "/f", Err: err}
	}
	defer func() { _ = unix.Close(fd) }()
	err = unprivileged(func() error { return unix.Fallocate(fd, 0, 0, 2*size) })
	if isFull(err) {
		return nil
	}
	if err == nil {
		return errors.New("project quotas are counted but not enforced on this file system")
	}
	return &os.PathError{Op: "allocate", Path: d.Name() + "/f", Err: err}
}

// unprivileged runs f without CAP_SYS_RESOURCE, which exempts from quotas. A
// sandbox never has it: its own is of another user namespace, and overlayfs
// writes without it.
func unprivileged(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // for good: the thread ends with its capabilities
		h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var c [2]unix.CapUserData
		err := unix.Capget(&h, &c[0])
		c[0].Effective &^= 1 << unix.CAP_SYS_RESOURCE
		if err == nil {
			err = unix.Capset(&h, &c[0])
		}
		if err == nil {
			err = f()
		}
		done <- err
	}()
	return <-done
}

// make makes a directory that is a project with a limit.
func (p *projectPool) make(name string, id uint32, limit int64) (_ *os.File, err error) {
	if err := unix.Mkdirat(int(p.dir.Fd()), name, 0o700); err != nil {
		return nil, &os.PathError{Op: "mkdir", Path: p.o.Dir + "/" + name, Err: err}
	}
	d, err := openDirAt(p.dir, name)
	if err == nil {
		if err = setProject(d, id); err == nil {
			err = limitProject(d, id, limit)
		}
		if err == nil {
			return d, nil
		}
		_ = d.Close()
	}
	return nil, errors.Join(err, unix.Unlinkat(int(p.dir.Fd()), name, unix.AT_REMOVEDIR))
}

// adopt learns the projects in use and goes on with removals that were cut off.
func (p *projectPool) adopt() error {
	entries, err := os.ReadDir(p.o.Dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		d, err := openDirAt(p.dir, e.Name())
		if err != nil {
			continue // not a directory: not ours
		}
		id, err := projectOf(d)
		_ = d.Close()
		if err != nil {
			return err
		}
		p.used[id] = true
		if strings.HasPrefix(e.Name(), gonePrefix) {
			p.sweep(e.Name(), id)
		}
	}
	return nil
}

func (p *projectPool) Mechanism() string { return "project quotas of the data directory's file system" }

func (p *projectPool) claim() (uint32, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for id := uint32(firstProject); id < lastProject; id++ {
		if !p.used[id] {
			p.used[id] = true
			return id, nil
		}
	}
	return 0, dsec.Errorf(dsec.ResourceExhausted, "create disk", p.o.Dir, "no free quota project")
}

func (p *projectPool) release(id uint32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.used, id)
}

func (p *projectPool) Create(ctx context.Context, name string, limit int64, owner Owner) (*os.File, error) {
	const op = "create disk"
	if err := p.admit(op, name, limit); err != nil {
		return nil, err
	}
	id, err := p.claim()
	if err != nil {
		return nil, err
	}
	d, err := p.make(name, id, limit)
	if err != nil {
		p.release(id)
		return nil, wrap(op, name, err)
	}
	if err := d.Chown(owner.UID, owner.GID); err != nil {
		_ = d.Close()
		return nil, wrap(op, name, errors.Join(err, p.Remove(ctx, name)))
	}
	return d, nil
}

func (p *projectPool) Open(_ context.Context, name string) (*os.File, error) {
	const op = "open disk"
	if err := checkName(op, name); err != nil {
		return nil, err
	}
	d, err := openDirAt(p.dir, name)
	return d, wrap(op, name, err)
}

// project opens an entry and finds its project.
func (p *projectPool) project(ctx context.Context, name string) (*os.File, uint32, error) {
	d, err := p.Open(ctx, name)
	if err != nil {
		return nil, 0, err
	}
	id, err := projectOf(d)
	if err != nil {
		_ = d.Close()
		return nil, 0, err
	}
	return d, id, nil
}

func (p *projectPool) Usage(ctx context.Context, name string) (Usage, error) {
	d, id, err := p.project(ctx, name)
	if err != nil {
		return Usage{}, wrap("look at disk", name, err)
	}
	defer func() { _ = d.Close() }()
	u, err := projectUsage(d, id)
	return u, wrap("look at disk", name, err)
}

func (p *projectPool) Resize(ctx context.Context, name string, limit int64) error {
	const op = "resize disk"
	if err := p.admit(op, name, limit); err != nil {
		return err
	}
	d, id, err := p.project(ctx, name)
	if err != nil {
		return wrap(op, name, err)
	}
	defer func() { _ = d.Close() }()
	return wrap(op, name, limitProject(d, id, limit))
}

// Remove renames, which is quick; the files go in the background, and still
// count for their project, which is free when they are gone.
func (p *projectPool) Remove(ctx context.Context, name string) error {
	const op = "remove disk"
	d, id, err := p.project(ctx, name)
	if errors.Is(err, dsec.NotFound.Err()) {
		return nil
	}
	if err != nil {
		return wrap(op, name, err)
	}
	_ = d.Close()
	gone := gonePrefix + dsec.Random(12)
	fd := int(p.dir.Fd())
	if err := unix.Renameat(fd, name, fd, gone); err != nil {
		return wrap(op, name, err)
	}
	p.sweep(gone, id)
	return nil
}

func (p *projectPool) sweep(gone string, id uint32) {
	p.gone.Go(func() {
		if os.RemoveAll(filepath.Join(p.o.Dir, gone)) == nil { // else the next Open tries again
			_ = limitProject(p.dir, id, 0)
			p.release(id)
		}
	})
}

func (p *projectPool) List(context.Context) ([]string, error) {
	names, err := readNames(p.dir)
	return names, wrap("list disks", p.o.Dir, err)
}

func (p *projectPool) Space(context.Context) (Space, error) {
	size, free, err := statfs(p.o.Dir)
	return Space{Size: size, Free: free}, wrap("look at disk pool", p.o.Dir, err)
}

func (p *projectPool) Close() error {
	p.closing.Do(func() {
		p.gone.Wait()
		_ = p.dir.Close()
	})
	return nil
}
