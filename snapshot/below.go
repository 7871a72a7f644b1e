package snapshot

import (
	"errors"
	"os"
	"slices"
	"strings"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image/erofs"
	"github.com/opendsec/dsec/layer"
)

// Below reads what a stack of layers shows, from their metadata alone. It is
// not for concurrent use.
type Below struct {
	files []*os.File
	root  *belowDir
}

// belowDir is a directory as the layers show it together.
type belowDir struct {
	root     *belowDir
	parts    []*part // those that are seen in it, top first
	children map[string]*belowDir
}

// part is the directory of one layer.
type part struct {
	layer   int // how many are above it
	im      *erofs.Image
	node    *erofs.Node
	entries []erofs.Dirent // sorted; nil until it is looked into
	read    bool
}

// OpenBelow opens a stack, bottom first.
func OpenBelow(layers []layer.Local) (*Below, error) {
	b := &Below{root: &belowDir{}}
	b.root.root = b.root
	for _, l := range slices.Backward(layers) {
		n, err := b.open(l)
		if err != nil {
			return nil, errors.Join(dsec.E(dsec.Corrupt, "read layer", string(l.Digest), err), b.Close())
		}
		n.layer = len(b.root.parts)
		b.root.parts = append(b.root.parts, n)
	}
	return b, nil
}

func (b *Below) open(l layer.Local) (*part, error) {
	f, err := os.Open(l.Meta)
	if err != nil {
		return nil, err
	}
	b.files = append(b.files, f)
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	im, err := erofs.Open(f, st.Size(), nil)
	if err != nil {
		return nil, err
	}
	root, err := im.Root()
	return &part{im: im, node: root}, err
}

// Close ends the reading.
func (b *Below) Close() error {
	var errs []error
	for _, f := range b.files {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}

// RootOf reads the root directory of one layer.
func RootOf(l layer.Local) (*erofs.Node, error) {
	var b Below
	p, err := b.open(l)
	if err = errors.Join(err, b.Close()); err != nil {
		return nil, dsec.E(dsec.Corrupt, "read layer", string(l.Digest), err)
	}
	return p.node, nil
}

// Find returns what is seen at a path, relative to the root; nil if nothing is.
// No symbolic link is followed.
func (b *Below) Find(name string) (*erofs.Node, error) {
	d := b.root
	for {
		first, rest, more := strings.Cut(name, "/")
		if !more {
			n, _, err := d.look(first)
			return n, err
		}
		next, err := d.dir(first)
		if err != nil || next == nil {
			return nil, err
		}
		d, name = next, rest
	}
}

// Has tells whether anything is seen at a path.
func (b *Below) Has(name string) (bool, error) {
	n, err := b.Find(name)
	return n != nil, err
}

// dirAt is a directory of the stack; nil if there is none.
func (b *Below) dirAt(name string) (*belowDir, error) {
	d := b.root
	for part := range strings.SplitSeq(name, "/") {
		next, err := d.dir(part)
		if err != nil || next == nil {
			return nil, err
		}
		d = next
	}
	return d, nil
}

// look finds a name, and if it is a directory also the parts it is made of. One
// that was renamed in a layer goes on, in those below, where it was.
func (d *belowDir) look(name string) (top *erofs.Node, parts []*part, err error) {
	for _, p := range d.parts {
		n, err := p.lookup(name)
		if err != nil {
			return nil, nil, err
		}
		switch {
		case n == nil:
			continue
		case n.Mode&erofs.TypeMask != erofs.TypeDir:
			if top == nil && !n.IsWhiteout() {
				top = n
			}
			return top, parts, nil // hides what is below
		}
		if top == nil {
			top = n
		}
		parts = append(parts, &part{layer: p.layer, im: p.im, node: n})
		m, err := marksOf(n)
		if err != nil || m.opaque {
			return top, parts, err
		}
		if strings.HasPrefix(m.redirect, "/") {
			rest, err := d.root.under(p.layer, m.redirect)
			return top, append(parts, rest...), err
		}
		if m.redirect != "" {
			name = m.redirect
		}
	}
	return top, parts, nil
}

// under finds the parts that a directory has in the layers below one.
func (d *belowDir) under(layer int, name string) ([]*part, error) {
	at := &belowDir{root: d, parts: d.parts[layer+1:]}
	for base := range strings.SplitSeq(strings.Trim(name, "/"), "/") {
		_, parts, err := at.look(base)
		if err != nil || len(parts) == 0 {
			return nil, err
		}
		at = &belowDir{root: d, parts: parts}
	}
	return at.parts, nil
}

// dir goes into a subdirectory; nil if there is none.
func (d *belowDir) dir(name string) (*belowDir, error) {
	if c, ok := d.children[name]; ok {
		return c, nil
	}
	_, parts, err := d.look(name)
	if err != nil || len(parts) == 0 {
		return nil, err
	}
	c := &belowDir{root: d.root, parts: parts}
	if d.children == nil || len(d.children) > 64 { // a walk is in few at a time
		d.children = map[string]*belowDir{}
	}
	d.children[name] = c
	return c, nil
}

// names are those that are seen in the directory, in order.
func (d *belowDir) names() ([]string, error) {
	seen := map[string]bool{}
	var names []string
	for _, p := range d.parts {
		if err := p.load(); err != nil {
			return nil, err
		}
		for _, e := range p.entries {
			if !seen[e.Name] {
				seen[e.Name] = true
				names = append(names, e.Name)
			}
		}
	}
	slices.Sort(names)
	return names, nil
}

func (p *part) load() (err error) {
	if !p.read {
		p.entries, err = p.node.Entries()
		p.read = err == nil
	}
	return err
}

func (p *part) lookup(name string) (*erofs.Node, error) {
	if err := p.load(); err != nil {
		return nil, err
	}
	i, ok := slices.BinarySearchFunc(p.entries, name, func(d erofs.Dirent, name string) int { return strings.Compare(d.Name, name) })
	if !ok {
		return nil, nil
	}
	return p.im.Node(p.entries[i].NID)
}

// marks are what overlayfs keeps on a directory.
type marks struct {
	opaque   bool
	redirect string // where it was in the layers below; "": where it is
}

func marksOf(n *erofs.Node) (m marks, err error) {
	xs, err := n.Xattrs()
	for _, x := range xs {
		switch x.Name {
		case opaqueXattr:
			m.opaque = string(x.Value) == "y"
		case redirectXattr:
			m.redirect = string(x.Value)
		}
	}
	return m, err
}
