package image

import (
	"context"
	"slices"

	"github.com/opendsec/dsec/image/erofs"
)

// Below is what a layer stands on: layers of which only metadata is read, until
// a file of theirs gets another name above. It is not safe for concurrent use.
type Below struct {
	tree *overlaid
	opts Options
}

// NewBelow returns a Below of no layers. Of the options, limits and UserXattr count.
func NewBelow(opts Options) (*Below, error) {
	if err := opts.fill(); err != nil {
		return nil, classify("stack layers", "", err)
	}
	return &Below{tree: newOverlaid(false, opts.UserXattr, opts.MaxEntries), opts: opts}, nil
}

// Add puts a layer that stands on those that are there on top of them.
func (b *Below) Add(ctx context.Context, im *erofs.Image) error {
	if err := b.tree.add(ctx, im); err != nil {
		return classify("stack layers", "", err)
	}
	return nil
}

// Settle makes of a loose layer the layer that stands on those below: mounted
// on them it shows the tree that the OCI layer means, as if all had been
// converted into one. It has what changes, and nothing else: a whiteout only
// for a name that is there; of an implied directory that is there the
// attributes it has; a file of below that gets another name with all its names
// and its contents. Contents of the loose layer are copied. Nothing is changed
// if Entries of the result is 1.
func (b *Below) Settle(ctx context.Context, loose *erofs.Image, dst Files) (Result, error) {
	const op = "settle layer"
	d := differ{was: map[*erofs.Inode]*erofs.Inode{}, opaque: b.tree.opaque}
	opts := b.opts
	opts.KeepWhiteouts, opts.Loose, opts.At, opts.Owner = false, false, "", nil
	m := newMerger(nil, opts)
	m.root, m.origin = d.copy(b.tree.root), map[*erofs.Inode]contentsOf{}
	if err := m.layer(ctx, looseLayer{loose}); err != nil {
		return Result{}, classify(op, "", err)
	}
	d.relinked = relinked(b.tree.root, m.root)
	root, err := d.changes(b.tree.root, m.root)
	if err != nil {
		return Result{}, classify(op, "", err)
	}
	if root == nil {
		root = erofs.NewDir(0o755)
	}
	if sameAttributes(b.tree.root, m.root) {
		root.Mode, root.UID, root.GID, root.Mtime, root.Nsec, root.Xattrs = erofs.TypeDir|0o755, 0, 0, 0, 0, nil
	}
	files := m.origin
	for in := range d.relinked {
		if from, ok := b.tree.files[in]; ok {
			files[in] = from
		}
	}
	out := &overlaid{root: root, files: files}
	res, err := out.write(ctx, dst, opts)
	if err != nil {
		return Result{}, classify(op, "", err)
	}
	return res, nil
}

// differ finds the layer that makes one tree of another.
type differ struct {
	was      map[*erofs.Inode]*erofs.Inode // a directory of the new tree to what it was
	relinked map[*erofs.Inode]bool         // files of the old tree that have other names now
	opaque   string
}

// copy copies the directories of a tree, and notes which is which.
func (d *differ) copy(dir *erofs.Inode) *erofs.Inode {
	out := erofs.NewDir(dir.Mode)
	out.UID, out.GID, out.Mtime, out.Nsec = dir.UID, dir.GID, dir.Mtime, dir.Nsec
	out.Xattrs = slices.Clone(dir.Xattrs)
	out.Inherit(dir)
	for _, name := range dir.Names() {
		if c := dir.Child(name); c.IsDir() {
			_ = out.Link(name, d.copy(c)) // the name was one
		}
	}
	d.was[out] = dir
	return out
}

// relinked finds the files of the old tree that the new one has under a name
// they did not have. A layer cannot link to a file below, so it has all names.
func relinked(before, now *erofs.Inode) map[*erofs.Inode]bool {
	old, out := map[*erofs.Inode]bool{}, map[*erofs.Inode]bool{}
	_ = before.Walk(func(_ string, in *erofs.Inode) error { // the function has no error
		if !in.IsDir() {
			old[in] = true
		}
		return nil
	})
	var compare func(before, now *erofs.Inode)
	compare = func(before, now *erofs.Inode) {
		for _, name := range now.Names() {
			c := now.Child(name)
			var was *erofs.Inode
			if before != nil {
				was = before.Child(name)
			}
			switch {
			case c.IsDir() && was != nil && was.IsDir():
				compare(was, c)
			case c.IsDir():
				compare(nil, c)
			case c != was && old[c]:
				out[c] = true
			}
		}
	}
	compare(before, now)
	return out
}

// changes returns the directory that a layer has to change one into the other;
// nil if there is nothing to change.
func (d *differ) changes(before, now *erofs.Inode) (*erofs.Inode, error) {
	out := erofs.NewDir(now.Mode)
	out.UID, out.GID, out.Mtime, out.Nsec, out.Xattrs = now.UID, now.GID, now.Mtime, now.Nsec, now.Xattrs
	changed := !sameAttributes(before, now)
	for _, name := range before.Names() {
		if now.Child(name) == nil {
			changed = true
			if err := out.Link(name, &erofs.Inode{Mode: erofs.TypeChar}); err != nil {
				return nil, err
			}
		}
	}
	for _, name := range now.Names() {
		c, err := d.change(before.Child(name), now.Child(name))
		if err != nil {
			return nil, err
		}
		if c == nil {
			continue
		}
		changed = true
		if err := out.Link(name, c); err != nil {
			return nil, err
		}
	}
	if !changed {
		return nil, nil
	}
	return out, nil
}

// change returns what a layer has in one place; nil if nothing.
func (d *differ) change(was, is *erofs.Inode) (*erofs.Inode, error) {
	switch {
	case !is.IsDir():
		if is == was && !d.relinked[is] {
			return nil, nil
		}
		return is, nil
	case was != nil && d.was[is] == was:
		return d.changes(was, is)
	case was != nil: // another directory, or one where there was none
		return is, is.SetXattr(d.opaque, []byte("y"))
	}
	return is, nil
}

func sameAttributes(a, b *erofs.Inode) bool {
	return a.Mode == b.Mode && a.UID == b.UID && a.GID == b.GID && a.Mtime == b.Mtime && a.Nsec == b.Nsec &&
		slices.EqualFunc(a.Xattrs, b.Xattrs, func(x, y erofs.Xattr) bool { return x.Name == y.Name && string(x.Value) == string(y.Value) })
}
