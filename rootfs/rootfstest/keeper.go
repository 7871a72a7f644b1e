// Package rootfstest has what tests of mounts need instead of a hold.
package rootfstest

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// Keeper keeps descriptors as hold does, but not beyond this process. It
// implements rootfs.Keeper.
type Keeper struct {
	mu sync.Mutex
	m  map[string]*os.File
}

// NewKeeper has none.
func NewKeeper() *Keeper { return &Keeper{m: map[string]*os.File{}} }

// duplicate does not use Fd, which would make a descriptor block that all share.
func duplicate(f *os.File) (*os.File, error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	fd := -1
	if e := raw.Control(func(n uintptr) { fd, err = unix.FcntlInt(n, unix.F_DUPFD_CLOEXEC, 0) }); e != nil || err != nil {
		return nil, errors.Join(e, err)
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}

// Get implements rootfs.Keeper.
func (k *Keeper) Get(_ context.Context, name string) (*os.File, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	f := k.m[name]
	if f == nil {
		return nil, dsec.E(dsec.NotFound, "get descriptor", name, nil)
	}
	return duplicate(f)
}

// Put implements rootfs.Keeper.
func (k *Keeper) Put(_ context.Context, name string, f *os.File) error {
	d, err := duplicate(f)
	if err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if old := k.m[name]; old != nil {
		_ = old.Close() // replaced
	}
	k.m[name] = d
	return nil
}

// Drop implements rootfs.Keeper.
func (k *Keeper) Drop(_ context.Context, name string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if f := k.m[name]; f != nil {
		_ = f.Close() // forgotten
		delete(k.m, name)
	}
	return nil
}

// Names implements rootfs.Keeper.
func (k *Keeper) Names(_ context.Context, prefix string) (names []string, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for n := range k.m {
		if strings.HasPrefix(n, prefix) {
			names = append(names, n)
		}
	}
	slices.Sort(names)
	return names, nil
}

// Close drops all there is.
func (k *Keeper) Close() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, f := range k.m {
		_ = f.Close() // forgotten
	}
	clear(k.m)
}
