// Package watch witnesses writes to watched paths of sandboxes.
//
// # Mechanism
//
// Two fanotify groups for all sandboxes of the machine, kept by the Keeper so that
// events are told also if this process was not there:
//
//   - writes: a mark on the overlay of each sandbox. An event comes with the very file
//     when one that was open for writing is closed, be it a mapping that is undone.
//   - names: one mark on the file system of the disk pool, in which the uppers of all
//     sandboxes are: what is made, removed and renamed there, copies of a layer's
//     files among it, which are made when one is opened for writing. Overlays themselves take no
//     such marks.
//
// Whose file it is follows from the file system, or the disk, and is no word of an agent.
//
// # Promises
//
// Each change of a watched path is at least one record. A file that is held open and
// written is told when it is opened, if it is of a layer, and else when it is closed. What is
// reached by another mount of the same files has no path that can be trusted:
// it is told if its name alone is watched. Links with another name, renamed
// directories, and events that the kernel dropped (which also is a record of kind lost) have
// the disk looked through soon. When a sandbox is removed, its disk is
// looked through in any case: a record tells of every watched path that is not as in the layers,
// whatever trick was used.
//
// Not seen: files on other file systems of a sandbox, like /tmp if that is a tmpfs; names where
// the pool is not one file system of its own, until the disk is looked through; and
// reads.
package watch

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/audit"
	"github.com/opendsec/dsec/internal/procinfo"
)

// Config of a Witness.
type Config struct {
	Keeper audit.Keeper
	Name   string   // of what is kept; of this dsec on the machine
	Pool   *os.File // root of the file system that has a directory for each sandbox; nil: there is none
	Take   func(dsec.SandboxID, ...dsec.AuditRecord)
	Cache  *procinfo.Cache // knows processes that have ended
	Log    *slog.Logger
}

// Witness implements audit.Witness.
type Witness struct {
	cfg    Config
	writes *group
	names  *group // nil: there is no pool
	pool   string // what links of files in it begin with
	dirs   dirCache
	stop   chan struct{}
	done   sync.WaitGroup

	mu     sync.Mutex
	by     map[dsec.SandboxID]*subject
	device map[uint64]*subject
	mount  map[uint64]*subject
}

// subject is a sandbox; its fields but look do not change.
type subject struct {
	id     dsec.SandboxID
	uid    uint32
	list   *audit.Watchlist
	prefix string // what links of files in its root begin with
	device uint64
	mount  uint64
	look   look
}

var _ audit.Witness = (*Witness)(nil)

// layout names what the groups are told of.
const (
	layout   = "watch1-"
	ofWrites = "-writes"
	ofNames  = "-names"
)

// Forget ends what an earlier process may have left that looks at paths.
func Forget(ctx context.Context, c Config) error {
	return errors.Join(c.Keeper.Drop(ctx, layout+c.Name+ofWrites), c.Keeper.Drop(ctx, layout+c.Name+ofNames))
}

// Open takes over the groups that are kept, or makes them. It errs with Unsupported if the
// machine cannot. Nothing is read before Start.
func Open(ctx context.Context, c Config) (w *Witness, err error) {
	const op = "watch paths"
	w = &Witness{cfg: c, stop: make(chan struct{}), by: map[dsec.SandboxID]*subject{}, device: map[uint64]*subject{}, mount: map[uint64]*subject{}}
	if w.writes, err = openGroup(ctx, c.Keeper, layout+c.Name+ofWrites, unix.FAN_CLASS_NOTIF); err != nil {
		return nil, dsec.E(dsec.Unsupported, op, c.Name, err)
	}
	if c.Pool == nil {
		return w, nil
	}
	if w.names, err = openGroup(ctx, c.Keeper, layout+c.Name+ofNames, unix.FAN_CLASS_NOTIF|unix.FAN_REPORT_DFID_NAME); err == nil {
		if err = w.names.mark(c.Pool, nameEvents); err != nil {
			err = errors.Join(err, w.names.file.Close())
		}
	}
	if err != nil {
		c.Log.Warn("renamed and removed files of sandboxes are told only when their disks are looked through", "err", err)
		w.names = nil
		return w, nil
	}
	if w.pool, err = procinfo.Link(int(c.Pool.Fd())); err != nil {
		return nil, dsec.E(dsec.Internal, op, c.Name, errors.Join(err, w.writes.file.Close(), w.names.file.Close()))
	}
	if w.pool == "/" {
		w.pool = ""
	}
	return w, nil
}

