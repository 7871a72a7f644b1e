package snapshot

import (
	"context"
	"fmt"
	"io"
	"os"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/image/erofs"
	"github.com/opendsec/dsec/internal/fault"
	"github.com/opendsec/dsec/layer"
)

// Part is one layer to merge.
type Part struct {
	Meta, Data *os.File
	MetaSize   int64
}

// OpenPart opens a layer of the store; Close closes it.
func OpenPart(l layer.Local) (p Part, err error) {
	p.MetaSize = l.MetaSize
	if p.Meta, err = os.Open(l.Meta); err != nil {
		return Part{}, err
	}
	if l.Data == "" {
		return p, nil
	}
	if p.Data, err = os.Open(l.Data); err != nil {
		p.Meta.Close()
		return Part{}, err
	}
	return p, nil
}

// Close closes the files.
func (p Part) Close() {
	for _, f := range []*os.File{p.Meta, p.Data} {
		if f != nil {
			f.Close() // read only
		}
	}
}

// Merge writes one layer that shows on what is below what the parts, bottom
// first, show there one on the other. What a part hides of the parts below it is gone;
// what it hides of the layers below stays hidden, and nothing else is. The
// contents that are left keep their order, those of lower parts first.
func Merge(ctx context.Context, parts []Part, below *Below, into image.Files) (Result, error) {
	const op = "merge layers"
	m := &merge{ctx: ctx, below: below, data: erofs.NewData(into.Data)}
	root := erofs.NewDir(0o755)
	for i, p := range parts {
		if err := m.add(root, p); err != nil {
			return Result{}, dsec.E(fault.Class(err, dsec.Corrupt), op, fmt.Sprint(i), err)
		}
	}
	if err := m.tidy(root, "", false); err != nil {
		return Result{}, dsec.E(fault.Class(err, dsec.Corrupt), op, "", err)
	}
	if err := m.contents(root); err != nil {
		return Result{}, dsec.E(fault.Class(err, dsec.Internal), op, "", err)
	}
	blocks := m.data.Blocks()
	if err := into.Data.Truncate(int64(blocks) * erofs.BlockSize); err != nil {
		return Result{}, dsec.E(fault.Class(err, dsec.Internal), op, "", err)
	}
	stats, err := erofs.Write(into.Meta, root, blocks)
	if err != nil {
		return Result{}, dsec.E(fault.Class(err, dsec.Internal), op, "", err)
	}
	return Result{Entries: stats.Inodes, MetaSize: stats.MetaSize, DataSize: int64(blocks) * erofs.BlockSize}, nil
}

// merge is one Merge.
type merge struct {
	ctx    context.Context
	below  *Below
	data   *erofs.Data
	source map[*erofs.Inode]Part // where the contents of an inode are
	order  []*erofs.Inode        // with contents, as they were met
}

// add lays a part on what there is.
func (m *merge) add(root *erofs.Inode, p Part) error {
	im, err := erofs.Open(p.Meta, p.MetaSize, nil)
	if err != nil {
		return err
	}
	n, err := im.Root()
	if err != nil {
		return err
	}
	a := &adding{merge: m, im: im, part: p, seen: map[uint64]*erofs.Inode{}}
	if err := a.describe(root, n); err != nil {
		return err
	}
	return a.dir(root, n)
}

// adding is one part being added.
type adding struct {
	*merge
	im   *erofs.Image
	part Part
	seen map[uint64]*erofs.Inode // hard links
}

func (a *adding) dir(in *erofs.Inode, d *erofs.Node) error {
	entries, err := d.Entries()
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
		if err := a.name(in, e.Name, n); err != nil {
			return err
		}
	}
	return nil
}

func (a *adding) name(in *erofs.Inode, name string, n *erofs.Node) error {
	if n.Mode&erofs.TypeMask == erofs.TypeDir {
		return a.subdir(in, name, n)
	}
	if c := a.seen[n.NID]; c != nil {
		return in.Link(name, c)
	}
	c := &erofs.Inode{Mode: n.Mode, Rdev: n.Rdev, Size: n.Size}
	if err := a.describe(c, n); err != nil {
		return err
	}
	var err error
	switch n.Mode & erofs.TypeMask {
	case erofs.TypeSymlink:
		c.Target, err = n.Target()
	case erofs.TypeRegular:
		if c.Runs, err = n.Runs(); err == nil && len(c.Runs) > 0 {
			a.order = append(a.order, c)
			if a.source == nil {
				a.source = map[*erofs.Inode]Part{}
			}
			a.source[c] = a.part
		}
	}
	if err != nil {
		return err
	}
	if n.Nlink > 1 {
		a.seen[n.NID] = c
	}
	return in.Link(name, c)
}

