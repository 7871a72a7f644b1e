package rootfs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/linux"
)

// namespaceName is what the Keeper knows the plan's mount namespace by.
const namespaceName = "rootfs/namespace"

// attached keeps its mounts in a private mount namespace with an otherwise
// empty root, and works in it on one thread. What it combines is attached there
// for the moment of combining; overlayfs then has copies of its own.
//
//	/k<name>   admitted mounts
//	/b<n>/     a combination being built: 0, 1, … lowers, dir
type attached struct {
	work chan func()
	done chan struct{}
	once sync.Once

	builds int // only on the thread
}

// Attached is the plan of older kernels, 6.1 and up. It also works on newer ones.
func Attached(ctx context.Context, k Keeper) (Plan, error) {
	ns, err := k.Get(ctx, namespaceName)
	if errors.Is(err, dsec.NotFound.Err()) {
		if ns, err = linux.NewMountNS(); err != nil {
			return nil, dsec.E(dsec.Internal, "make mount namespace", "", err)
		}
		err = k.Put(ctx, namespaceName, ns)
	}
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	p := &attached{work: make(chan func()), done: make(chan struct{})}
	ready := make(chan error, 1)
	go func() {
		defer close(p.done)
		err := linux.OnThread(func() error {
			if err := linux.JoinNS(ns, unix.CLONE_NEWNS); err != nil {
				return err
			}
			if err := sweepBuilds(); err != nil {
				return err
			}
			ready <- nil
			for f := range p.work {
				f()
			}
			return nil
		})
		if err != nil {
			ready <- err
		}
	}()
	if err := <-ready; err != nil {
		return nil, dsec.E(dsec.Internal, "enter mount namespace", "", err)
	}
	return p, nil
}

func (p *attached) Name() string { return "private mount namespace" }

func (p *attached) Close() error {
	p.once.Do(func() { close(p.work) })
	<-p.done
	return nil
}

// inside runs f on the thread in the namespace.
func (p *attached) inside(f func() error) error {
	done := make(chan error, 1)
	p.work <- func() { done <- f() }
	return <-done
}

func (p *attached) Admit(name string, mount *os.File) error {
	return p.inside(func() error {
		if err := os.Mkdir(kept(name), 0o700); err != nil {
			return err
		}
		if err := linux.Move(mount, nil, kept(name)); err != nil {
			return errors.Join(err, os.Remove(kept(name)))
		}
		return nil
	})
}

func (p *attached) Retire(name string) error {
	return p.inside(func() error { return detach(kept(name)) })
}

// detach unmounts a path, if it is a mount, and removes it.
func detach(path string) error {
	err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
	if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return &os.PathError{Op: "unmount", Path: path, Err: err}
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

func kept(name string) string {
	return "/k" + strings.NewReplacer("/", "-", ":", "-").Replace(name)
}

func (p *attached) Clone(mount, userns *os.File) (c *os.File, err error) {
	err = p.inside(func() error {
		c, err = cloneMapped(mount, userns)
		return err
	})
	return c, err
}

func (p *attached) Overlay(o Overlay) (m *os.File, err error) {
	// A directory of the host's own file systems can be cloned only from here, one
	// of an admitted mount only from inside; newer kernels do not mind.
	dir, err := linux.Clone(o.Dir, false)
	if err != nil && !errors.Is(err, unix.EINVAL) {
		return nil, err
	}
	err = p.inside(func() error {
		if dir == nil {
			if dir, err = linux.Clone(o.Dir, false); err != nil {
				return err
			}
		}
		p.builds++
		m, err = buildOverlay(fmt.Sprintf("/b%d", p.builds), dir, o)
		return err
	})
	if dir != nil {
		dir.Close()
	}
	return m, err
}

func buildOverlay(at string, dir *os.File, o Overlay) (m *os.File, err error) {
	if err := os.Mkdir(at, 0o700); err != nil {
		return nil, err
	}
	defer func() {
		if e := sweepBuild(at); e != nil && err == nil {
			m.Close()
			m, err = nil, e
		}
	}()
	lowers := make([]string, 0, len(o.Lowers))
	for i := len(o.Lowers) - 1; i >= 0; i-- { // the leftmost is the top
		name := strconv.Itoa(i)
		c, err := cloneMapped(o.Lowers[i], o.UserNS)
		if err != nil {
			return nil, err
		}
		err = attach(c, at+"/"+name)
		c.Close()
		if err != nil {
			return nil, err
		}
		lowers = append(lowers, name)
	}
	if err := attach(dir, at+"/dir"); err != nil {
		return nil, err
	}
	// An option holds at most 255 bytes: relative names make room for 64 layers.
	if err := unix.Chdir(at); err != nil {
		return nil, &os.PathError{Op: "change directory", Path: at, Err: err}
	}
	if o.View {
		lowers = append([]string{"dir/" + Upper}, lowers...)
		m, err = overlayFS(true).String("lowerdir", strings.Join(lowers, ":")).Mount(overlayAttrs | unix.MOUNT_ATTR_RDONLY)
	} else {
		m, err = overlayFS(false).String("lowerdir", strings.Join(lowers, ":")).
			String("upperdir", at+"/dir/"+Upper).
			String("workdir", at+"/dir/"+workName).Mount(overlayAttrs)
	}
	return m, errors.Join(err, os.NewSyscallError("change directory", unix.Chdir("/")))
}

func attach(m *os.File, path string) error {
	if err := os.Mkdir(path, 0o700); err != nil {
		return err
	}
	return linux.Move(m, nil, path)
}

// sweepBuilds removes what a process that died while it combined left behind.
func sweepBuilds() error {
	entries, err := os.ReadDir("/")
	if err != nil {
		return err
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "b") {
			if err := sweepBuild("/" + e.Name()); err != nil {
				return err
			}
		}
	}
	return nil
}

func sweepBuild(at string) error {
	entries, err := os.ReadDir(at)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := detach(at + "/" + e.Name()); err != nil {
			return err
		}
	}
	return os.Remove(at)
}
