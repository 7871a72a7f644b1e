package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"

	"github.com/opendsec/dsec/image/erofs"
)

// The names by which an OCI layer says what is gone.
const (
	whiteoutPrefix = ".wh."
	whiteoutMeta   = ".wh..wh." // bookkeeping of old union file systems
	whiteoutOpaque = ".wh..wh..opq"
)

const opaqueTrusted, opaqueUser = "trusted.overlay.opaque", "user.overlay.opaque"

// merger applies layers, in order, to one tree, while their contents go to one
// data file. Contents are read once; what a later layer replaces is dropped
// from the data file at the end.
//
// A layer takes effect as a whole: what is in the way of its directories goes,
// then its whiteouts take effect on what the layers below left, then come its
// directories, then the other members in their order. So it does not matter
// whether a whiteout, or a directory, comes before or after what is in it.
type merger struct {
	opts  Options
	root  *erofs.Inode
	data  *erofs.Data // nil: contents stay where they are
	made  int64       // inodes and names made, for the cap
	bytes int64       // contents read
	// gone holds what the whiteouts and directories of the current layer took
	// away, by name: a hard link of the same layer may still name it.
	gone   map[string]*erofs.Inode
	hidden map[*erofs.Inode]bool // nodes that stand for a whiteout of the layer: no link leads to one
	// origin notes where the contents are of what came from another image and
	// not from a stream; see Below.
	origin map[*erofs.Inode]contentsOf
}

func newMerger(data *erofs.Data, opts Options) *merger {
	return &merger{opts: opts, root: erofs.NewDir(0o755), data: data, hidden: map[*erofs.Inode]bool{}}
}

// layer reads one source and applies it.
func (m *merger) layer(ctx context.Context, src layerSource) error {
	var members []*entry
	made, bytes := m.made, m.bytes
	var start uint64
	if m.data != nil {
		start = m.data.Blocks()
	}
	err := src.each(ctx, func(e *entry, r io.Reader) error {
		if m.made++; m.made > m.opts.MaxEntries {
			return fmt.Errorf("more than %d entries", m.opts.MaxEntries)
		}
		if err := m.contents(e, r); err != nil {
			return fmt.Errorf("%s: %w", quoteName(e.name), err)
		}
		members = append(members, e)
		return nil
	})
	if err != nil {
		m.made, m.bytes = made, bytes
		if m.data != nil {
			err = errors.Join(err, m.data.Rewind(start))
		}
		return err
	}
	m.gone = map[string]*erofs.Inode{}
	dirs, others := directories(members)
	if err := m.clearWay(dirs); err != nil {
		return err
	}
	if src.whiteouts() {
		if others, err = m.whiteouts(others, dirs); err != nil {
			return err
		}
	}
	for _, e := range append(dirs, others...) {
		if err := m.member(e); err != nil {
			return fmt.Errorf("%s: %w", quoteName(e.name), err)
		}
	}
	return nil
}

// directories parts a layer's directories from its other members. A name that
// is a directory and something else keeps its place in the order, as does what
// is below it.
func directories(members []*entry) (dirs, others []*entry) {
	not := map[string]bool{}
	for _, e := range members {
		if e.isLink || e.mode&erofs.TypeMask != erofs.TypeDir {
			not[e.name] = true
		}
	}
	below := func(name string) bool {
		for ; name != "." && name != "/" && name != ""; name = path.Dir(name) {
			if not[name] {
				return true
			}
		}
		return false
	}
	for _, e := range members {
		if !e.isLink && e.mode&erofs.TypeMask == erofs.TypeDir && !below(e.name) && !strings.HasPrefix(path.Base(e.name), whiteoutPrefix) {
			dirs = append(dirs, e)
		} else {
			others = append(others, e)
		}
	}
	return dirs, others
}

// clearWay removes what the layers below have in the place of a directory and
// is none: a whiteout of this layer must not follow a link that goes with it.
func (m *merger) clearWay(dirs []*entry) error {
	byDepth := slices.Clone(dirs)
	slices.SortStableFunc(byDepth, func(a, b *entry) int { return strings.Count(a.name, "/") - strings.Count(b.name, "/") })
	for _, e := range byDepth {
		name := path.Join(m.opts.At, e.name)
		if name == "" {
			continue
		}
		dir, err := m.resolve(path.Dir(name), false)
		if err != nil {
			return fmt.Errorf("%s: %w", quoteName(e.name), err)
		}
		if dir == nil {
			continue
		}
		if c := dir.Child(path.Base(name)); c != nil && !c.IsDir() {
			m.gone[name] = c
			dir.Unlink(path.Base(name))
		}
	}
	return nil
}

