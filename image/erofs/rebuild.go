package erofs

import "fmt"

// Tree reads the whole image as a tree to write. Two names of one inode are two
// names of one Inode.
func (im *Image) Tree() (*Inode, error) {
	top, err := im.Root()
	if err != nil {
		return nil, err
	}
	root, err := top.inode()
	if err != nil {
		return nil, err
	}
	seen := map[uint64]*Inode{top.NID: root}
	dirs := map[string]*Inode{"": root}
	err = im.Walk(func(path string, n *Node) error {
		in := seen[n.NID]
		if in == nil {
			if in, err = n.inode(); err != nil {
				return fmt.Errorf("%q: %w", path, err)
			}
			seen[n.NID] = in
		}
		dir, name := splitPath(path)
		if in.IsDir() {
			dirs[path] = in
		}
		return dirs[dir].Link(name, in)
	})
	return root, err
}

func splitPath(path string) (dir, name string) {
	for i := len(path) - 1; i >= 0; i-- {
		if path[i] == '/' {
			return path[:i], path[i+1:]
		}
	}
	return "", path
}

// inode is the node as it is written, without names.
func (n *Node) inode() (*Inode, error) {
	in := &Inode{Mode: n.Mode, UID: n.UID, GID: n.GID, Rdev: n.Rdev, Nsec: n.Nsec, Mtime: n.Mtime}
	var err error
	if in.Xattrs, err = n.Xattrs(); err != nil {
		return nil, err
	}
	switch n.Mode & TypeMask {
	case TypeRegular:
		in.Size = n.Size
		in.Runs, err = n.Runs()
	case TypeSymlink:
		in.Target, err = n.Target()
	case TypeDir:
		in.children = map[string]*Inode{}
	}
	return in, err
}
