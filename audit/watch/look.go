package watch

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/audit"
	"github.com/opendsec/dsec/rootfs"
)

const (
	lookEvery   = 10 * time.Second // at most, at the disk of a sandbox that runs
	mostEntries = 500_000          // of a disk that are looked at
	mostFound   = 512              // of them that are told
)

// look is when a disk is to be looked through, and what was told of it.
type look struct {
	mu     sync.Mutex
	wanted bool
	last   time.Time
	told   map[string]state
}

// state is what changes with a file.
type state struct {
	inode   uint64
	changed int64 // when, in nanoseconds
}

func (l *look) want() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.wanted = true
}

// due reports whether it is time, and then it is done.
func (l *look) due(now time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.wanted || now.Sub(l.last) < lookEvery {
		return false
	}
	l.wanted, l.last = false, now
	return true
}

// news reports whether a file was not told in this state.
func (l *look) news(path string, s state) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.told[path] == s {
		return false
	}
	if l.told == nil {
		l.told = map[string]state{}
	}
	if len(l.told) < 2*mostFound {
		l.told[path] = s
	}
	return true
}

// looks goes through the disks for which something gave reason.
func (w *Witness) looks() {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-w.stop:
			return
		}
		for _, x := range w.due() {
			w.lookAt(x)
		}
	}
}

func (w *Witness) due() (list []*subject) {
	if w.cfg.Pool == nil {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	for _, x := range w.by {
		if x.look.due(now) {
			list = append(list, x)
		}
	}
	return list
}

func (w *Witness) lookAt(x *subject) {
	pool, err := os.OpenRoot("/proc/self/fd/" + strconv.Itoa(int(w.cfg.Pool.Fd())))
	if err != nil {
		w.cfg.Log.Error("disk of sandbox not looked through", "sandbox", x.id, "err", err)
		return
	}
	defer pool.Close()
	disk, err := pool.Open(string(x.id))
	if err != nil {
		return // it is being removed, which has it looked through
	}
	defer disk.Close()
	w.lookThrough(context.Background(), x, disk, false)
}

// found is a watched path that is on the disk.
type found struct {
	path, what string
	state      state
}

// lookThrough tells which watched paths are on a disk: all, or those that were not told before.
func (w *Witness) lookThrough(ctx context.Context, x *subject, disk *os.File, all bool) {
	list, more, err := watchedOn(ctx, disk, x.list)
	if err != nil {
		w.cfg.Take(x.id, audit.Lost(0, "the disk was not looked through to its end: "+err.Error()))
	}
	var records []dsec.AuditRecord
	for _, f := range list {
		if x.look.news(f.path, f.state) || all {
			records = append(records, dsec.AuditRecord{Kind: dsec.AuditWrite, UID: dsec.NobodyID, GID: dsec.NobodyID, Path: f.path, Detail: f.what})
		}
	}
	if more > 0 {
		records = append(records, audit.Lost(int64(more), "more watched paths differ"))
	}
	if len(records) > 0 {
		w.cfg.Take(x.id, records...)
	}
}

var errMany = errors.New("it has too many entries")

// watchedOn walks an upper. No link is followed out of it, though its sandbox may run.
func watchedOn(ctx context.Context, disk *os.File, list *audit.Watchlist) (all []found, more int, err error) {
	root, err := os.OpenRoot("/proc/self/fd/" + strconv.Itoa(int(disk.Fd())) + "/" + rootfs.Upper)
	if err != nil {
		return nil, 0, err
	}
	defer root.Close()
	entries := 0
	err = fs.WalkDir(root.FS(), ".", func(name string, d fs.DirEntry, err error) error {
		if entries++; entries > mostEntries {
			return errMany
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		path := "/" + name
		if err != nil || d.IsDir() || !list.Match(path) {
			return nil // a directory that went meanwhile, or what nobody asks for
		}
		i, err := d.Info()
		if err != nil {
			return nil
		}
		if len(all) == mostFound {
			more++
			return nil
		}
		f := found{path: path, what: dsec.WriteDiffers}
		if st, ok := i.Sys().(*syscall.Stat_t); ok {
			f.state = state{st.Ino, st.Ctim.Nano()}
			if i.Mode()&fs.ModeCharDevice != 0 && st.Rdev == 0 {
				f.what += ", removed"
			}
		}
		all = append(all, f)
		return nil
	})
	return all, more, err
}
