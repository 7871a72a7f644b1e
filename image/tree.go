package image

import (
	"errors"
	"fmt"
	"path"
	"strings"

	"github.com/opendsec/dsec/image/erofs"
)

// maxLinks bounds the symbolic links followed for one name, as the kernel does.
const maxLinks = 40

// maxDepth bounds the nesting of directories, which links can multiply.
const maxDepth = erofs.MaxPath / 2

// resolve finds the directory of a name in the tree. Symbolic links are
// followed inside the tree and never out of it, so "/" and ".." in a link end
// at the root. With create, what is missing becomes a directory 0755 of root,
// and what is in the way and not a directory gives way; without, nil is
// returned instead.
func (m *merger) resolve(name string, create bool) (_ *erofs.Inode, err error) {
	stack, names := []*erofs.Inode{m.root}, []string{}
	todo := splitPath(name)
	for links := 0; len(todo) > 0; {
		part := todo[0]
		todo = todo[1:]
		dir := stack[len(stack)-1]
		if part == ".." {
			stack, names = stack[:max(1, len(stack)-1)], names[:max(0, len(names)-1)]
			continue
		}
		c := dir.Child(part)
		if c != nil && c.Mode&erofs.TypeMask == erofs.TypeSymlink {
			if links++; links > maxLinks {
				return nil, errors.New("too many symbolic links")
			}
			if strings.HasPrefix(c.Target, "/") {
				stack, names = stack[:1], names[:0]
			}
			todo = append(splitPath(c.Target), todo...)
			continue
		}
		if c == nil || !c.IsDir() {
			if !create {
				return nil, nil
			}
			if c, err = m.implied(); err != nil {
				return nil, err
			}
			if err := m.link(dir, part, c); err != nil {
				return nil, err
			}
		}
		stack, names = append(stack, c), append(names, part)
		if len(names) > maxDepth {
			return nil, fmt.Errorf("more than %d directories deep", maxDepth)
		}
	}
	if n := len(strings.Join(names, "/")); n > erofs.MaxPath-erofs.MaxName-1 {
		return nil, fmt.Errorf("a path of %d bytes", n)
	}
	return stack[len(stack)-1], nil
}

func splitPath(name string) []string {
	var parts []string
	for part := range strings.SplitSeq(name, "/") {
		if part != "" && part != "." {
			parts = append(parts, part)
		}
	}
	return parts
}

func (m *merger) link(dir *erofs.Inode, name string, c *erofs.Inode) error {
	if m.made++; m.made > 2*m.opts.MaxEntries {
		return fmt.Errorf("more than %d entries", m.opts.MaxEntries)
	}
	return dir.Link(name, c)
}

// member gives one entry its place.
func (m *merger) member(e *entry) error {
	if e.mode >= opaqueMark {
		return m.markOpaque(e.name, m.opts.Loose && e.mode == replacedMark)
	}
	name := path.Join(m.opts.At, e.name)
	if name == "" {
		return m.setDir(m.root, e)
	}
	dir, err := m.resolve(path.Dir(name), true)
	if err != nil {
		return err
	}
	base := path.Base(name)
	old := dir.Child(base)
	if e.isLink {
		return m.hardLink(dir, base, e)
	}
	if e.mode&erofs.TypeMask == erofs.TypeDir {
		if old == nil || !old.IsDir() {
			old = erofs.NewDir(0)
			if err := m.link(dir, base, old); err != nil {
				return err
			}
		}
		return m.setDir(old, e)
	}
	n := &erofs.Inode{Mode: e.mode, Rdev: e.rdev, Size: e.size, Target: e.target, Runs: e.runs}
	if err := m.setOwner(n, e); err != nil {
		return err
	}
	if e.hides {
		m.hidden[n] = true
	}
	if e.node != nil && e.size > 0 {
		m.origin[n] = contentsOf{fromLoose, e.node}
	}
	return m.link(dir, base, n)
}

// setDir gives a directory the attributes of e; its names stay.
func (m *merger) setDir(d *erofs.Inode, e *entry) error {
	if e.mode&erofs.TypeMask != erofs.TypeDir {
		return errors.New("the root must be a directory")
	}
	d.Mode, d.Xattrs = e.mode, nil
	return m.setOwner(d, e)
}

func (m *merger) setOwner(n *erofs.Inode, e *entry) error {
	n.UID, n.GID, n.Mtime, n.Nsec = e.uid, e.gid, e.mtime, e.nsec
	if o := m.opts.Owner; o != nil {
		n.UID, n.GID = o.UID, o.GID
	}
	for _, x := range e.xattrs {
		if !m.wanted(x) {
			continue
		}
		if err := n.SetXattr(x.Name, x.Value); err != nil {
			return err
		}
	}
	return nil
}

// wanted drops what overlayfs keeps for itself on an upper directory: it means
// nothing in another stack, and a source could lie with it. What hides, or
// moves a directory of a layer below, is kept in a layer made to stand on others.
func (m *merger) wanted(x erofs.Xattr) bool {
	if strings.HasPrefix(x.Name, ownXattrs) {
		return false
	}
	for _, prefix := range []string{"trusted.overlay.", "user.overlay."} {
		if rest, ok := strings.CutPrefix(x.Name, prefix); ok {
			return m.opts.KeepWhiteouts && !m.opts.Loose && (rest == "opaque" || rest == "redirect")
		}
	}
	return true
}

func (m *merger) hardLink(dir *erofs.Inode, base string, e *entry) error {
	target, err := m.linkTarget(e.link)
	if err != nil {
		return err
	}
	if target == nil && m.opts.Loose {
		target, err = looseLink(e.link)
		if err != nil {
			return err
		}
	}
	if target == nil {
		return fmt.Errorf("hard link to %s: no such file in this layer or below", quoteName(e.link))
	}
	if target.IsDir() {
		return fmt.Errorf("hard link to %s: a directory", quoteName(e.link))
	}
	return m.link(dir, base, target)
}

func (m *merger) linkTarget(name string) (*erofs.Inode, error) {
	name = path.Join(m.opts.At, name)
	dir, err := m.resolve(path.Dir(name), false)
	if err != nil {
		return nil, err
	}
	if dir != nil {
		c := dir.Child(path.Base(name))
		if m.hidden[c] {
			c = nil
		}
		if g := m.gone[name]; g != nil && (c == nil || c.IsDir()) {
			return g, nil
		}
		return c, nil
	}
	return m.gone[name], nil
}

func (m *merger) markOpaque(name string, replaced bool) error {
	d, err := m.resolve(path.Join(m.opts.At, name), true)
	if err != nil {
		return err
	}
	attr := opaqueTrusted
	switch {
	case replaced:
		attr = replacedXattr
	case m.opts.UserXattr:
		attr = opaqueUser
	}
	return d.SetXattr(attr, []byte("y"))
}

// finish makes the tree one that overlayfs shows as it is meant: whiteouts in a
// directory that is opaque hide nothing and would be listed, so they go.
func (m *merger) finish() error {
	strip := func(d *erofs.Inode) {
		if !isOpaque(d) {
			return
		}
		for _, name := range d.Names() {
			if d.Child(name).IsWhiteout() {
				d.Unlink(name)
			}
		}
	}
	strip(m.root)
	return m.root.Walk(func(_ string, n *erofs.Inode) error {
		if n.IsDir() {
			strip(n)
		}
		return nil
	})
}

func isOpaque(d *erofs.Inode) bool {
	for _, attr := range []string{opaqueTrusted, opaqueUser} {
		if v, ok := d.Xattr(attr); ok && string(v) == "y" {
			return true
		}
	}
	return false
}
