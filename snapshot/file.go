package snapshot

import (
	"errors"
	"fmt"
	"os"
	"path"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/image/erofs"
)

// early is a file that was copied before the moment that counts.
type early struct {
	ctime unix.Timespec
	size  int64
	runs  []erofs.Run
}

// readAhead copies the files of the upper. One that cannot be read now will be
// then.
func (p *packer) readAhead() error {
	return p.walk(place{}, func(place) visit {
		return func(at place, name string, f *opened, st *unix.Stat_t) (*place, error) {
			switch st.Mode & unix.S_IFMT {
			case unix.S_IFDIR:
				return at.sub(name, false, overlaid{}), nil
			case unix.S_IFREG:
			default:
				return nil, nil
			}
			if _, twice := p.ahead[inodeOf(st)]; twice || st.Size == 0 || st.Size > maxFile || !p.settled(st) {
				return nil, nil
			}
			before, c := p.data.Blocks(), p.contents(f.File, st)
			runs, err := p.data.AppendSparse(c, st.Size)
			if _, ok := errors.AsType[badDisk](err); ok || err == nil && c.short > 0 {
				return nil, p.data.Rewind(before)
			}
			if err != nil {
				return nil, err
			}
			p.ahead[inodeOf(st)] = early{st.Ctim, st.Size, runs}
			return nil, nil
		}
	})
}

// settled: nothing was written to the file since reading ahead began.
func (p *packer) settled(st *unix.Stat_t) bool { return time.Unix(st.Ctim.Unix()).Before(p.since) }

// content reads what the type of a file says about it. keep is false if it
// turns out to be one that the scrub removes.
func (p *packer) content(n *erofs.Inode, f *os.File, st *unix.Stat_t, name string) (keep bool, err error) {
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFCHR, unix.S_IFBLK:
		n.Rdev = erofs.Rdev(unix.Major(st.Rdev), unix.Minor(st.Rdev))
	case unix.S_IFLNK:
		buf := make([]byte, erofs.MaxTarget+1)
		k, err := unix.Readlinkat(int(f.Fd()), "", buf)
		if err != nil {
			return false, fmt.Errorf("/%s: %w", name, err)
		}
		n.Target = string(buf[:k])
		p.scrub.text(name, "target", n.Target)
	case unix.S_IFREG:
		return p.regular(n, f, st, name)
	}
	return true, nil
}

// regular copies a file into the data file.
func (p *packer) regular(n *erofs.Inode, f *os.File, st *unix.Stat_t, name string) (keep bool, err error) {
	if st.Size > maxFile {
		return false, bad("/%s: %d bytes, at most %d", name, st.Size, int64(maxFile))
	}
	if e, ok := p.ahead[inodeOf(st)]; ok && e.ctime == st.Ctim && e.size == st.Size && p.settled(st) {
		n.Size, n.Runs = st.Size, e.runs
		return true, nil
	}
	before := p.data.Blocks()
	w, copied := p.fromLive(n, st, name)
	if !copied {
		if p.data.Blocks() != before {
			if err := p.data.Rewind(before); err != nil {
				return false, err
			}
		}
		c := p.contents(f, st)
		w = p.scrub.watch(c, st, name)
		if n.Runs, err = p.data.AppendSparse(c, st.Size); err != nil {
			return false, fmt.Errorf("/%s: %w", name, err)
		}
		n.Size = min(st.Size, c.end())
		n.Runs = cut(n.Runs, n.Size)
	}
	if w != nil {
		gone, err := w.verdict(n.Size)
		if err != nil {
			return false, fmt.Errorf("/%s: %w", name, err)
		}
		if gone {
			return false, p.data.Rewind(before)
		}
	}
	return true, nil
}

// fromLive copies a file from where the disk goes on, if it is there what it is
// in the copy. All that writes to a file, be it through a mapping, gives it
// another time; at the moment of the copy every page was clean.
func (p *packer) fromLive(n *erofs.Inode, st *unix.Stat_t, name string) (w *watched, copied bool) {
	if p.live == nil || st.Size == 0 || !p.settled(st) {
		return nil, false
	}
	f, now, err := openEntry(p.live, path.Base(name))
	if err != nil {
		return nil, false
	}
	defer f.Close()
	same := func(now *unix.Stat_t) bool {
		return now.Ino == st.Ino && now.Mode == st.Mode && now.Size == st.Size && now.Ctim == st.Ctim
	}
	if !same(now) {
		return nil, false
	}
	c := p.contents(f, st)
	w = p.scrub.watch(c, st, name)
	if n.Runs, err = p.data.AppendSparse(c, st.Size); err != nil || c.short > 0 {
		return nil, false
	}
	if now, err = stat(f); err != nil || !same(now) {
		return nil, false
	}
	n.Size = st.Size
	return w, true
}

// cut ends the runs of a file that became shorter while it was read.
func cut(runs []erofs.Run, size int64) []erofs.Run {
	for len(runs) > 0 {
		last := &runs[len(runs)-1]
		if last.Off < size {
			most := uint32((size - last.Off + erofs.BlockSize - 1) / erofs.BlockSize)
			last.Count = min(last.Count, most)
			return runs
		}
		runs = runs[:len(runs)-1]
	}
	return runs
}
