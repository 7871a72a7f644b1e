// Package diskpool gives every sandbox a directory that cannot grow beyond a
// limit: a write that would is refused with EDQUOT or ENOSPC, which programs
// treat alike, at exactly the limit.
//
// # Mechanisms
//
// Open tries, in this order, and says which one it took and why not an
// earlier one: project quotas of the file system that holds the data
// directory (ext4, XFS); a btrfs in one sparse file, a subvolume with a quota
// group per sandbox; an ext4 in a sparse file per sandbox.
//
// # Mounts
//
// File systems that a pool makes are mounted detached: they are in no mount
// namespace, show up in no mountinfo and end when the last descriptor closes.
// A Keeper outlives this process and keeps those descriptors; a pool that is
// opened again takes them from there.
//
// # Promises
//
// Create of an existing name is AlreadyExists. Remove of an unknown name
// succeeds; the name is free when it returns, the blocks come back soon after
// and count as used until then. Entries survive the process, and the machine
// as far as it was told to sync. A Pool may be used concurrently.
package diskpool

import (
	"context"
	"errors"
	"os"

	"github.com/opendsec/dsec/internal/linux"
)

// Usage of one entry, in bytes.
type Usage struct {
	Used  int64
	Limit int64
}

// Space is what is left of the whole pool, in bytes. Free is the lesser of
// what the pool and what the file system under it can still take.
type Space struct {
	Size int64
	Free int64
}

// ErrFailed: what is in the pool is lost, or will be. It mounts again when nothing
// has it any more.
var ErrFailed = errors.New("its file system is read-only, because the disk below it was full or failed: make room there, then dsec down and dsec up")

// Pool is a set of size-limited directories.
type Pool interface {
	// Mechanism names it in a few words; Why says how it was chosen.
	Mechanism() string
	Why() string
	// Create makes an empty directory of mode 0700 owned by uid and gid and
	// returns it opened. NoSpace if the file system under the pool has less
	// than its reserve left.
	Create(ctx context.Context, name string, limit int64, owner Owner) (*os.File, error)
	// Open returns an existing directory.
	Open(ctx context.Context, name string) (*os.File, error)
	Usage(ctx context.Context, name string) (Usage, error)
	// Resize changes the limit; one below what is used only stops growth.
	Resize(ctx context.Context, name string, limit int64) error
	Remove(ctx context.Context, name string) error
	List(ctx context.Context) ([]string, error)
	// Space is the error ErrFailed, of class Unavailable, if the file system of the
	// pool has failed.
	Space(ctx context.Context) (Space, error)
	// Close waits for removals under way and lets go; it removes nothing.
	Close() error
}

// Shrinks says whether Resize can also lower a limit.
func Shrinks(p Pool) bool {
	_, isFile := p.(*loopPool)
	return !isFile
}

// Snapshotter is a Pool that can copy a directory in a moment, however much is
// in it.
type Snapshotter interface {
	// Snapshot makes a read-only entry of that other name which holds what the
	// directory holds now, written or not yet. It is an entry like others: Remove
	// ends it, and List names it. Blocks that are removed from the directory
	// meanwhile go on counting for it.
	Snapshot(ctx context.Context, name, as string) (*os.File, error)
}

// Shared is a Pool whose entries are directories, by their names, of one file system
// that has nothing else in it.
type Shared interface {
	// Root is its root directory; it is the pool's to close.
	Root() *os.File
}

// Owner of a new directory.
type Owner struct{ UID, GID int }

// Keeper stores descriptors by name beyond the life of this process.
type Keeper interface {
	// Get returns a new descriptor, or NotFound.
	Get(ctx context.Context, name string) (*os.File, error)
	// Put stores a duplicate of f.
	Put(ctx context.Context, name string, f *os.File) error
	// Drop forgets it; unknown names are no error.
	Drop(ctx context.Context, name string) error
}

// The mechanisms, for Options.Mechanism.
const (
	ProjectQuota = "project-quota"
	Btrfs        = "btrfs"
	LoopExt4     = "loop-ext4"
)

// Options of Open.
type Options struct {
	Dir       string // where the pool lives; made if missing
	Size      int64  // most that a pool file may grow to; 0: 90 % of the file system's free space
	Reserve   int64  // free space of the file system below which Create refuses; 0: the lesser of 5 % and 2 GiB
	Mechanism string // "" probes; else only this one is tried
	Keeper    Keeper // nil: the pool holds its mounts itself and they end with Close

	own *linux.Keeper // then
}

// letGo ends the mounts that the pool holds itself.
func (o Options) letGo() {
	if o.own != nil {
		o.own.Close()
	}
}
