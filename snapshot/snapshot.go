// Package snapshot makes layers of the disks of sandboxes: it packs the upper
// directory of an overlay into the two files of a layer, leaves out what a
// scrub asks to leave out, merges the layers of a long chain into one, and
// lists what a disk changed.
//
// # What a packed layer holds
//
// Everything the upper says, so that the layer on top of the same lowers shows
// what the sandbox saw: names, modes, owners as the sandbox has them, times to
// the nanosecond, extended attributes, ACLs and file capabilities, hard links,
// holes, device nodes and FIFOs, whiteouts and opaque directories. A directory
// of the lowers that was renamed is in it whole, because what overlayfs notes of
// it, the old path, means nothing once the layers below change. Not in it:
// sockets, and overlayfs' own attributes.
//
// # Hostile disks
//
// Whatever is in an upper was put there by what ran in the sandbox, and may
// change while it is read. Nothing is opened through a symbolic link, no device
// is opened, no FIFO is waited for, at most a few descriptors are open at a
// time, memory is taken for each name and attribute and never for contents,
// and each of them is bounded. A file that grows while it is read is cut at the
// size it had, one that shrinks ends where it ended.
//
// # Scrubbing
//
// The layer is built from what survives the scrub, and from nothing else: what is
// left out is in neither file, not even as free space. It concerns the packed
// layer only. Where a layer below has the same path, what it has there is seen
// again: a whiteout would write the name into the layer that the scrub keeps
// out of it. The report says where that is so.
package snapshot

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/image/erofs"
	"github.com/opendsec/dsec/internal/fault"
	"github.com/opendsec/dsec/internal/linux"
)

// Source is the writable layer of a sandbox at one moment.
type Source struct {
	// Upper is the upper directory of the overlay.
	Upper *os.File
	// View opens the tree as the sandbox sees it, read-only. It is called at most
	// once, when a directory of the lowers was renamed, and the file is closed by
	// who called.
	View func() (*os.File, error)
	// Base is the machine's id of the sandbox's root. The sandbox has IDs ids from
	// there; others below IDs are those of layers and already as inside.
	Base, IDs uint32
	// Below is what the upper lies on; nil: not known.
	Below *Below
	// Skip are paths that are not content.
	Skip []string
}

// Options of Pack.
type Options struct {
	Scrub      dsec.Scrub
	MaxEntries int64 // names; 0: DefaultEntries
}

// DefaultEntries is the most names of a disk that is packed. Each takes some
// 300 bytes of memory meanwhile.
const DefaultEntries = 4 << 20

// maxAttrs bounds the attributes of all files together, in bytes.
const maxAttrs = 256 << 20

// maxFile is the apparent size up to which a file is packed.
const maxFile = 16 << 40

// Result of Pack.
type Result struct {
	Entries  int64 // inodes
	MetaSize int64 // bytes
	DataSize int64 // bytes
	Report   *dsec.ScrubReport
}

// Pack writes the source as the two files of a layer. Both must be empty and
// hold nothing of value after an error. A disk that cannot be a layer is
// Invalid; one that needs more than there is, NoSpace.
func Pack(ctx context.Context, src Source, into image.Files, o Options) (Result, error) {
	const op = "pack disk"
	if err := o.Scrub.Validate(); err != nil {
		return Result{}, err
	}
	if o.MaxEntries == 0 {
		o.MaxEntries = DefaultEntries
	}
	upper, err := guarded(src.Upper)
	if err != nil {
		return Result{}, dsec.E(dsec.Internal, op, src.Upper.Name(), err)
	}
	defer upper.Close()
	p := &packer{ctx: ctx, src: src, opts: o, upper: upper, data: erofs.NewData(into.Data), links: map[inode]*erofs.Inode{}, left: o.MaxEntries,
		attrs: maxAttrs}
	defer p.close()
	if err := p.run(into); err != nil {
		class := fault.Class(err, dsec.Internal)
		if _, ok := errors.AsType[badDisk](err); ok {
			class = dsec.Invalid
		}
		return Result{}, dsec.E(class, op, "", err)
	}
	return p.result, nil
}

// badDisk is an error of the disk's own making.
type badDisk struct{ error }

func bad(format string, args ...any) error { return badDisk{fmt.Errorf(format, args...)} }

// guarded returns the directory in a read-only mount of its own on which no
// device can be opened. Kernels that cannot make one of a mount that is in no
// namespace are given such mounts only, without devices already.
func guarded(dir *os.File) (*os.File, error) {
	m, err := linux.Clone(dir, false)
	if errors.Is(err, unix.EINVAL) {
		return linux.OpenBeneath(dir, ".", unix.O_RDONLY|unix.O_DIRECTORY)
	}
	if err != nil {
		return nil, err
	}
	if err := linux.SetMountAttr(m, unix.MOUNT_ATTR_RDONLY|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NOEXEC); err != nil {
		m.Close()
		return nil, err
	}
	return m, nil
}
