// Package snapshot makes layers of the disks of sandboxes: it packs the upper
// directory of an overlay into the two files of a layer, leaves out what a
// scrub asks to leave out, and lists what a disk changed. Layers of a long chain
// are merged by image.Merge.
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
// size it had, one that shrinks ends where it ended. Holes are neither read nor
// hashed without need; what is read, hashed and written altogether is bounded by
// what the disk holds, and every read looks at the context.
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
	"time"

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
	// Live is the directory that Upper was copied from at that Moment, with the same
	// inode numbers, and that goes on; nil: none. What has not changed there is
	// read there, because there it is in memory.
	Live   *os.File
	Moment time.Time
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
	MaxBytes   int64 // read of files; 0: DefaultBytes
}

// DefaultEntries is the most names of a disk that is packed. Each takes some
// 300 bytes of memory meanwhile.
const DefaultEntries = 4 << 20

// DefaultBytes is the most that is read of the files of a disk. It bounds what a
// disk costs on which many files share their bytes.
const DefaultBytes = 1 << 40

// maxAttrs bounds the attributes of all files together, in bytes.
const maxAttrs = 256 << 20

// clockLag is more than the clock of file times lags behind; a variable for tests.
var clockLag = time.Second

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
	p := NewPacking(into, o)
	if err := p.Read(ctx, src); err != nil {
		return Result{}, err
	}
	return p.Write()
}

// Packing is a Pack in steps, for a disk that must not change meanwhile: what
// can be done before and after the moment in which it does not.
type Packing struct {
	into  image.Files
	opts  Options
	data  *erofs.Data
	ahead map[inode]early
	since time.Time // what was changed before is as it was read ahead
	root  *erofs.Inode
	res   Result
}

// NewPacking begins one.
func NewPacking(into image.Files, o Options) *Packing {
	if o.MaxEntries == 0 {
		o.MaxEntries = DefaultEntries
	}
	if o.MaxBytes == 0 {
		o.MaxBytes = DefaultBytes
	}
	return &Packing{into: into, opts: o, data: erofs.NewData(into.Data)}
}

// ReadAhead copies the contents of a disk that is in use, so that Read only
// copies those that have changed since. A scrub looks at all contents when it
// decides: with one, it does nothing.
func (k *Packing) ReadAhead(ctx context.Context, src Source) error {
	if k.opts.Scrub.Any() {
		return nil
	}
	k.ahead = map[inode]early{}
	// A page that a program has mapped can be written without a trace in the times of
	// its file, until the page has been written to the disk: then the next write
	// is noted again. Clocks of files lag behind by a tick.
	k.since = time.Now().Add(-clockLag)
	if err := unix.Syncfs(int(src.Upper.Fd())); err != nil {
		return dsec.E(dsec.Internal, "sync disk", src.Upper.Name(), err)
	}
	return k.do(ctx, src, func(p *packer) error { return p.readAhead() })
}

// Read reads the disk.
func (k *Packing) Read(ctx context.Context, src Source) error {
	if err := k.opts.Scrub.Validate(); err != nil {
		return err
	}
	return k.do(ctx, src, func(p *packer) (err error) {
		k.root, err = p.read()
		if p.scrub != nil {
			k.res.Report = p.scrub.done()
		}
		return err
	})
}

func (k *Packing) do(ctx context.Context, src Source, fn func(*packer) error) error {
	const op = "pack disk"
	upper, err := guarded(src.Upper)
	if err != nil {
		return dsec.E(dsec.Internal, op, src.Upper.Name(), err)
	}
	defer upper.Close()
	if src.Live != nil {
		live, err := guarded(src.Live)
		if err != nil {
			return dsec.E(dsec.Internal, op, src.Live.Name(), err)
		}
		defer live.Close()
		src.Live = live
		k.since = src.Moment.Add(-clockLag)
	}
	p := &packer{ctx: ctx, src: src, opts: k.opts, upper: upper, data: k.data, ahead: k.ahead, since: k.since, links: map[inode]*erofs.Inode{},
		left: k.opts.MaxEntries, attrs: maxAttrs}
	defer p.close()
	err = fn(p)
	if err == nil {
		return nil
	}
	class := fault.Class(err, dsec.Internal)
	if _, ok := errors.AsType[badDisk](err); ok {
		class = dsec.Invalid
	}
	return dsec.E(class, op, "", err)
}

// Write finishes the files. What was read ahead and is not as it was is no
// longer in them.
func (k *Packing) Write() (Result, error) {
	blocks, err := erofs.Compact(k.into.Data, k.root)
	var stats erofs.Stats
	if err == nil {
		stats, err = erofs.Write(k.into.Meta, k.root, blocks)
	}
	if err != nil {
		return Result{}, dsec.E(fault.Class(err, dsec.Internal), "pack disk", "", err)
	}
	k.res.Entries, k.res.MetaSize, k.res.DataSize = stats.Inodes, stats.MetaSize, int64(blocks)*erofs.BlockSize
	return k.res, nil
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