// Start begins to read, when all sandboxes of an earlier process have been added.
func (w *Witness) Start() {
	w.writes.start()
	w.done.Go(func() { w.writes.read(w.written, w.overflow) })
	if w.names != nil {
		w.names.start()
		w.done.Go(func() { w.names.read(w.named, w.overflow) })
	}
	w.done.Go(w.looks)
}

// Close ends the reading only: events are still kept for the next process.
func (w *Witness) Close() error {
	close(w.stop)
	err := w.writes.file.Close()
	if w.names != nil {
		err = errors.Join(err, w.names.file.Close())
	}
	w.done.Wait()
	return err
}

// Add implements audit.Witness.
func (w *Witness) Add(_ context.Context, s audit.Subject, adopted bool) error {
	const op = "watch paths"
	list, err := audit.NewWatchlist(s.Watch)
	if err != nil {
		return err
	}
	x := &subject{id: s.ID, uid: s.UID, list: list}
	st, err := identity(s.Root)
	if err == nil {
		x.device, x.mount = unix.Mkdev(st.Dev_major, st.Dev_minor), st.Mnt_id
		x.prefix, err = procinfo.Link(int(s.Root.Fd()))
	}
	if err != nil {
		return dsec.E(dsec.Internal, op, string(s.ID), err)
	}
	if x.prefix == "/" {
		x.prefix = ""
	}
	w.mu.Lock()
	w.by[s.ID], w.device[x.device], w.mount[x.mount] = x, x, x
	w.mu.Unlock()
	if err := w.writes.mark(s.Root, unix.FAN_CLOSE_WRITE); err != nil {
		return dsec.E(dsec.Internal, op, string(s.ID), err)
	}
	if adopted {
		x.look.want() // what happened before is told by events, or not at all
	}
	return nil
}

// identity says which file system and mount a file is reached by.
func identity(f *os.File) (st unix.Statx_t, err error) {
	if f == nil {
		return st, errors.New("it has no root")
	}
	return statx(int(f.Fd()))
}

func statx(fd int) (st unix.Statx_t, err error) {
	err = unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_MNT_ID|unix.STATX_NLINK|unix.STATX_TYPE, &st)
	return st, err
}

// Remove implements audit.Witness.
func (w *Witness) Remove(ctx context.Context, id dsec.SandboxID, disk *os.File) {
	w.mu.Lock()
	x := w.by[id]
	w.mu.Unlock()
	if x == nil {
		return
	}
	w.writes.settle()
	if w.names != nil {
		w.names.settle()
	}
	if disk != nil {
		w.lookThrough(ctx, x, disk, true)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.by, id)
	if w.device[x.device] == x {
		delete(w.device, x.device)
	}
	if w.mount[x.mount] == x {
		delete(w.mount, x.mount)
	}
}

// overflow: the kernel dropped events, and nobody knows whose.
func (w *Witness) overflow() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for id, x := range w.by {
		x.look.want()
		w.cfg.Take(id, audit.Lost(0, "files changed faster than they were told, or while nobody read; the disk is looked through"))
	}
}

// tell writes down who did what to a path.
func (w *Witness) tell(x *subject, pid int, path, what string) {
	r := dsec.AuditRecord{Kind: dsec.AuditWrite, UID: dsec.NobodyID, GID: dsec.NobodyID, Path: path, Detail: what}
	if i, ok := w.cfg.Cache.Find(pid); ok {
		r.UID, r.GID, r.PID = x.inside(i.UID), x.inside(i.GID), i.PID
		r.Exe, r.Args = procinfo.Inside(i.Exe, x.prefix), audit.CutArgs(i.Args)
		if r.Exec = procinfo.ExecOf(i.Group); r.Exec == "" && i.Group != "" {
			r.Detail += ", by the file service"
		}
	}
	w.cfg.Take(x.id, r)
}

const idCount = 1 << 16

func (x *subject) inside(id uint32) int64 {
	if id < x.uid || id-x.uid >= idCount {
		return dsec.NobodyID
	}
	return int64(id - x.uid)
}
