package erofs

import "slices"

// dirNames lists all entries of a directory in order, "." and ".." among them.
func (n *Inode) dirNames() []string {
	names := append(n.Names(), ".", "..")
	slices.Sort(names)
	return names
}

// dirBlocks cuts sorted names into the groups that share a block. Binary search
// works because no name in a block sorts after one in the next.
func dirBlocks(names []string, fn func(group []string, size int)) {
	start, used := 0, 0
	for i, name := range names {
		need := direntSize + len(name)
		if used+need > BlockSize {
			fn(names[start:i], used)
			start, used = i, 0
		}
		used += need
	}
	fn(names[start:], used)
}

func (n *Inode) dirSize() int64 {
	var size int64
	dirBlocks(n.dirNames(), func(_ []string, used int) {
		size = roundUp(size, BlockSize) + int64(used)
	})
	return size
}

// dirBytes encodes the directory; blocks before the last are padded.
func (n *Inode) dirBytes(parent *Inode) []byte {
	out := make([]byte, 0, BlockSize)
	dirBlocks(n.dirNames(), func(group []string, used int) {
		start := int(roundUp(int64(len(out)), BlockSize))
		out = append(out, make([]byte, start+used-len(out))...)
		b := out[start:]
		nameoff := direntSize * len(group)
		for i, name := range group {
			c := n.children[name]
			switch name {
			case ".":
				c = n
			case "..":
				c = parent
			}
			d := b[i*direntSize:]
			le.PutUint64(d, c.nid())
			le.PutUint16(d[8:], uint16(nameoff))
			d[10] = fileType(c.Mode)
			nameoff += copy(b[nameoff:], name)
		}
	})
	return out
}
