package snapshot

import (
	"context"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image/erofs"
	"github.com/opendsec/dsec/internal/fault"
)

// Changes lists what the source changed of what is below it, which must be
// known. A file counts as modified when it was written, or when its owner, mode
// or time was: its contents are not compared.
func Changes(ctx context.Context, src Source, most int) (dsec.Changes, error) {
	const op = "compare disk"
	upper, err := guarded(src.Upper)
	if err != nil {
		return dsec.Changes{}, dsec.E(dsec.Internal, op, src.Upper.Name(), err)
	}
	defer upper.Close()
	p := &packer{ctx: ctx, src: src, upper: upper, opts: Options{MaxEntries: DefaultEntries}, left: DefaultEntries}
	defer p.close()
	d := newDiffer(src.Below, most)
	err = p.walk(place{}, func(place) visit {
		return func(at place, name string, f *opened, st *unix.Stat_t) (*place, error) {
			full := at.child(name)
			switch {
			case !known(st.Mode):
				return nil, nil
			case isWhiteout(st) && !f.view:
				return nil, d.gone(full, at)
			}
			var over overlaid
			if st.Mode&unix.S_IFMT == unix.S_IFDIR {
				if err := eachXattr(f.File, func(key string, value []byte) error {
					over.note(key, value)
					return nil
				}); err != nil {
					return nil, err
				}
			}
			was, err := src.Below.Find(full)
			if err != nil {
				return nil, err
			}
			sub := at.sub(name, f.view, over)
			now := facts{mode: st.Mode, uid: src.inside(st.Uid), gid: src.inside(st.Gid), mtime: st.Mtim.Sec, nsec: uint32(st.Mtim.Nsec), size: st.Size}
			if err := d.there(full, now, was, sub.alone); err != nil || !now.isDir() {
				return nil, err
			}
			return sub, nil
		}
	})
	if err != nil {
		return dsec.Changes{}, dsec.E(fault.Class(err, dsec.Internal), op, "", err)
	}
	return d.done()
}

// ChangesOf is Changes of a packed layer.
func ChangesOf(ctx context.Context, im *erofs.Image, below *Below, most int) (dsec.Changes, error) {
	d := newDiffer(below, most)
	alone := map[string]bool{} // directories that show nothing from below
	err := im.Walk(func(name string, n *erofs.Node) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		inAlone := alone[path.Dir(name)]
		if n.IsWhiteout() {
			return d.gone(name, place{alone: inAlone})
		}
		if n.Mode&erofs.TypeMask == erofs.TypeDir {
			m, err := marksOf(n)
			if err != nil {
				return err
			}
			if m.opaque || inAlone {
				alone[name] = true
			}
		}
		was, err := below.Find(name)
		if err != nil {
			return err
		}
		now := facts{mode: n.Mode, uid: n.UID, gid: n.GID, mtime: n.Mtime, nsec: n.Nsec, size: n.Size}
		return d.there(name, now, was, alone[name])
	})
	if err != nil {
		return dsec.Changes{}, dsec.E(fault.Class(err, dsec.Corrupt), "compare layer", "", err)
	}
	return d.done()
}

// facts are what is compared of a file.
type facts struct {
	mode, uid, gid, nsec uint32
	mtime, size          int64
}

func (f facts) isDir() bool { return f.mode&erofs.TypeMask == erofs.TypeDir }

// differ gathers changes.
type differ struct {
	below *Below
	most  int
	out   dsec.Changes
	// hidden are directories that show nothing of what they had below, each with
	// the names it had and that were not met again.
	hidden map[string]map[string]bool
}

func newDiffer(below *Below, most int) *differ {
	return &differ{below: below, most: most, hidden: map[string]map[string]bool{}}
}

func (d *differ) add(kind dsec.ChangeKind, name string, dir bool, size, was int64) {
	switch kind {
	case dsec.Added:
		d.out.Added++
	case dsec.Modified:
		d.out.Modified++
	case dsec.Removed:
		d.out.Deleted++
	}
	if kind != dsec.Removed {
		d.out.Bytes += size
	}
	if len(d.out.List) >= d.most {
		d.out.Cut = true
		return
	}
	c := dsec.Change{Kind: kind, Path: shown(name), Size: size, Was: was}
	if dir {
		c.Path += "/"
	}
	d.out.List = append(d.out.List, c)
}

// there is told of a name that is there now, and of what was in its place. In a
// directory that is alone, nothing from below is seen.
func (d *differ) there(name string, now facts, was *erofs.Node, alone bool) error {
	delete(d.hidden[path.Dir(name)], path.Base(name))
	size := int64(0)
	if now.mode&erofs.TypeMask == erofs.TypeRegular {
		size = now.size
	}
	if was == nil {
		d.add(dsec.Added, name, now.isDir(), size, 0)
		return nil
	}
	old := facts{mode: was.Mode, uid: was.UID, gid: was.GID, mtime: was.Mtime, nsec: was.Nsec, size: was.Size}
	if now.isDir() && old.isDir() {
		if now.mode != old.mode || now.uid != old.uid || now.gid != old.gid {
			d.add(dsec.Modified, name, true, 0, 0)
		}
		if alone {
			return d.hide(name)
		}
		return nil // that its names changed is told by them
	}
	if now.mode == old.mode && now.uid == old.uid && now.gid == old.gid && now.mtime == old.mtime && now.nsec == old.nsec && now.size == old.size {
		return nil // copied up and not changed
	}
	before := int64(0)
	if was.Mode&erofs.TypeMask == erofs.TypeRegular {
		before = was.Size
	}
	d.add(dsec.Modified, name, now.isDir(), size, before)
	return nil
}

// hide notes the names that a directory has below and may not show any more.
func (d *differ) hide(name string) error {
	dir, err := d.below.dirAt(name)
	if err != nil || dir == nil {
		return err
	}
	names, err := dir.names()
	if err != nil {
		return err
	}
	set := map[string]bool{}
	for _, n := range names {
		set[n] = true
	}
	d.hidden[name] = set
	return nil
}

// gone is told of a whiteout.
func (d *differ) gone(name string, at place) error {
	if at.alone {
		return nil
	}
	was, err := d.below.Find(name)
	if err != nil || was == nil {
		return err // hides nothing
	}
	d.removed(name, was)
	return nil
}

func (d *differ) removed(name string, was *erofs.Node) {
	size := int64(0)
	if was.Mode&erofs.TypeMask == erofs.TypeRegular {
		size = was.Size
	}
	d.add(dsec.Removed, name, was.Mode&erofs.TypeMask == erofs.TypeDir, size, size)
}

func (d *differ) done() (dsec.Changes, error) {
	for dir, names := range d.hidden {
		for n := range names {
			full := path.Join(dir, n)
			was, err := d.below.Find(full)
			if err != nil {
				return dsec.Changes{}, dsec.E(dsec.Corrupt, "compare disk", "/"+full, err)
			}
			if was != nil { // a whiteout of a layer below is none
				d.removed(full, was)
			}
		}
	}
	slices.SortStableFunc(d.out.List, func(a, b dsec.Change) int { return strings.Compare(a.Path, b.Path) })
	return d.out, nil
}