// subdir merges a directory with the one that is there, unless it hides it. One
// in place of something else shows nothing of what is below that.
func (a *adding) subdir(in *erofs.Inode, name string, n *erofs.Node) error {
	opaque, err := isOpaque(n)
	if err != nil {
		return err
	}
	d := in.Child(name)
	switch {
	case d == nil || opaque:
		d = erofs.NewDir(n.Mode)
		if err := in.Link(name, d); err != nil {
			return err
		}
	case !d.IsDir():
		d, opaque = erofs.NewDir(n.Mode), true
		if err := in.Link(name, d); err != nil {
			return err
		}
	default:
		_, was := d.Xattr(opaqueXattr)
		opaque = was
	}
	if err := a.describe(d, n); err != nil {
		return err
	}
	if opaque {
		if err := d.SetXattr(opaqueXattr, []byte("y")); err != nil {
			return err
		}
	}
	return a.dir(d, n)
}

// describe takes over what a node is but for its contents.
func (a *adding) describe(c *erofs.Inode, n *erofs.Node) error {
	c.Mode, c.UID, c.GID, c.Mtime, c.Nsec, c.Xattrs = n.Mode, n.UID, n.GID, n.Mtime, n.Nsec, nil
	xs, err := n.Xattrs()
	if err != nil {
		return err
	}
	for _, x := range xs {
		if err := c.SetXattr(x.Name, x.Value); err != nil {
			return err
		}
	}
	return nil
}

// tidy takes out what hides nothing: whiteouts in directories that show nothing
// from below, and those of names that nobody below has.
func (m *merge) tidy(d *erofs.Inode, name string, alone bool) error {
	if v, ok := d.Xattr(opaqueXattr); ok && string(v) == "y" && name != "" {
		alone = true
	}
	for _, n := range d.Names() {
		c, full := d.Child(n), n
		if name != "" {
			full = name + "/" + n
		}
		switch {
		case c.IsDir():
			if err := m.tidy(c, full, alone); err != nil {
				return err
			}
		case c.IsWhiteout():
			hides := !alone
			if hides && m.below != nil {
				was, err := m.below.Find(full)
				if err != nil {
					return err
				}
				hides = was != nil
			}
			if !hides {
				d.Unlink(n)
			}
		}
	}
	return nil
}

// contents copies those of the inodes that have a name left.
func (m *merge) contents(root *erofs.Inode) error {
	live := map[*erofs.Inode]bool{}
	err := root.Walk(func(_ string, n *erofs.Inode) error {
		live[n] = true
		return nil
	})
	if err != nil {
		return err
	}
	for _, n := range m.order {
		if !live[n] {
			continue
		}
		if err := m.ctx.Err(); err != nil {
			return err
		}
		p := m.source[n]
		if p.Data == nil {
			return fmt.Errorf("contents of %d bytes in a layer without data", n.Size)
		}
		if n.Runs, err = m.data.AppendSparse(&runsReader{f: p.Data, runs: n.Runs, size: n.Size}, n.Size); err != nil {
			return err
		}
	}
	return nil
}

// runsReader reads a file that lies in runs of a data file.
type runsReader struct {
	f    *os.File
	runs []erofs.Run
	size int64
}

func (r *runsReader) ReadAt(b []byte, off int64) (int, error) {
	want := b[:max(0, min(int64(len(b)), r.size-off))]
	clear(want)
	for _, run := range r.runs {
		start, end := run.Off, min(run.Off+int64(run.Count)*erofs.BlockSize, r.size)
		from, to := max(start, off), min(end, off+int64(len(want)))
		if from >= to {
			continue
		}
		if _, err := r.f.ReadAt(want[from-off:to-off], int64(run.Block)*erofs.BlockSize+from-start); err != nil {
			return 0, err
		}
	}
	if len(want) < len(b) {
		return len(want), io.EOF
	}
	return len(want), nil
}

func (r *runsReader) NextData(off int64) (start, end int64, err error) {
	for _, run := range r.runs {
		if end := min(run.Off+int64(run.Count)*erofs.BlockSize, r.size); end > off {
			return max(off, run.Off), end, nil
		}
	}
	return r.size, r.size, nil
}
