package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path"
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
// A layer takes effect as a whole: first its whiteouts, on what the layers
// below left, then its members in their order. So it does not matter whether a
// whiteout comes before or after the members of its own layer.
type merger struct {
	opts  Options
	root  *erofs.Inode
	data  *erofs.Data
	made  int64 // inodes and names made, for the cap
	bytes int64 // contents read
	// gone holds what the whiteouts of the current layer took away, by name: a
	// hard link of the same layer may still name it.
	gone map[string]*erofs.Inode
}

func newMerger(data *erofs.Data, opts Options) *merger {
	return &merger{opts: opts, root: erofs.NewDir(0o755), data: data}
}

// layer reads one source and applies it.
func (m *merger) layer(ctx context.Context, src layerSource) error {
	var members []*entry
	start, made, bytes := m.data.Blocks(), m.made, m.bytes
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
		return errors.Join(err, m.data.Rewind(start))
	}
	m.gone = map[string]*erofs.Inode{}
	if src.whiteouts() {
		if members, err = m.whiteouts(members); err != nil {
			return err
		}
	}
	for _, e := range members {
		if err := m.member(e); err != nil {
			return fmt.Errorf("%s: %w", quoteName(e.name), err)
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
	e.runs, err = m.data.Append(r, e.size)
	m.opts.report(m.bytes, m.made)
	return err
}

// whiteouts applies the markers among the members and returns the others.
func (m *merger) whiteouts(members []*entry) ([]*entry, error) {
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
		return foldWhiteouts(rest), nil
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
		return []*entry{{name: dir + hidden, mode: erofs.TypeChar}}
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

// opaqueMark is no type of file: a member of this mode makes its directory opaque.
const opaqueMark = 1 << 20

// foldWhiteouts orders what became of the markers of a layer that stands alone:
// a name that the layer also has wins over its whiteout, and a directory in
// that place hides what is below. Opaque marks come last, when their
// directories are there.
func foldWhiteouts(members []*entry) []*entry {
	has := map[string]uint32{}
	for _, e := range members {
		if !isMarker(e) {
			has[e.name] = e.mode
			for dir := path.Dir(e.name); dir != "." && has[dir] == 0; dir = path.Dir(dir) {
				has[dir] = erofs.TypeDir
			}
		}
	}
	var out, marks []*entry
	for _, e := range members {
		mode, taken := has[e.name]
		switch {
		case e.mode == opaqueMark:
			marks = append(marks, e)
		case isMarker(e) && taken && mode&erofs.TypeMask == erofs.TypeDir:
			marks = append(marks, &entry{name: e.name, mode: opaqueMark})
		case isMarker(e) && taken:
		default:
			out = append(out, e)
		}
	}
	return append(out, marks...)
}

func isMarker(e *entry) bool {
	return e.mode == opaqueMark || e.mode == erofs.TypeChar && e.rdev == 0 && !e.isLink
}

// quoteName shows a name from outside in an error.
func quoteName(name string) string {
	if len(name) > 200 {
		name = name[:200] + "…"
	}
	return fmt.Sprintf("%q", "/"+name)
}
