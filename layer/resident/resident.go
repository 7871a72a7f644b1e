// Package resident finds out what of a mounted layer is in the page cache: what
// a whole layer's sandboxes have touched, which raises no requests that could be
// recorded.
//
// The pages of a mounted layer belong to the inodes of its EROFS mount. A file
// that nobody looked up has none, and the kernel can be asked for exactly the
// names it has at hand (RESOLVE_CACHED), so the cost is that of what was looked
// up, not of the tree: nothing is brought into the caches by looking, no
// directory of the mount is listed, and no content is read. Where contents lie
// is read from the metadata.
//
// What is in the page cache is what was read and the kernel's readahead around
// it, without order, less what was dropped under memory pressure: of files whose
// names were dropped first, all. It needs root, or the owner of each file, which
// the kernel wants for mincore.
package resident

import (
	"cmp"
	"errors"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image/erofs"
	"github.com/opendsec/dsec/internal/fault"
	"github.com/opendsec/dsec/layer"
)

const (
	page     = erofs.BlockSize
	window   = 64 << 20 // of a file, looked at in one call
	attempts = 3        // of a lookup that met a change of the same directory cache

	resolveCached = 0x20 // RESOLVE_CACHED of openat2(2), Linux 5.12
)

// Of lists the ranges of the data file that are in the page cache of the mount,
// by their place. mount is the root of the layer's EROFS mount, attached or not,
// open in any way (O_PATH does); im its metadata.
func Of(mount *os.File, im *erofs.Image) ([]layer.Range, error) {
	const op = "look at page cache"
	if size := os.Getpagesize(); size != page {
		return nil, dsec.Errorf(dsec.Unsupported, op, mount.Name(), "pages of %d bytes", size)
	}
	root, err := im.Root()
	if err != nil {
		return nil, dsec.E(dsec.Corrupt, op, mount.Name(), err)
	}
	l := &looker{done: map[uint64]bool{}, vec: make([]byte, window/page)}
	if err := l.dir(int(mount.Fd()), root, 0); err != nil {
		return nil, dsec.E(fault.Class(err, dsec.Internal), op, mount.Name(), err)
	}
	return joined(l.found), nil
}

type looker struct {
	done  map[uint64]bool // files, by inode: hard links are one
	found []layer.Range
	vec   []byte
}

// deepest is how far down directories are followed: each holds a descriptor.
const deepest = 256

func (l *looker) dir(fd int, d *erofs.Node, depth int) error {
	if depth > deepest {
		return nil
	}
	entries, err := d.Entries()
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.Type != typeDir && (e.Type != typeRegular || l.done[e.NID]) {
			continue
		}
		if err := l.entry(fd, d, e, depth); err != nil {
			return err
		}
	}
	return nil
}

// The types of directory entries that matter.
const (
	typeRegular = 1
	typeDir     = 2
)

func (l *looker) entry(at int, d *erofs.Node, e erofs.Dirent, depth int) error {
	flags := uint64(unix.O_RDONLY | unix.O_CLOEXEC | unix.O_NOFOLLOW)
	if e.Type == typeDir {
		flags |= unix.O_DIRECTORY | unix.O_PATH
	}
	fd, err := openCached(at, e.Name, flags)
	if errors.Is(err, unix.EAGAIN) {
		return nil // never looked up, so never read
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	n, err := d.Open(e)
	if err != nil {
		return err
	}
	if e.Type == typeDir {
		return l.dir(fd, n, depth+1)
	}
	l.done[e.NID] = true
	return l.file(fd, n)
}

// openCached opens a name only if the kernel has it at hand.
func openCached(at int, name string, flags uint64) (fd int, err error) {
	how := unix.OpenHow{Flags: flags, Resolve: resolveCached | unix.RESOLVE_BENEATH | unix.RESOLVE_NO_XDEV | unix.RESOLVE_NO_SYMLINKS}
	for range attempts {
		fd, err = unix.Openat2(at, name, &how)
		if !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR) {
			break
		}
	}
	return fd, err
}

// file adds the ranges of the data file that the pages of a file are copies of.
func (l *looker) file(fd int, n *erofs.Node) error {
	if n.Size == 0 {
		return nil
	}
	if none, err := nothingCached(fd, 0, n.Size); err != nil || none {
		return err
	}
	runs, err := n.Runs()
	if err != nil {
		return err
	}
	for _, r := range runs {
		size := int64(r.Count) * page
		for off := int64(0); off < size; off += window {
			part := min(window, size-off)
			if err := l.pages(fd, r.Off+off, part, int64(r.Block)*page+off); err != nil {
				return err
			}
		}
	}
	return nil
}

// pages looks at one part of a file, which lies in the data file at to.
func (l *looker) pages(fd int, off, size, to int64) error {
	if none, err := nothingCached(fd, off, size); err != nil || none {
		return err
	}
	m, err := unix.Mmap(fd, off, int(size), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Munmap(m) }() // of what was just mapped
	vec := l.vec[:size/page]
	if err := mincore(m, vec); err != nil {
		return err
	}
	for i, v := range vec {
		if v&1 == 0 {
			continue
		}
		at := to + int64(i)*page
		if k := len(l.found) - 1; k >= 0 && l.found[k].Off+l.found[k].Len == at {
			l.found[k].Len += page
		} else {
			l.found = append(l.found, layer.Range{Off: at, Len: page})
		}
	}
	return nil
}

// nothingCached asks without mapping; a kernel before 6.5 cannot say.
func nothingCached(fd int, off, size int64) (bool, error) {
	var st unix.Cachestat_t
	err := unix.Cachestat(uint(fd), &unix.CachestatRange{Off: uint64(off), Len: uint64(size)}, &st, 0)
	if errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EOPNOTSUPP) {
		return false, nil
	}
	return st.Cache == 0, err
}

func joined(ranges []layer.Range) []layer.Range {
	slices.SortFunc(ranges, func(a, b layer.Range) int { return cmp.Compare(a.Off, b.Off) })
	out := ranges[:0]
	for _, r := range ranges {
		if n := len(out) - 1; n >= 0 && out[n].Off+out[n].Len >= r.Off {
			out[n].Len = max(out[n].Len, r.Off+r.Len-out[n].Off)
			continue
		}
		out = append(out, r)
	}
	return out
}
