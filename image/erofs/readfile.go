package erofs

import (
	"errors"
	"fmt"
	"io"
)

// Contents reads a regular file.
func (n *Node) Contents() (*io.SectionReader, error) {
	if n.Mode&TypeMask != TypeRegular {
		return nil, errors.New("not a regular file")
	}
	if n.Size == 0 {
		return io.NewSectionReader(contents{n}, 0, 0), nil
	}
	if n.union&^(chunkFormatIndexes|chunkFormatBits) != 0 || n.union&chunkFormatIndexes == 0 || n.union&chunkFormatBits > 40 {
		return nil, fmt.Errorf("inode %d: chunk format %#x", n.NID, n.union)
	}
	return io.NewSectionReader(contents{n}, 0, n.Size), nil
}

// Runs lists where the contents are, holes left out.
func (n *Node) Runs() ([]Run, error) {
	if _, err := n.Contents(); err != nil || n.Size == 0 {
		return nil, err
	}
	var runs []Run
	shift := n.chunkShift()
	for off := int64(0); off < n.Size; off += 1 << shift {
		block, hole, err := n.chunk(off >> shift)
		if err != nil {
			return nil, err
		}
		if hole {
			continue
		}
		count := uint32(roundUp(min(1<<shift, n.Size-off), BlockSize) / BlockSize)
		if last := len(runs) - 1; last >= 0 && runs[last].Off+int64(runs[last].Count)*BlockSize == off &&
			runs[last].Block+runs[last].Count == block {
			runs[last].Count += count
			continue
		}
		runs = append(runs, Run{Off: off, Block: block, Count: count})
	}
	return runs, nil
}

func (n *Node) chunkShift() uint { return BlockBits + uint(n.union&chunkFormatBits) }

// chunk reads an index and checks that what it points to is in the data file.
func (n *Node) chunk(i int64) (block uint32, hole bool, err error) {
	table := roundUp(n.pos()+inodeSize+n.xattrs, 8)
	b, err := n.im.at(table+8*i, 8)
	if err != nil {
		return 0, false, fmt.Errorf("inode %d: chunk %d: %w", n.NID, i, err)
	}
	block = le.Uint32(b[4:])
	if block == nullBlock {
		return 0, true, nil
	}
	size := min(int64(1)<<n.chunkShift(), n.Size-i<<n.chunkShift())
	end := uint64(block) + uint64(roundUp(size, BlockSize))/BlockSize
	if le.Uint16(b[2:]) != dataDevice || end > n.im.dataBlocks {
		return 0, false, fmt.Errorf("inode %d: chunk %d: %w", n.NID, i, errShort)
	}
	return block, false, nil
}

type contents struct{ n *Node }

func (c contents) ReadAt(p []byte, off int64) (done int, err error) {
	shift := c.n.chunkShift()
	for done < len(p) {
		i := off >> shift
		in := off - i<<shift
		part := p[done:min(int64(len(p)), int64(done)+1<<shift-in)]
		block, hole, err := c.n.chunk(i)
		if err != nil {
			return done, err
		}
		if hole {
			clear(part)
		} else if c.n.im.data == nil {
			return done, errors.New("no data file")
		} else if _, err := c.n.im.data.ReadAt(part, int64(block)*BlockSize+in); err != nil {
			return done, err
		}
		done += len(part)
		off += int64(len(part))
	}
	return done, nil
}

// Check reads everything in the metadata file and reports the first thing that
// is wrong: a layer that passes is one that this package could have written.
func (im *Image) Check() error {
	root, err := im.Root()
	if err != nil {
		return err
	}
	links := map[uint64]uint32{root.NID: 2}
	nodes := map[uint64]uint32{root.NID: root.Nlink}
	left := im.metaSize // what does not overlap fits
	if err := root.checkBody(&left); err != nil {
		return err
	}
	err = im.Walk(func(path string, n *Node) error {
		if n.Mode&TypeMask == TypeDir {
			links[n.NID] += 2
		} else {
			links[n.NID]++
		}
		if _, seen := nodes[n.NID]; seen {
			return nil
		}
		nodes[n.NID] = n.Nlink
		return n.checkBody(&left)
	})
	if err != nil {
		return err
	}
	if uint64(len(nodes)) != im.inodes {
		return fmt.Errorf("%d inodes, the superblock says %d", len(nodes), im.inodes)
	}
	return im.checkLinks(nodes, links)
}

func (im *Image) checkLinks(nodes, links map[uint64]uint32) error {
	for nid, want := range nodes {
		n, err := im.Node(nid)
		if err != nil {
			return err
		}
		if n.Mode&TypeMask == TypeDir {
			entries, err := n.Entries()
			if err != nil {
				return err
			}
			for _, e := range entries {
				if e.Type == fileType(TypeDir) {
					links[nid]++
				}
			}
		}
		if links[nid] != want {
			return fmt.Errorf("inode %d: %d links, it says %d", nid, links[nid], want)
		}
	}
	return nil
}

func (n *Node) checkBody(left *int64) error {
	if *left -= n.xattrs; *left < 0 {
		return fmt.Errorf("inode %d: attributes overlap others", n.NID)
	}
	if _, err := n.Xattrs(); err != nil {
		return err
	}
	switch n.Mode & TypeMask {
	case TypeRegular:
		if n.Size > 0 {
			*left -= 8 * (n.Size >> n.chunkShift())
		}
		if *left < 0 {
			return fmt.Errorf("inode %d: chunk indexes overlap others", n.NID)
		}
		_, err := n.Runs()
		return err
	case TypeSymlink:
		_, err := n.Target()
		return err
	}
	return nil
}
