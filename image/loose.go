package image

import (
	"context"
	"fmt"
	"io"
	"path"
	"strings"

	"github.com/opendsec/dsec/image/erofs"
)

// A loose layer is what one OCI layer says without those below it. Three things
// only they can decide, so it says them in attributes of its own: a directory
// that the OCI layer implies and does not describe (it is what it is below, or
// a symbolic link there leads elsewhere), and a hard link to a file that is
// below; and whether a whiteout has anything to hide. Most layers have none of
// these and are what they are on any others; see IsLoose.
const (
	ownXattrs     = "trusted.dsec."
	impliedXattr  = ownXattrs + "implied"  // of a directory, "y"
	replacedXattr = ownXattrs + "replaced" // of a directory, "y": the layer also has a whiteout for its name
	linkXattr     = ownXattrs + "link"     // of an empty file: the name it shares an inode with
)

// fromLoose is the place of the loose layer among those whose contents are copied.
const fromLoose = 1 << 30

// implied makes the directory of a name that has no entry of its own.
func (m *merger) implied() (*erofs.Inode, error) {
	d := erofs.NewDir(0o755)
	if !m.opts.Loose {
		return d, nil
	}
	return d, d.SetXattr(impliedXattr, []byte("y"))
}

func looseLink(target string) (*erofs.Inode, error) {
	n := &erofs.Inode{Mode: erofs.TypeRegular}
	return n, n.SetXattr(linkXattr, []byte(target))
}

// IsLoose tells whether a layer made with Options.Loose depends on what is
// below it, and whether it has anything but a root.
func IsLoose(im *erofs.Image) (loose, empty bool, err error) {
	empty = true
	err = im.Walk(func(name string, n *erofs.Node) error {
		empty = false
		if loose || n.IsWhiteout() {
			loose = true
			return nil
		}
		xs, err := n.Xattrs()
		if err != nil {
			return fmt.Errorf("%s: %w", quoteName(name), err)
		}
		for _, x := range xs {
			loose = loose || strings.HasPrefix(x.Name, ownXattrs) || isOpaqueAttr(x)
		}
		return nil
	})
	if err != nil {
		return false, false, classify("read layer", "", err)
	}
	root, err := im.Root()
	if err != nil {
		return false, false, classify("read layer", "", err)
	}
	xs, err := root.Xattrs()
	if err != nil {
		return false, false, classify("read layer", "", err)
	}
	for _, x := range xs {
		if isOpaqueAttr(x) {
			loose, empty = true, false
		}
	}
	return loose, empty, nil
}

func isOpaqueAttr(x erofs.Xattr) bool {
	return (x.Name == opaqueTrusted || x.Name == opaqueUser) && string(x.Value) == "y"
}

// looseLayer gives back the members of a loose layer.
type looseLayer struct{ im *erofs.Image }

func (l looseLayer) whiteouts() bool { return true }

func (l looseLayer) each(ctx context.Context, fn func(*entry, io.Reader) error) error {
	root, err := l.im.Root()
	if err != nil {
		return err
	}
	w := looseWalk{fn: fn, first: map[uint64]string{}}
	if err := w.node("", root); err != nil {
		return err
	}
	return l.im.Walk(func(name string, n *erofs.Node) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		return w.node(name, n)
	})
}

type looseWalk struct {
	fn    func(*entry, io.Reader) error
	first map[uint64]string // inode to the name under which it came
}

func (w *looseWalk) node(name string, n *erofs.Node) error {
	dir, base := path.Split(name)
	if n.IsWhiteout() {
		return w.fn(&entry{name: dir + whiteoutPrefix + base, mode: erofs.TypeRegular}, strings.NewReader(""))
	}
	if first, ok := w.first[n.NID]; ok && n.Mode&erofs.TypeMask != erofs.TypeDir {
		return w.fn(&entry{name: name, isLink: true, link: first}, nil)
	}
	w.first[n.NID] = name
	e := &entry{name: name, mode: n.Mode, uid: n.UID, gid: n.GID, mtime: n.Mtime, nsec: n.Nsec, rdev: n.Rdev}
	says, err := w.attributes(e, n)
	if err == nil && says.replaced {
		err = w.fn(&entry{name: dir + whiteoutPrefix + base, mode: erofs.TypeRegular}, nil)
	}
	if err != nil {
		return err
	}
	switch n.Mode & erofs.TypeMask {
	case erofs.TypeRegular:
		e.size, e.node = n.Size, n
	case erofs.TypeSymlink:
		e.target, err = n.Target()
	case erofs.TypeDir:
		says.implied = says.implied || name == "" && e.mode&0o7777 == 0o755 && e.uid == 0 && e.gid == 0 && e.mtime == 0 && e.nsec == 0 && len(e.xattrs) == 0
	}
	if err == nil && !says.implied {
		err = w.fn(e, nil)
	}
	if err == nil && says.opaque {
		err = w.fn(&entry{name: path.Join(name, whiteoutOpaque), mode: erofs.TypeRegular}, strings.NewReader(""))
	}
	return err
}

// looseMarks are what a loose layer says of a directory.
type looseMarks struct{ implied, opaque, replaced bool }

func (w *looseWalk) attributes(e *entry, n *erofs.Node) (says looseMarks, err error) {
	xs, err := n.Xattrs()
	if err != nil {
		return says, err
	}
	for _, x := range xs {
		switch {
		case x.Name == impliedXattr:
			says.implied = true
		case x.Name == replacedXattr:
			says.replaced = true
		case x.Name == linkXattr:
			e.isLink = true
			if e.link, err = cleanName(string(x.Value)); err != nil {
				return says, err
			}
		case isOpaqueAttr(x):
			says.opaque = true
		default:
			e.xattrs = append(e.xattrs, x)
		}
	}
	return says, nil
}
