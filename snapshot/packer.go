package snapshot

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/image/erofs"
)

const (
	overlayTrusted = "trusted.overlay."
	overlayUser    = "user.overlay."
	opaqueXattr    = overlayTrusted + "opaque"
	redirectXattr  = overlayTrusted + "redirect"
)

// inode names a file of the machine.
type inode struct{ dev, ino uint64 }

func inodeOf(st *unix.Stat_t) inode { return inode{st.Dev, st.Ino} }

// packer is one Pack.
type packer struct {
	ctx   context.Context
	src   Source
	opts  Options
	upper *os.File
	view  *os.File // nil until it is needed
	scrub *scrubber
	data  *erofs.Data
	live  *os.File        // the directory that is being read, where it goes on; may be nil
	ahead map[inode]early // nil: nothing was read ahead
	since time.Time
	links map[inode]*erofs.Inode // with several names
	left  int64                  // names that may still come
	attrs int64                  // bytes of attributes that may still come
	cost
}

func (p *packer) close() {
	if p.view != nil {
		p.view.Close()
	}
}

// read makes the tree.
func (p *packer) read() (*erofs.Inode, error) {
	if p.opts.Scrub.Any() {
		p.scrub = newScrubber(p.opts.Scrub, p.src.Below)
		if err := p.scrub.look(p); err != nil {
			return nil, err
		}
		p.left, p.held, p.work = p.opts.MaxEntries, 0, 0
	}
	p.first = p.data.Blocks()
	st, err := stat(p.upper)
	if err != nil {
		return nil, err
	}
	root := erofs.NewDir(st.Mode)
	if _, err := p.describe(root, p.upper, st, "/"); err != nil {
		return nil, err
	}
	return root, p.walk(place{in: root}, func(at place) visit { return p.add(at.in) })
}

// place is a directory on its way into the layer.
type place struct {
	path string
	// whole: the layer gets all that is seen in it, what comes from below included,
	// because it, or one above it, is a directory of the lowers with a new name.
	whole bool
	// alone: nothing from below is seen in it, so nothing there needs hiding.
	alone bool
	lower bool         // only in the view: the upper has no such directory
	in    *erofs.Inode // what it becomes
	gone  *rule        // for the scrub's first walk: all in it goes
}

func (at place) child(name string) string { return path.Join(at.path, name) }

// visit is told of each name in a directory, and returns what is to be gone into
// later, nil if nothing is.
type visit func(at place, name string, f *opened, st *unix.Stat_t) (*place, error)

// walk visits everything below a directory. Subdirectories come after it, and
// after it is closed: however deep the tree, few files are open.
func (p *packer) walk(at place, fn func(at place) visit) error {
	subs, err := p.each(at, fn(at))
	if err != nil {
		return err
	}
	for _, s := range subs {
		if err := p.walk(s, fn); err != nil {
			return err
		}
	}
	return nil
}

// each visits what is in one directory.
func (p *packer) each(at place, fn visit) (subs []place, err error) {
	var up, view *os.File
	if !at.lower {
		if up, err = openDir(p.upper, at.path); err != nil {
			return nil, at.wrap(err)
		}
		defer up.Close()
	}
	if at.whole {
		if view, err = p.openView(at.path); err != nil {
			return nil, at.wrap(err)
		}
		defer view.Close()
	}
	names, err := p.names(up, view)
	if err != nil {
		return nil, at.wrap(err)
	}
	if p.live = nil; p.src.Live != nil && up != nil {
		if d, err := openDir(p.src.Live, at.path); err == nil { // else it is gone there
			p.live = d
			defer d.Close()
		}
	}
	for _, name := range names {
		if err := p.ctx.Err(); err != nil {
			return nil, err
		}
		full := at.child(name)
		if len(full) > erofs.MaxPath-erofs.MaxName {
			return nil, bad("/%.64s…: a path of %d bytes", full, len(full))
		}
		if slices.Contains(p.src.Skip, full) {
			continue
		}
		sub, err := p.one(at, name, up, view, fn)
		if err != nil {
			return nil, err
		}
		if sub != nil {
			subs = append(subs, *sub)
		}
	}
	return subs, nil
}

func (p *packer) one(at place, name string, up, view *os.File, fn visit) (*place, error) {
	f, st, err := p.open(at, name, up, view)
	if err != nil || f == nil {
		return nil, err
	}
	defer f.Close()
	return fn(at, name, f, st)
}

func (at place) wrap(err error) error { return fmt.Errorf("/%s: %w", at.path, err) }

