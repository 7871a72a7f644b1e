package erofs

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Entries lists a directory in order, without "." and "..".
func (n *Node) Entries() ([]Dirent, error) {
	all, err := n.dirents()
	if err != nil {
		return nil, fmt.Errorf("directory %d: %w", n.NID, err)
	}
	return slices.DeleteFunc(all, func(d Dirent) bool { return d.Name == "." || d.Name == ".." }), nil
}

// Lookup finds a name in a directory; nil if there is none.
func (n *Node) Lookup(name string) (*Node, error) {
	all, err := n.Entries()
	if err != nil {
		return nil, err
	}
	i, ok := slices.BinarySearchFunc(all, name, func(d Dirent, name string) int { return strings.Compare(d.Name, name) })
	if !ok {
		return nil, nil
	}
	return n.im.Node(all[i].NID)
}

// Open reads the inode of a name.
func (n *Node) Open(e Dirent) (*Node, error) { return n.im.Node(e.NID) }

func (n *Node) dirents() ([]Dirent, error) {
	if n.Mode&TypeMask != TypeDir {
		return nil, errors.New("not a directory")
	}
	b, err := n.body()
	if err != nil {
		return nil, err
	}
	var out []Dirent
	for len(b) > 0 {
		block := b[:min(len(b), BlockSize)]
		b = b[len(block):]
		if out, err = blockDirents(out, block); err != nil {
			return nil, err
		}
	}
	if !slices.IsSortedFunc(out, func(a, b Dirent) int { return strings.Compare(a.Name, b.Name) }) {
		return nil, errors.New("names out of order")
	}
	for i := 1; i < len(out); i++ {
		if out[i].Name == out[i-1].Name {
			return nil, fmt.Errorf("name %q twice", out[i].Name)
		}
	}
	return out, nil
}

func blockDirents(out []Dirent, b []byte) ([]Dirent, error) {
	if len(b) < direntSize {
		return nil, errShort
	}
	first := int(le.Uint16(b[8:]))
	if first < direntSize || first%direntSize != 0 || first > len(b) {
		return nil, fmt.Errorf("names start at %d", first)
	}
	for i := 0; i < first; i += direntSize {
		start, end := int(le.Uint16(b[i+8:])), len(b)
		if i+direntSize < first {
			end = int(le.Uint16(b[i+direntSize+8:]))
		}
		if start < first || start > end || end > len(b) {
			return nil, errShort
		}
		name := b[start:end]
		if i+direntSize == first {
			if z := bytes.IndexByte(name, 0); z >= 0 {
				name = name[:z]
			}
		}
		d := Dirent{Name: string(name), NID: le.Uint64(b[i:]), Type: b[i+10]}
		if err := checkName(d.Name); err != nil && d.Name != "." && d.Name != ".." {
			return nil, err
		}
		out = append(out, d)
	}
	return out, nil
}

// Walk calls fn for every name below the root, depth first, in order.
func (im *Image) Walk(fn func(path string, n *Node) error) error {
	root, err := im.Root()
	if err != nil {
		return err
	}
	return (&walker{fn: fn, dirs: map[uint64]bool{}, left: im.metaSize}).dir("", root, root)
}

type walker struct {
	fn   func(string, *Node) error
	dirs map[uint64]bool // seen: a directory with two names would never end
	left int64           // bytes of directories that can still come without overlap
}

func (w *walker) dir(prefix string, d, parent *Node) error {
	if w.dirs[d.NID] {
		return fmt.Errorf("directory %d: has two names", d.NID)
	}
	w.dirs[d.NID] = true
	if w.left -= d.Size; w.left < 0 {
		return fmt.Errorf("directory %d: overlaps others", d.NID)
	}
	if len(prefix) > MaxPath {
		return fmt.Errorf("directory %d: a path of %d bytes", d.NID, len(prefix))
	}
	all, err := d.dirents()
	if err != nil {
		return fmt.Errorf("directory %d: %w", d.NID, err)
	}
	dots := 0
	for _, e := range all {
		switch {
		case e.Name == "." && e.NID == d.NID, e.Name == ".." && e.NID == parent.NID:
			dots++
			continue
		case e.Name == "." || e.Name == "..":
			return fmt.Errorf("directory %d: %q leads elsewhere", d.NID, e.Name)
		}
		if err := w.name(prefix+e.Name, e, d); err != nil {
			return err
		}
	}
	if dots != 2 {
		return fmt.Errorf("directory %d: no %q or %q", d.NID, ".", "..")
	}
	return nil
}

func (w *walker) name(path string, e Dirent, parent *Node) error {
	n, err := parent.im.Node(e.NID)
	if err != nil {
		return err
	}
	if e.Type != fileType(n.Mode) {
		return fmt.Errorf("inode %d: type %d in its directory, mode %o", n.NID, e.Type, n.Mode)
	}
	if err := w.fn(path, n); err != nil {
		return err
	}
	if n.Mode&TypeMask == TypeDir {
		return w.dir(path+"/", n, parent)
	}
	return nil
}
