package erofs

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Inode is one file, directory or node of the tree to write. Two names of one
// Inode are hard links.
type Inode struct {
	Mode   uint32 // type and permission bits, as st_mode
	UID    uint32
	GID    uint32
	Rdev   uint32 // see Rdev
	Nsec   uint32
	Mtime  int64 // seconds
	Size   int64 // of regular files
	Target string
	Xattrs []Xattr // sorted by SetXattr
	Runs   []Run   // where a regular file's contents are, in order, without holes

	children map[string]*Inode // of directories
	nlink    uint32
	pos      int64  // byte position in the metadata file, 0 before layout
	block    uint32 // first block of a directory or target that is not inline
	layout   byte
}

// Xattr is an extended attribute with its full name.
type Xattr struct {
	Name  string
	Value []byte
}

// Run is a part of a file that is contiguous in the data file. Runs may lie
// anywhere there and in any order. The chunks of the file are as large as the
// borders of its runs allow, so whoever makes runs keeps those borders at
// multiples of a power of two that gives a bearable number of chunks; the last
// run ends with the file.
type Run struct {
	Off   int64  // in the file, bytes
	Block uint32 // in the data file
	Count uint32 // blocks
}

// NewDir returns an empty directory.
func NewDir(mode uint32) *Inode {
	return &Inode{Mode: TypeDir | mode&0o7777, children: map[string]*Inode{}}
}

// IsDir reports whether the inode is a directory.
func (n *Inode) IsDir() bool { return n.Mode&TypeMask == TypeDir }

// IsWhiteout reports whether the inode hides a name in the layers below.
func (n *Inode) IsWhiteout() bool { return n.Mode&TypeMask == TypeChar && n.Rdev == 0 }

// Child returns the inode of a name in the directory, or nil.
func (n *Inode) Child(name string) *Inode { return n.children[name] }

// Link gives the inode a name in the directory, replacing what had it.
func (n *Inode) Link(name string, c *Inode) error {
	if err := checkName(name); err != nil {
		return err
	}
	if c.IsDir() && c.children == nil {
		c.children = map[string]*Inode{}
	}
	n.children[name] = c
	return nil
}

// Unlink takes the name, and everything below it, out of the directory.
func (n *Inode) Unlink(name string) { delete(n.children, name) }

// Clear takes every name out of the directory.
func (n *Inode) Clear() { clear(n.children) }

// Names lists the directory in the order of the format, by bytes.
func (n *Inode) Names() []string {
	names := make([]string, 0, len(n.children))
	for name := range n.children {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// SetXattr sets or replaces an attribute.
func (n *Inode) SetXattr(name string, value []byte) error {
	if _, _, err := splitXattr(name); err != nil {
		return err
	}
	if len(value) > MaxXattr {
		return fmt.Errorf("attribute %.64q: %d bytes, at most %d", name, len(value), MaxXattr)
	}
	i, found := slices.BinarySearchFunc(n.Xattrs, name, func(x Xattr, name string) int { return cmp.Compare(x.Name, name) })
	if found {
		n.Xattrs[i].Value = value
		return nil
	}
	n.Xattrs = slices.Insert(n.Xattrs, i, Xattr{name, value})
	if xattrSize(n.Xattrs) > xattrHeader+4*(65535-1) {
		return errors.New("attributes: more than 256 KiB on one file")
	}
	return nil
}

// Xattr returns the value of an attribute.
func (n *Inode) Xattr(name string) ([]byte, bool) {
	for _, x := range n.Xattrs {
		if x.Name == name {
			return x.Value, true
		}
	}
	return nil, false
}

// KnownXattr reports whether the format can hold an attribute of that name.
func KnownXattr(name string) bool {
	_, _, err := splitXattr(name)
	return err == nil
}

func splitXattr(name string) (index byte, suffix string, err error) {
	for _, p := range xattrPrefixes {
		if p.whole && name == p.prefix {
			return p.index, "", nil
		}
		if rest, ok := strings.CutPrefix(name, p.prefix); ok && !p.whole {
			if rest == "" || len(rest) > MaxName || strings.ContainsRune(rest, 0) {
				return 0, "", fmt.Errorf("attribute name %.64q: empty, too long or with a zero byte", name)
			}
			return p.index, rest, nil
		}
	}
	return 0, "", fmt.Errorf("attribute name %.64q: not of user, trusted, security or an ACL", name)
}

func checkName(name string) error {
	switch {
	case name == "" || name == "." || name == "..":
		return fmt.Errorf("name %q: reserved", name)
	case len(name) > MaxName:
		return fmt.Errorf("name %.32q…: %d bytes, at most %d", name, len(name), MaxName)
	case strings.ContainsAny(name, "/\x00"):
		return fmt.Errorf("name %q: a slash or a zero byte", name)
	}
	return nil
}

// xattrSize is the length of the attribute area behind an inode.
func xattrSize(xs []Xattr) int {
	if len(xs) == 0 {
		return 0
	}
	n := xattrHeader
	for _, x := range xs {
		_, suffix, _ := splitXattr(x.Name)
		n += roundUp(4+len(suffix)+len(x.Value), 4)
	}
	return n
}

// Walk calls fn for every name below the directory, depth first, in order. A
// hard-linked inode is visited once for each of its names.
func (n *Inode) Walk(fn func(path string, in *Inode) error) error {
	return n.walk("", fn)
}

func (n *Inode) walk(prefix string, fn func(string, *Inode) error) error {
	for _, name := range n.Names() {
		c := n.children[name]
		path := name
		if prefix != "" {
			path = prefix + "/" + name
		}
		if err := fn(path, c); err != nil {
			return err
		}
		if c.IsDir() {
			if err := c.walk(path, fn); err != nil {
				return err
			}
		}
	}
	return nil
}

// Inherit gives the directory every name of another, with the same inodes.
// What it had under such a name is replaced.
func (n *Inode) Inherit(from *Inode) { maps.Copy(n.children, from.children) }
