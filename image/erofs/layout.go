package erofs

import (
	"fmt"
)

// inlineMax is the longest tail kept behind its inode; a longer one would waste
// more in moving the inode than it saves.
const inlineMax = 2048

// layout is the plan of a metadata file: every inode with its position.
type layout struct {
	inodes   []*Inode // in the order of positions; the root is first
	parents  map[*Inode]*Inode
	end      int64 // of the inode area, bytes
	blocks   int64 // of the whole file
	flatBase uint32
	flat     bool // contents are in the file itself, see WriteFlat
}

// plan orders and places every inode reachable from root.
func plan(root *Inode, flat bool) (*layout, error) {
	l := &layout{parents: map[*Inode]*Inode{root: root}, flat: flat}
	if err := l.collect(root); err != nil {
		return nil, err
	}
	pos := int64(BlockSize)
	for i, n := range l.inodes {
		if err := n.check(); err != nil {
			return nil, fmt.Errorf("inode %d: %w", i, err)
		}
		pos = n.place(pos, flat)
	}
	l.end = pos
	next := roundUp(l.end, BlockSize) / BlockSize
	for _, n := range l.inodes {
		if own := n.ownBlocks(); own > 0 {
			n.block = uint32(next)
			next += own
		}
		if next > maxBlocks {
			return nil, fmt.Errorf("metadata: more than 16 TiB")
		}
	}
	if flat {
		for _, n := range l.inodes {
			if n.isFile() {
				n.block = uint32(next)
				next += roundUp(n.Size, BlockSize) / BlockSize
			}
			if next > maxBlocks {
				return nil, fmt.Errorf("image: more than 16 TiB")
			}
		}
	}
	l.blocks = next
	l.flatBase = uint32(roundUp(next*BlockSize, Align) / BlockSize)
	return l, nil
}

// collect numbers the tree in pre-order, so that what lies together in the
// tree lies together in the file.
func (l *layout) collect(root *Inode) error {
	seen, twice := map[*Inode]bool{}, ""
	var visit func(n *Inode)
	visit = func(n *Inode) {
		seen[n] = true
		n.nlink, n.pos, n.block = 0, 0, 0
		l.inodes = append(l.inodes, n)
		if !n.IsDir() {
			return
		}
		n.nlink = 2
		for _, name := range n.Names() {
			c := n.children[name]
			switch {
			case !seen[c]:
				visit(c)
			case c.IsDir():
				twice = name
				continue
			}
			if c.IsDir() {
				l.parents[c] = n
				n.nlink++
			} else {
				c.nlink++
			}
		}
	}
	visit(root)
	if twice != "" {
		return fmt.Errorf("directory %q: has two names", twice)
	}
	return nil
}

func (n *Inode) check() error {
	switch {
	case fileType(n.Mode) == 0:
		return fmt.Errorf("mode %o: unknown type", n.Mode)
	case n.Mode&TypeMask == TypeSymlink && (n.Target == "" || len(n.Target) > MaxTarget):
		return fmt.Errorf("symbolic link of %d bytes: 1 to %d", len(n.Target), MaxTarget)
	case n.Size < 0:
		return fmt.Errorf("size %d", n.Size)
	case n.Nsec >= 1e9:
		return fmt.Errorf("%d nanoseconds", n.Nsec)
	}
	return nil
}

// place chooses the inode's layout and position, not before pos, and returns
// the position behind it.
func (n *Inode) place(pos int64, flat bool) int64 {
	head := int64(inodeSize + xattrSize(n.Xattrs))
	n.layout = layoutPlain
	n.pos = pos
	switch size := n.bodySize(); {
	case n.isFile() && !flat:
		n.layout = layoutChunked
		_, count := chunks(n.Size, n.Runs)
		// The kernel reads the array at the next multiple of 8 behind the
		// attributes.
		head = roundUp(head, 8) + 8*count
	case size > 0:
		tail := size % BlockSize
		if tail == 0 || tail > inlineMax {
			break
		}
		n.layout = layoutInline
		// A tail must not cross a block.
		for (n.pos+head)%BlockSize+tail > BlockSize {
			n.pos += inodeAlign
		}
		head += tail
	}
	return roundUp(n.pos+head, inodeAlign)
}

// isFile reports whether the inode has contents.
func (n *Inode) isFile() bool { return n.Mode&TypeMask == TypeRegular && n.Size > 0 }

// bodySize is the i_size of what lives in the metadata file.
func (n *Inode) bodySize() int64 {
	switch n.Mode & TypeMask {
	case TypeDir:
		return n.dirSize()
	case TypeSymlink:
		return int64(len(n.Target))
	}
	return 0
}

// ownBlocks is the number of whole blocks the inode needs outside the inode area.
func (n *Inode) ownBlocks() int64 {
	size := n.bodySize()
	switch n.layout {
	case layoutInline:
		return size / BlockSize
	case layoutPlain:
		return roundUp(size, BlockSize) / BlockSize
	}
	return 0
}

func (n *Inode) nid() uint64 { return uint64(n.pos) / inodeAlign }
