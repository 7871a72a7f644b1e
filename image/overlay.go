package image

import (
	"context"
	"fmt"
	"path"
	"strings"

	"github.com/opendsec/dsec/image/erofs"
)

const redirectTrusted, redirectUser = "trusted.overlay.redirect", "user.overlay.redirect"

// overlaid builds, in memory, the tree that overlayfs shows of layers that stand
// on one another. Contents stay where they are: it remembers for each regular
// file which layer has them.
//
// Each layer gives a new root; the directories that it does not have are those
// of the tree before. So the tree before stays as it was while the layer is
// applied, and a directory that was renamed is found where it was.
type overlaid struct {
	keep       bool // there may be layers below: what hides and moves is kept
	opaque     string
	redirect   string
	maxEntries int64

	root  *erofs.Inode
	files map[*erofs.Inode]contentsOf
	made  int64
	layer int // being applied
}

// contentsOf says where the contents of a regular file are.
type contentsOf struct {
	layer int // its place among the layers, the lowest is 0
	node  *erofs.Node
}

func newOverlaid(keep, userXattr bool, maxEntries int64) *overlaid {
	o := &overlaid{keep: keep, opaque: opaqueTrusted, redirect: redirectTrusted, maxEntries: maxEntries,
		root: erofs.NewDir(0o755), files: map[*erofs.Inode]contentsOf{}}
	if userXattr {
		o.opaque, o.redirect = opaqueUser, redirectUser
	}
	return o
}

// add puts a layer on top.
func (o *overlaid) add(ctx context.Context, im *erofs.Image) error {
	up, err := im.Root()
	if err != nil {
		return err
	}
	a := &applying{overlaid: o, ctx: ctx, im: im, seen: map[uint64]*erofs.Inode{}, dirs: map[uint64]bool{}}
	// What a root says of hiding and moving overlayfs does not ask.
	root, _, err := a.attributes(up)
	if err != nil {
		return err
	}
	if saysNothing(root) {
		old := o.root
		root = erofs.NewDir(old.Mode)
		root.UID, root.GID, root.Mtime, root.Nsec, root.Xattrs = old.UID, old.GID, old.Mtime, old.Nsec, old.Xattrs
	}
	if err := a.fill(root, up, below{dir: o.root}, "/"); err != nil {
		return err
	}
	o.root = root
	o.layer++
	return nil
}

// saysNothing tells the root of a layer whose source had no entry for the root:
// what the layers below say of it holds.
func saysNothing(root *erofs.Inode) bool {
	return root.Mode == erofs.TypeDir|0o755 && root.UID == 0 && root.GID == 0 && root.Mtime == 0 && root.Nsec == 0 && len(root.Xattrs) == 0
}

// applying is one layer on its way into the tree.
type applying struct {
	*overlaid
	ctx  context.Context
	im   *erofs.Image
	seen map[uint64]*erofs.Inode // inodes with several names
	dirs map[uint64]bool         // a directory with two names would never end
}

// below is what a directory of the layer stands on.
type below struct {
	dir  *erofs.Inode // of the tree before; nil: not there
	path string       // where it is, or would be, in the tree before; "" is the root
	none bool         // nothing shines through, neither from here nor from layers that are not here
}

// marks are what overlayfs keeps on a directory.
type marks struct {
	opaque   bool
	redirect string
}

// fill gives a new directory its names: those of below, changed by those of up.
func (a *applying) fill(dir *erofs.Inode, up *erofs.Node, low below, name string) error {
	if a.dirs[up.NID] || strings.Count(name, "/") > maxDepth {
		return fmt.Errorf("%s: a directory with two names, or too deep", quoteName(name))
	}
	a.dirs[up.NID] = true
	if low.dir != nil {
		dir.Inherit(low.dir)
	}
	entries, err := up.Entries()
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := a.ctx.Err(); err != nil {
			return err
		}
		n, err := a.im.Node(e.NID)
		if err != nil {
			return err
		}
		if err := a.place(dir, low, e.Name, n, path.Join(name, e.Name)); err != nil {
			return err
		}
	}
	if hides, _ := dir.Xattr(a.opaque); string(hides) == "y" {
		stripWhiteouts(dir)
	}
	return nil
}

// place gives one name of the layer its meaning in dir.
func (a *applying) place(dir *erofs.Inode, low below, base string, n *erofs.Node, name string) error {
	if a.made++; a.made > a.maxEntries {
		return fmt.Errorf("more than %d entries", a.maxEntries)
	}
	if n.IsWhiteout() && !a.keep {
		dir.Unlink(base)
		return nil
	}
	if n.Mode&erofs.TypeMask != erofs.TypeDir {
		in, err := a.file(n)
		if err != nil {
			return fmt.Errorf("%s: %w", quoteName(name), err)
		}
		return dir.Link(base, in)
	}
	in, m, err := a.attributes(n)
	if err != nil {
		return fmt.Errorf("%s: %w", quoteName(name), err)
	}
	under, err := a.under(in, m, low, base)
	if err != nil {
		return fmt.Errorf("%s: %w", quoteName(name), err)
	}
	if err := a.fill(in, n, under, name); err != nil {
		return err
	}
	return dir.Link(base, in)
}

