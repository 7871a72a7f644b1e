package files

import (
	"cmp"
	"context"
	"errors"
	"io"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// Stat implements FS.
func (l *Local) Stat(ctx context.Context, path string, follow bool) (Info, error) {
	if err := check(ctx, opStat, path); err != nil {
		return Info{}, err
	}
	f, err := l.openPath(path, follow)
	if err != nil {
		return Info{}, fail(opStat, path, err)
	}
	defer f.Close()
	st, err := fstat(f)
	if err != nil {
		return Info{}, fail(opStat, path, err)
	}
	i := l.info(path, &st)
	if i.Kind == Symlink {
		if i.Target, err = readlink(f, ""); err != nil {
			return Info{}, fail(opStat, path, err)
		}
	}
	return i, nil
}

func (l *Local) info(path string, st *unix.Stat_t) Info {
	i := Info{Path: path, Kind: kindOf(st.Mode), Mode: st.Mode & 0o7777, UID: st.Uid, GID: st.Gid,
		MTime: time.Unix(st.Mtim.Unix()).UTC(), Links: uint64(st.Nlink)}
	if i.Kind == File || i.Kind == Symlink {
		i.Size = st.Size
	}
	i.Owner, i.Group = l.names.lookup(l, st.Uid, st.Gid)
	return i
}

// List implements FS.
func (l *Local) List(ctx context.Context, path string, depth int) ([]Info, error) {
	if err := check(ctx, opList, path); err != nil {
		return nil, err
	}
	d, err := l.openDir(path)
	if err != nil {
		return nil, fail(opList, path, err)
	}
	defer d.Close()
	w := lister{l: l, ctx: ctx, asked: path}
	err = w.walk(d, trimRoot(path), max(depth, 1), 0)
	return w.out, err
}

// trimRoot is trimSlash that leaves nothing of "/", to join names to.
func trimRoot(path string) string {
	if t := trimSlash(path); t != "/" {
		return t
	}
	return ""
}

type lister struct {
	l     *Local
	ctx   context.Context
	asked string
	out   []Info
	bytes int // of all paths
}

func (w *lister) walk(d *os.File, prefix string, depth, level int) error {
	if level >= maxDepth {
		return invalid(opList, w.asked, "deeper than %d directories", maxDepth)
	}
	if len(prefix) > maxListedPath {
		return invalid(opList, w.asked, "paths longer than %d bytes", maxListedPath)
	}
	names, err := w.names(d)
	if err != nil {
		return fail(opList, prefix, err)
	}
	for _, name := range names {
		if err := w.ctx.Err(); err != nil {
			return fail(opList, w.asked, err)
		}
		st, err := lstatAt(d, name)
		if missing(err) {
			continue // removed meanwhile
		}
		if err != nil {
			return fail(opList, prefix+"/"+name, err)
		}
		i := w.l.info(prefix+"/"+name, &st)
		if i.Kind == Symlink {
			i.Target, _ = readlink(d, name) // removed meanwhile: empty
		}
		if w.bytes += len(i.Path) + len(i.Target); len(w.out) >= maxEntries || w.bytes > maxListed {
			return w.tooMany()
		}
		w.out = append(w.out, i)
		if i.Kind != Dir || depth <= 1 {
			continue
		}
		if err := w.enter(d, name, i.Path, depth-1, level+1); err != nil {
			return err
		}
	}
	return nil
}

func (w *lister) enter(d *os.File, name, path string, depth, level int) error {
	sub, err := child(d, name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if missing(err) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return nil // replaced meanwhile
	}
	if err != nil {
		return fail(opList, path, err)
	}
	defer sub.Close()
	return w.walk(sub, path, depth, level)
}

// names reads all of a directory, sorted, but no more than may be returned.
func (w *lister) names(d *os.File) ([]string, error) {
	var all []string
	for {
		some, err := d.Readdirnames(1024)
		all = append(all, some...)
		if len(all) > maxEntries {
			return nil, w.tooMany()
		}
		if err == io.EOF {
			slices.SortFunc(all, cmp.Compare[string])
			return all, nil
		}
		if err != nil {
			return nil, err
		}
		if err := w.ctx.Err(); err != nil {
			return nil, err
		}
	}
}

func (w *lister) tooMany() error {
	return dsec.Errorf(dsec.ResourceExhausted, opList, dsec.Quote(w.asked), "more than %d entries or %d MiB of paths; list a deeper directory or less depth", maxEntries, maxListed>>20)
}