func (m *merger) contents(e *entry, r io.Reader) (err error) {
	if e.isLink || e.mode&erofs.TypeMask != erofs.TypeRegular {
		return nil
	}
	if m.bytes += e.size; m.bytes > m.opts.MaxBytes {
		return fmt.Errorf("more than %d bytes", m.opts.MaxBytes)
	}
	if e.node != nil {
		return nil
	}
	e.runs, err = m.data.Append(r, e.size)
	m.opts.report(m.bytes, m.made)
	return err
}

// whiteouts applies the markers among the members and returns the others.
func (m *merger) whiteouts(members, dirs []*entry) ([]*entry, error) {
	var rest []*entry
	for _, e := range members {
		dir, base := path.Split(e.name)
		if strings.HasPrefix(dir, whiteoutPrefix) || strings.Contains(dir, "/"+whiteoutPrefix) {
			return nil, fmt.Errorf("%s: a directory may not be called %s*", quoteName(e.name), whiteoutPrefix)
		}
		hidden, ok := strings.CutPrefix(base, whiteoutPrefix)
		if !ok {
			rest = append(rest, e)
			continue
		}
		switch {
		case base == whiteoutOpaque:
			rest = append(rest, m.opaque(strings.TrimSuffix(dir, "/"))...)
		case strings.HasPrefix(base, whiteoutMeta):
		case hidden == "" || hidden == "." || hidden == "..":
			return nil, fmt.Errorf("%s: hides no name", quoteName(e.name))
		default:
			rest = append(rest, m.whiteout(dir, hidden)...)
		}
	}
	if m.opts.KeepWhiteouts {
		return foldWhiteouts(rest, dirs), nil
	}
	return rest, nil
}

// whiteout removes the name from what is below. Where there are layers below
// that are not here, the node that overlayfs understands takes its place.
func (m *merger) whiteout(dir, hidden string) []*entry {
	at := path.Join(m.opts.At, dir)
	if d, err := m.resolve(at, false); err == nil && d != nil {
		if c := d.Child(hidden); c != nil {
			m.gone[path.Join(at, hidden)] = c
			d.Unlink(hidden)
		}
	}
	if m.opts.KeepWhiteouts {
		return []*entry{{name: dir + hidden, mode: erofs.TypeChar, hides: true}}
	}
	return nil
}

func (m *merger) opaque(dir string) []*entry {
	at := path.Join(m.opts.At, dir)
	if d, err := m.resolve(at, false); err == nil && d != nil {
		for _, name := range d.Names() {
			m.gone[path.Join(at, name)] = d.Child(name)
		}
		d.Clear()
	}
	if m.opts.KeepWhiteouts {
		return []*entry{{name: dir, mode: opaqueMark}}
	}
	return nil
}

// opaqueMark is no type of file: a member of this mode makes its directory
// opaque. replacedMark says that the directory is another one than the one
// below, which to layers on their own is the same.
const opaqueMark, replacedMark = 1 << 20, 1 << 21

// foldWhiteouts orders what became of the markers of a layer that stands alone:
// a name that the layer also has wins over its whiteout, and a directory in
// that place hides what is below. Opaque marks come last, when their
// directories are there.
func foldWhiteouts(members, dirs []*entry) []*entry {
	has := map[string]uint32{}
	for _, e := range append(slices.Clone(dirs), members...) {
		if !isMarker(e) {
			has[e.name] = e.mode
			for dir := path.Dir(e.name); dir != "." && has[dir] == 0; dir = path.Dir(dir) {
				has[dir] = erofs.TypeDir
			}
		}
	}
	// gone tells whether the layer hides a name, or a directory above it, and has
	// nothing in its place.
	hidden := map[string]bool{}
	for _, e := range members {
		hidden[e.name] = hidden[e.name] || e.hides
	}
	gone := func(name string) bool {
		for ; name != "."; name = path.Dir(name) {
			if _, taken := has[name]; hidden[name] && !taken {
				return true
			}
		}
		return false
	}
	var out, marks []*entry
	for _, e := range members {
		mode, taken := has[e.name]
		switch {
		case e.mode == opaqueMark && gone(path.Clean(e.name)):
		case e.mode == opaqueMark:
			marks = append(marks, e)
		case isMarker(e) && taken && mode&erofs.TypeMask == erofs.TypeDir:
			marks = append(marks, &entry{name: e.name, mode: replacedMark})
		case isMarker(e) && taken:
		default:
			out = append(out, e)
		}
	}
	return append(out, marks...)
}

func isMarker(e *entry) bool {
	return e.mode >= opaqueMark || e.mode == erofs.TypeChar && e.rdev == 0 && !e.isLink
}

// quoteName shows a name from outside in an error.
func quoteName(name string) string {
	if len(name) > 200 {
		name = name[:200] + "…"
	}
	return fmt.Sprintf("%q", "/"+name)
}