// under finds what a directory of the layer stands on, and marks it for the
// layers below that are not here.
func (a *applying) under(in *erofs.Inode, m marks, low below, base string) (below, error) {
	there := low.path + "/" + base
	switch {
	case m.opaque:
		return below{none: true}, a.mark(in, marks{opaque: true})
	case strings.HasPrefix(m.redirect, "/"):
		return a.moved(in, m.redirect)
	case low.none:
		return low, nil
	case m.redirect != "":
		return a.moved(in, low.path+"/"+m.redirect)
	case low.dir == nil:
		return below{path: there}, nil
	}
	old := low.dir.Child(base)
	switch {
	case old == nil:
		return below{path: there}, nil
	case !old.IsDir(): // a whiteout, or a file: overlayfs looks no deeper
		return below{none: true}, a.mark(in, marks{opaque: true})
	}
	return below{dir: old, path: there}, a.mark(in, a.marksOf(old))
}

// moved is under for a directory that was elsewhere in the layers below.
func (a *applying) moved(in *erofs.Inode, from string) (below, error) {
	was, outside := a.find(from)
	if was == nil && outside == "" {
		return below{none: true}, a.mark(in, marks{opaque: true})
	}
	if was != nil { // it may still be seen where it was
		var err error
		if was, err = a.clone(was); err != nil {
			return below{}, err
		}
	}
	return below{dir: was, path: strings.TrimRight(from, "/")}, a.mark(in, marks{opaque: outside == "", redirect: outside})
}

// mark puts what holds for the layers that are not here on a directory.
func (a *applying) mark(in *erofs.Inode, m marks) error {
	switch {
	case !a.keep:
		return nil
	case m.opaque:
		return in.SetXattr(a.opaque, []byte("y"))
	case m.redirect != "":
		return in.SetXattr(a.redirect, []byte(m.redirect))
	}
	return nil
}

func (o *overlaid) marksOf(d *erofs.Inode) marks {
	hides, _ := d.Xattr(o.opaque)
	to, _ := d.Xattr(o.redirect)
	return marks{opaque: string(hides) == "y", redirect: string(to)}
}

// find looks a path up in the tree before the layer. It returns the directory
// that is there, and the path at which overlayfs goes on looking in layers that
// are not here, "" if it does not.
func (a *applying) find(name string) (dir *erofs.Inode, outside string) {
	dir, outside, open := a.root, "", true
	for part := range strings.SplitSeq(strings.Trim(name, "/"), "/") {
		var c *erofs.Inode
		if dir != nil {
			c = dir.Child(part)
		}
		if c == nil {
			dir, outside = nil, outside+"/"+part
			continue
		}
		if !c.IsDir() {
			return nil, ""
		}
		dir = c
		switch m := a.marksOf(c); {
		case m.opaque:
			open = false
		case strings.HasPrefix(m.redirect, "/"):
			outside, open = m.redirect, true
		case m.redirect != "":
			outside += "/" + m.redirect
		default:
			outside += "/" + part
		}
	}
	if !open {
		outside = ""
	}
	return dir, outside
}

// clone copies a directory and those in it; other inodes are shared, as names
// of one file are.
func (a *applying) clone(d *erofs.Inode) (*erofs.Inode, error) {
	if a.made++; a.made > a.maxEntries {
		return nil, fmt.Errorf("more than %d entries", a.maxEntries)
	}
	out := erofs.NewDir(d.Mode)
	out.UID, out.GID, out.Mtime, out.Nsec, out.Xattrs = d.UID, d.GID, d.Mtime, d.Nsec, d.Xattrs
	out.Inherit(d)
	for _, name := range d.Names() {
		c := d.Child(name)
		if !c.IsDir() {
			continue
		}
		copied, err := a.clone(c)
		if err != nil {
			return nil, err
		}
		if err := out.Link(name, copied); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// file makes the inode of what is no directory, once for all its names.
func (a *applying) file(n *erofs.Node) (*erofs.Inode, error) {
	if in := a.seen[n.NID]; in != nil {
		return in, nil
	}
	in, _, err := a.attributes(n)
	if err != nil {
		return nil, err
	}
	switch n.Mode & erofs.TypeMask {
	case erofs.TypeRegular:
		if in.Size = n.Size; n.Size > 0 {
			a.files[in] = contentsOf{a.layer, n}
		}
	case erofs.TypeSymlink:
		if in.Target, err = n.Target(); err != nil {
			return nil, err
		}
	case erofs.TypeChar, erofs.TypeBlock:
		in.Rdev = n.Rdev
	}
	if n.Nlink > 1 {
		a.seen[n.NID] = in
	}
	return in, nil
}

// attributes makes an inode with everything but contents. What is overlayfs'
// own comes apart: what it means in this layer it may not mean in the result.
func (a *applying) attributes(n *erofs.Node) (in *erofs.Inode, m marks, err error) {
	in = &erofs.Inode{Mode: n.Mode}
	if n.Mode&erofs.TypeMask == erofs.TypeDir {
		in = erofs.NewDir(n.Mode)
	}
	in.UID, in.GID, in.Mtime, in.Nsec = n.UID, n.GID, n.Mtime, n.Nsec
	xs, err := n.Xattrs()
	if err != nil {
		return nil, m, err
	}
	for _, x := range xs {
		switch {
		case x.Name == a.opaque:
			m.opaque = string(x.Value) == "y"
		case x.Name == a.redirect:
			m.redirect = string(x.Value)
		case strings.HasPrefix(x.Name, "trusted.overlay."), strings.HasPrefix(x.Name, "user.overlay."):
		default:
			if err := in.SetXattr(x.Name, x.Value); err != nil {
				return nil, m, err
			}
		}
	}
	return in, m, nil
}

// stripWhiteouts: in a directory that hides what is below, whiteouts hide
// nothing and would be listed.
func stripWhiteouts(dir *erofs.Inode) {
	for _, name := range dir.Names() {
		if dir.Child(name).IsWhiteout() {
			dir.Unlink(name)
		}
	}
}