func (p *packer) openView(name string) (*os.File, error) {
	if p.view == nil {
		if p.src.View == nil {
			return nil, errors.New("a renamed directory, and no view of the layers below")
		}
		v, err := p.src.View()
		if err != nil {
			return nil, err
		}
		p.view = v
	}
	return openDir(p.view, name)
}

// names lists what is in a directory: of the view if there is one.
func (p *packer) names(up, view *os.File) ([]string, error) {
	d := view
	if d == nil {
		d = up
	}
	var names []string
	for {
		some, err := d.Readdirnames(1024)
		names = append(names, some...)
		if p.left -= int64(len(some)); p.left < 0 {
			return nil, bad("more than %d names", p.opts.MaxEntries)
		}
		if err == io.EOF {
			slices.Sort(names)
			return names, nil
		}
		if err != nil {
			return nil, err
		}
	}
}

// add returns the visit that puts names into a directory of the layer.
func (p *packer) add(in *erofs.Inode) visit {
	return func(at place, name string, f *opened, st *unix.Stat_t) (*place, error) {
		full := at.child(name)
		switch {
		case isWhiteout(st) && !f.view:
			if at.alone {
				return nil, nil
			}
			p.scrub.text(full, "name", name)
			return nil, in.Link(name, &erofs.Inode{Mode: erofs.TypeChar})
		case !known(st.Mode):
			return nil, nil // a socket means nothing without its process
		case p.scrub != nil && p.scrub.drops(full, st):
			return nil, nil
		}
		p.scrub.text(full, "name", name)
		if st.Mode&unix.S_IFMT == unix.S_IFDIR {
			return p.subdir(in, at, name, f, st)
		}
		return nil, p.file(in, name, full, f, st)
	}
}

// file adds what is no directory.
func (p *packer) file(in *erofs.Inode, name, full string, f *opened, st *unix.Stat_t) error {
	if st.Nlink > 1 {
		if first := p.links[inodeOf(st)]; first != nil {
			return in.Link(name, first)
		}
	}
	n := &erofs.Inode{Mode: st.Mode}
	if _, err := p.describe(n, f.File, st, "/"+full); err != nil {
		return err
	}
	keep, err := p.content(n, f.File, st, full)
	if err != nil || !keep {
		return err
	}
	if st.Nlink > 1 {
		p.links[inodeOf(st)] = n
	}
	return in.Link(name, n)
}

// subdir adds a directory, empty.
func (p *packer) subdir(in *erofs.Inode, at place, name string, f *opened, st *unix.Stat_t) (*place, error) {
	d := erofs.NewDir(st.Mode)
	over, err := p.describe(d, f.File, st, "/"+at.child(name))
	if err != nil {
		return nil, err
	}
	sub := at.sub(name, f.view, over)
	if sub.alone && !at.alone {
		if err := d.SetXattr(opaqueXattr, []byte("y")); err != nil {
			return nil, err
		}
	}
	sub.in = d
	return sub, in.Link(name, d)
}

// sub is the place of a subdirectory.
func (at place) sub(name string, lower bool, over overlaid) *place {
	s := &place{path: at.child(name), whole: at.whole, alone: at.alone, lower: lower}
	if !lower {
		s.whole = s.whole || over.redirect
		s.alone = s.alone || over.redirect || over.opaque
	}
	return s
}

// opened is a file and where it was found.
type opened struct {
	*os.File
	view bool
}

// open opens a name: in the upper if it has it, because hard links are told by
// the inodes there, else in the view. A name that is gone meanwhile is nil.
func (p *packer) open(at place, name string, up, view *os.File) (*opened, *unix.Stat_t, error) {
	for _, d := range []struct {
		dir  *os.File
		view bool
	}{{up, false}, {view, true}} {
		if d.dir == nil {
			continue
		}
		f, st, err := openEntry(d.dir, name)
		if errors.Is(err, unix.ENOENT) {
			continue
		}
		if err != nil {
			return nil, nil, fmt.Errorf("/%s: %w", at.child(name), err)
		}
		if !d.view && view != nil && isWhiteout(st) { // the view would not have named it
			f.Close()
			continue
		}
		return &opened{f, d.view}, st, nil
	}
	return nil, nil, nil
}

func isWhiteout(st *unix.Stat_t) bool { return st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == 0 }

func known(mode uint32) bool {
	switch mode & unix.S_IFMT {
	case unix.S_IFREG, unix.S_IFDIR, unix.S_IFLNK, unix.S_IFIFO, unix.S_IFCHR, unix.S_IFBLK:
		return true
	}
	return false
}

// isOverlays reports whether an attribute is overlayfs' own.
func isOverlays(name string) bool {
	return strings.HasPrefix(name, overlayTrusted) || strings.HasPrefix(name, overlayUser)
}
