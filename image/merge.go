package image

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/opendsec/dsec/image/erofs"
	"github.com/opendsec/dsec/internal/within"
)

// MergeOptions say what Merge makes. The zero value of a limit is its default.
type MergeOptions struct {
	// KeepWhiteouts makes a layer that stands on others: what hides a name or
	// moves a directory of the layers below those that are merged is kept.
	KeepWhiteouts bool
	// Hides, with KeepWhiteouts, tells whether the layers below have a path; a
	// whiteout for one they have not is left out. nil: they may have any.
	Hides     func(path string) (bool, error)
	UserXattr bool // the layers are, and the result is, for mounts with userxattr

	MaxBytes   int64 // of contents; default 256 GiB
	MaxEntries int64 // default 8 Mi

	// Progress is called now and then with what has been written so far.
	Progress func(Progress)
}

// Merge makes one layer of layers that stand on one another, the lowest first:
// mounted in their place it shows the same tree. Whiteouts, opaque directories
// and redirects among them are resolved; names of one file stay names of one
// file; holes stay holes. Contents are read from the data of the images, only
// what is still seen, each file once and in the order in which it lies there.
//
// The same layers give the same bytes. Of dst, Meta and Data are used. The
// configuration is the caller's to decide: the result has none.
func Merge(ctx context.Context, lowersBottomFirst []*erofs.Image, dst Files, opts MergeOptions) (Result, error) {
	const op = "merge layers"
	if len(lowersBottomFirst) == 0 {
		return Result{}, classify(op, "", errors.New("no layers"))
	}
	limits := Options{MaxBytes: opts.MaxBytes, MaxEntries: opts.MaxEntries, Progress: opts.Progress}
	if err := limits.fill(); err != nil {
		return Result{}, classify(op, "", err)
	}
	o := newOverlaid(opts.KeepWhiteouts, opts.UserXattr, limits.MaxEntries)
	for i, im := range lowersBottomFirst {
		if err := o.add(ctx, im); err != nil {
			return Result{}, classify(op, "", fmt.Errorf("layer %d: %w", i, err))
		}
	}
	if opts.KeepWhiteouts {
		if err := o.tidy(o.root, below{}, opts.Hides); err != nil {
			return Result{}, classify(op, "", err)
		}
	}
	res, err := o.write(ctx, dst, limits)
	if err != nil {
		return Result{}, classify(op, "", err)
	}
	return res, nil
}

// tidy takes out the whiteouts that hide nothing: in directories through which
// nothing shines, where they would be listed, and of names that nobody below has.
func (o *overlaid) tidy(d *erofs.Inode, low below, hides func(string) (bool, error)) error {
	for _, name := range d.Names() {
		c := d.Child(name)
		switch {
		case c.IsDir():
			under := below{path: path.Join(low.path, name), none: low.none}
			switch m := o.marksOf(c); {
			case m.opaque:
				under.none = true
			case strings.HasPrefix(m.redirect, "/"):
				under = below{path: strings.Trim(m.redirect, "/")}
			case m.redirect != "":
				under.path = path.Join(low.path, m.redirect)
			}
			if err := o.tidy(c, under, hides); err != nil {
				return err
			}
		case c.IsWhiteout():
			keep := !low.none
			if keep && hides != nil {
				var err error
				if keep, err = hides(path.Join(low.path, name)); err != nil {
					return err
				}
			}
			if !keep {
				d.Unlink(name)
			}
		}
	}
	return nil
}

// write copies what the tree still has and writes the layer.
func (o *overlaid) write(ctx context.Context, dst Files, limits Options) (Result, error) {
	data := erofs.NewData(dst.Data)
	left, err := o.copies(o.root)
	if err != nil {
		return Result{}, err
	}
	var bytes int64
	for i, c := range left {
		if err := ctx.Err(); err != nil {
			return Result{}, err
		}
		if bytes += c.in.Size; bytes > limits.MaxBytes {
			return Result{}, fmt.Errorf("more than %d bytes", limits.MaxBytes)
		}
		r, err := c.node.Contents()
		if err != nil {
			return Result{}, err
		}
		if c.in.Runs, err = data.Copy(within.ReaderAt(ctx, r), c.in.Size, c.runs); err != nil {
			return Result{}, fmt.Errorf("contents of inode %d: %w", c.node.NID, err)
		}
		limits.report(bytes, int64(i+1))
	}
	stats, err := erofs.Write(dst.Meta, o.root, data.Blocks())
	if err != nil {
		return Result{}, err
	}
	return Result{MetaSize: stats.MetaSize, DataSize: int64(data.Blocks()) * erofs.BlockSize, Entries: stats.Inodes}, nil
}

// copying is one file whose contents go to the new data file.
type copying struct {
	contentsOf
	in   *erofs.Inode
	runs []erofs.Run // where they are
}

// copies lists the files of a tree in the order in which their contents lie.
func (o *overlaid) copies(root *erofs.Inode) ([]copying, error) {
	var out []copying
	seen := map[*erofs.Inode]bool{}
	err := root.Walk(func(name string, in *erofs.Inode) error {
		from, ok := o.files[in]
		if !ok || seen[in] {
			return nil
		}
		seen[in] = true
		runs, err := from.node.Runs()
		if err != nil {
			return fmt.Errorf("%s: %w", quoteName(name), err)
		}
		if len(runs) > 0 {
			out = append(out, copying{from, in, runs})
		}
		return nil
	})
	slices.SortStableFunc(out, func(a, b copying) int {
		return cmp.Or(cmp.Compare(a.layer, b.layer), cmp.Compare(a.runs[0].Block, b.runs[0].Block))
	})
	return out, err
}
