// Package rootfs stacks layers into the writable root file system of a
// sandbox, and mounts each layer once per machine however many sandboxes use it.
//
// # Glossary
//
//   - layer mount: the EROFS mount of one layer. It is in no mount namespace that
//     anything else is in, and a Keeper holds its descriptor, so that it outlives
//     this process. One that is retired (Retire, Lost) nobody new gets.
//   - user: a name, usually a sandbox id, that keeps layer mounts mounted. A mount
//     without users goes away after a while, or at once with Evict.
//   - upper: the directory a sandbox writes to. Beside it lies work, overlayfs's own.
//   - plan: how mounts are kept and combined on this kernel, see Plan.
//
// # Promises
//
// A stacked root shows layer files with the ids that the sandbox's user
// namespace maps, refuses device nodes, and is overlayfs with fixed options:
// redirect_dir=on (renaming a lower directory works), xino=on (stable inode
// numbers), index=off and metacopy=off (EROFS lowers), volatile (nothing is
// synced at the end; after a power loss an upper is garbage). Use and Unuse are
// idempotent. All methods may be called concurrently. A root, once stacked,
// depends on no descriptor kept here.
package rootfs

import (
	"context"
	"os"

	"github.com/opendsec/dsec/layer"
)

// Keeper stores descriptors by name beyond the life of this process.
type Keeper interface {
	// Get returns a new descriptor, or NotFound.
	Get(ctx context.Context, name string) (*os.File, error)
	// Put stores a duplicate of f.
	Put(ctx context.Context, name string, f *os.File) error
	// Drop forgets it; unknown names are no error.
	Drop(ctx context.Context, name string) error
	// Names lists what is stored under names that begin with prefix.
	Names(ctx context.Context, prefix string) ([]string, error)
}

// Devices know what a layer's data are read from at this moment.
type Devices interface {
	// Device of a layer that is about to be mounted.
	Device(ctx context.Context, l layer.Local) (Device, error)
}

// Device is what the data of a layer are read from.
type Device struct {
	Path  string   // of the file; empty if the layer has no data
	Kind  string   // of the mechanism that brings them on demand; empty: all are there
	Mount *os.File // what the path leads through, closed when the layer is mounted; may be nil
	// Session is what the data come by, if it is of this device alone: when it
	// has ended before its mount, see Lost, reads of that are errors for ever.
	Session string
	// NoLoop: the mechanism does not see what is read through a loop device, which
	// would be given holes.
	NoLoop bool
}

// Plan is how mounts are kept and combined. The kernel decides which one
// works: overlayfs takes layers that are in no mount namespace since Linux
// 6.15; before, everything it combines has to be attached in the namespace of
// the thread that mounts it.
type Plan interface {
	Name() string
	// Admit makes a detached mount one that Clone and Overlay accept, under a
	// short name of its own.
	Admit(name string, mount *os.File) error
	// Retire undoes Admit. Unknown names are no error.
	Retire(name string) error
	// Clone returns a detached copy of an admitted mount. With a user namespace
	// the copy shows ids as that one maps them.
	Clone(mount, userns *os.File) (*os.File, error)
	// Overlay returns a detached overlay mount.
	Overlay(o Overlay) (*os.File, error)
	// Close ends what runs for the plan; mounts stay.
	Close() error
}

// Overlay is what Plan.Overlay combines.
type Overlay struct {
	Lowers []*os.File // admitted layer mounts, bottom first
	UserNS *os.File   // whose ids the lowers show
	Dir    *os.File   // directory that holds "upper" and "work"
	// View makes it read-only: the upper is the topmost lower, and nothing is
	// written beside it.
	View bool
}

// Root is what Mounts.Stack builds.
type Root struct {
	User   string         // for whom; it uses the layers
	Layers []layer.Digest // bottom first
	UserNS *os.File       // the sandbox's
	Dir    *os.File       // see PrepareDir
}
