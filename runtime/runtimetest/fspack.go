package runtimetest

import (
	"bytes"
	"path"
	"slices"
	"strings"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/files"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/image/erofs"
)

// pack writes the upper as a layer.
func (fs *memFS) pack(into image.Files) (dsec.Packed, error) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	data, root := erofs.NewData(into.Data), erofs.NewDir(0o755)
	if err := packDir(data, root, fs.root); err != nil {
		return dsec.Packed{}, dsec.E(dsec.ClassOf(err), "pack disk", "", err)
	}
	for p := range fs.removed {
		if _, err := fs.walk(user{}, p, false, maxLinks); err == nil {
			continue // made again
		}
		d := root
		for _, part := range strings.Split(strings.Trim(path.Dir(p), "/"), "/") {
			if part == "" {
				continue
			}
			next := d.Child(part)
			if next == nil {
				next = erofs.NewDir(0o755)
				_ = d.Link(part, next) // the name is one that there was
			}
			d = next
		}
		if d.IsDir() {
			_ = d.Link(path.Base(p), &erofs.Inode{Mode: erofs.TypeChar})
		}
	}
	stats, err := erofs.Write(into.Meta, root, data.Blocks())
	if err != nil {
		return dsec.Packed{}, dsec.E(dsec.ClassOf(err), "pack disk", "", err)
	}
	return dsec.Packed{Entries: stats.Inodes, MetaSize: stats.MetaSize, DataSize: int64(data.Blocks()) * erofs.BlockSize}, nil
}

// packDir adds what is in n and of the upper. A directory of the base is there
// if something in it is.
func packDir(data *erofs.Data, to *erofs.Inode, n *inode) error {
	for _, name := range sortedNames(n) {
		c := n.children[name]
		e := &erofs.Inode{UID: c.uid, GID: c.gid, Mtime: c.mtime.Unix(), Nsec: uint32(c.mtime.Nanosecond())}
		switch {
		case c.isDir():
			d := erofs.NewDir(c.mode)
			d.UID, d.GID, d.Mtime, d.Nsec = e.UID, e.GID, e.Mtime, e.Nsec
			if err := packDir(data, d, c); err != nil {
				return err
			}
			if !c.upper && len(d.Names()) == 0 {
				continue
			}
			e = d
		case !c.upper || c.kind == files.Other:
			continue
		case c.kind == files.Symlink:
			e.Mode, e.Target = erofs.TypeSymlink|0o777, c.target
		default:
			runs, err := data.Append(bytes.NewReader(c.data), int64(len(c.data)))
			if err != nil {
				return err
			}
			e.Mode, e.Size, e.Runs = erofs.TypeRegular|c.mode, int64(len(c.data)), runs
		}
		if err := to.Link(name, e); err != nil {
			return err
		}
	}
	return nil
}

// changes lists the upper. The fake does not remember what there was before.
func (fs *memFS) changes(most int) (out dsec.Changes) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	base := newMemFS(0)
	var list []dsec.Change
	var walk func(rel string, n *inode)
	walk = func(rel string, n *inode) {
		for _, name := range sortedNames(n) {
			c, at := n.children[name], path.Join(rel, name)
			if c.upper {
				ch := dsec.Change{Kind: dsec.Added, Path: at, Size: int64(len(c.data))}
				if was, err := base.walk(user{}, at, false, maxLinks); err == nil {
					ch.Kind, ch.Was = dsec.Modified, int64(len(was.data))
				}
				if c.isDir() {
					ch.Path += "/"
				}
				list = append(list, ch)
			}
			walk(at, c)
		}
	}
	walk("/", fs.root)
	for p := range fs.removed {
		if _, err := fs.walk(user{}, p, false, maxLinks); err != nil {
			list = append(list, dsec.Change{Kind: dsec.Removed, Path: p})
		}
	}
	slices.SortFunc(list, func(a, b dsec.Change) int { return strings.Compare(a.Path, b.Path) })
	for _, c := range list {
		switch c.Kind {
		case dsec.Added:
			out.Added++
		case dsec.Modified:
			out.Modified++
		default:
			out.Deleted++
		}
		out.Bytes += c.Size
	}
	out.Cut = len(list) > most
	out.List = list[:min(len(list), most)]
	return out
}
