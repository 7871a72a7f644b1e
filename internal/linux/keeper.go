package linux

import (
	"context"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/opendsec/dsec"
)

// Keeper keeps descriptors by name, but not beyond this process, as a hold does.
// Its methods may be called concurrently.
type Keeper struct {
	mu sync.Mutex
	m  map[string]*os.File
}

// NewKeeper has none.
func NewKeeper() *Keeper { return &Keeper{m: map[string]*os.File{}} }

// Get returns a new descriptor, or NotFound.
func (k *Keeper) Get(_ context.Context, name string) (*os.File, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	f := k.m[name]
	if f == nil {
		return nil, dsec.E(dsec.NotFound, "get descriptor", name, nil)
	}
	return Duplicate(f)
}

// Put stores a duplicate of f.
func (k *Keeper) Put(_ context.Context, name string, f *os.File) error {
	d, err := Duplicate(f)
	if err != nil {
		return err
	}
	k.mu.Lock()
	old := k.m[name]
	k.m[name] = d
	k.mu.Unlock()
	if old != nil {
		_ = old.Close() // replaced
	}
	return nil
}

// Drop forgets it; unknown names are no error.
func (k *Keeper) Drop(_ context.Context, name string) error {
	k.mu.Lock()
	f := k.m[name]
	delete(k.m, name)
	k.mu.Unlock()
	if f != nil { // the end of a mount may wait for who is to be given another name
		_ = f.Close() // forgotten
	}
	return nil
}

// Names lists what is kept under names that begin with prefix, sorted.
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
