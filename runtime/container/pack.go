package container

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/internal/accounts"
	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/internal/diskpool"
	"github.com/opendsec/dsec/internal/failpoint"
	"github.com/opendsec/dsec/internal/lifecycle"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/rootfs"
	"github.com/opendsec/dsec/runtime/tier"
	"github.com/opendsec/dsec/snapshot"
)

// packSuffix and a number make the name of the copy of a disk that is looked at,
// and of who uses its layers meanwhile. A disk may be looked at several times at once.
const packSuffix = ".pack"

// freezeWithin is how long the processes of a sandbox may take to stand still. One
// that the kernel does not let go of for so long is not waited for.
const freezeWithin = 10 * time.Second

// ours are the files that setup writes: they describe the sandbox, not its content.
var ours = []string{"etc/hosts", "etc/hostname", "etc/resolv.conf"}

// Pack makes a layer of what a sandbox changed.
func (r *Runtime) Pack(ctx context.Context, id dsec.SandboxID, into image.Files, scrub dsec.Scrub) (dsec.Packed, error) {
	const op = "pack disk of sandbox"
	k := snapshot.NewPacking(into, snapshot.Options{Scrub: scrub})
	pause, err := r.atOneMoment(ctx, op, id, glance{
		before: func(src snapshot.Source) error { return k.ReadAhead(ctx, src) },
		at: func(src snapshot.Source) error {
			if err := failpoint.Hit(ctx, "container.pack.disk"); err != nil {
				return err
			}
			return k.Read(ctx, src)
		}})
	if err != nil {
		return dsec.Packed{Pause: pause}, r.wrap(op, id, err)
	}
	res, err := k.Write()
	return dsec.Packed{Entries: res.Entries, MetaSize: res.MetaSize, DataSize: res.DataSize, Report: res.Report, Pause: pause}, r.wrap(op, id, err)
}

// Changes lists what a sandbox changed.
func (r *Runtime) Changes(ctx context.Context, id dsec.SandboxID, most int) (changes dsec.Changes, err error) {
	const op = "compare disk of sandbox"
	_, err = r.atOneMoment(ctx, op, id, glance{at: func(src snapshot.Source) (err error) {
		changes, err = snapshot.Changes(ctx, src, most)
		return err
	}})
	return changes, r.wrap(op, id, err)
}

// glance is who wants to see a disk.
type glance struct {
	before func(snapshot.Source) error // while it is in use, where it cannot be copied; may be nil
	at     func(snapshot.Source) error // as it is at one moment
}

// atOneMoment shows the disk of a sandbox as it is at one moment, and says for
// how long the sandbox stood still for that. Where the pool can copy a disk in a
// moment, the copy is shown and the sandbox goes on meanwhile; elsewhere it
// stands still until it was seen.
func (r *Runtime) atOneMoment(ctx context.Context, op string, id dsec.SandboxID, g glance) (pause time.Duration, err error) {
	sb, err := r.boxes.Acquire(ctx, op, id)
	if err != nil {
		return 0, err
	}
	unlock := sync.OnceFunc(sb.Leave)
	defer unlock()
	if err := r.quiet(ctx, op, sb); err != nil {
		return 0, err
	}
	user := fmt.Sprintf("%s%s%d", id, packSuffix, r.looks.Add(1))
	rec := sb.record()
	if err := r.mounts.Use(ctx, user, rec.Request.Layers.Layers); err != nil {
		return 0, err
	}
	defer r.mounts.Unuse(user)
	disk, err := r.disks.Open(ctx, string(id))
	if err != nil {
		return 0, err
	}
	defer disk.Close()
	pool, ok := r.disks.(diskpool.Snapshotter)
	if !ok {
		if g.before != nil && sb.GetPhase() == tier.Running && !sb.IsPaused() {
			if err := r.show(user, rec, diskCopy{File: disk}, g.before); err != nil {
				return 0, err
			}
		}
		return r.still(ctx, sb, func() error { return r.show(user, rec, diskCopy{File: disk}, g.at) })
	}
	c, pause, err := r.copyDisk(ctx, sb, pool, user)
	if err != nil {
		return pause, err
	}
	defer c.Close()
	unlock()
	c.of = disk
	err = r.show(user, rec, c, g.at)
	return pause, errors.Join(err, r.disks.Remove(context.WithoutCancel(ctx), user))
}

// diskCopy is the copy of a disk, or, without of, the disk itself.
type diskCopy struct {
	*os.File
	of *os.File
	at time.Time
}

// quiet sees to it that of a sandbox without processes nothing else has the
// disk. The turn is held.
func (r *Runtime) quiet(ctx context.Context, op string, sb *sandbox) error {
	if err := sb.record().packable(op); err != nil {
		return err
	}
	switch sb.GetPhase() {
	case tier.Running:
		if sb.isMoving() {
			return betweenPhases(op, sb)
		}
		return nil
	case tier.Ended:
		if err := r.hold.KillSandbox(ctx, string(sb.ID)); err != nil {
			return err
		}
		sb.closeRoot()
		return r.closeDiskShell(ctx, sb)
	case tier.Stopped:
		return r.closeDiskShell(ctx, sb)
	case tier.Removing, tier.Absent:
		return dsec.Errorf(dsec.SandboxGone, op, string(sb.ID), "the sandbox has ended")
	}
	return dsec.Errorf(dsec.IllegalState, op, string(sb.ID), "the sandbox is being made")
}

// copyDisk copies the disk. What is written and not yet on the disk has to get
// there first, and takes its time by how much that is: a copy that nobody needs
// makes most of it happen while the sandbox still runs.
func (r *Runtime) copyDisk(ctx context.Context, sb *sandbox, pool diskpool.Snapshotter, name string) (c diskCopy, pause time.Duration, err error) {
	id := string(sb.ID)
	if sb.GetPhase() == tier.Running && !sb.IsPaused() {
		before, err := pool.Snapshot(ctx, id, name)
		if err != nil {
			return c, 0, err
		}
		before.Close()
		if err := r.disks.Remove(ctx, name); err != nil {
			return c, 0, err
		}
	}
	pause, err = r.still(ctx, sb, func() (err error) {
		c.at = time.Now()
		c.File, err = pool.Snapshot(ctx, id, name)
		return err
	})
	if err != nil && c.File != nil { // copied, but not thawed
		c.Close()
		err = errors.Join(err, r.disks.Remove(context.WithoutCancel(ctx), name))
	}
	return c, pause, err
}

// still runs fn while no process of a sandbox runs.
func (r *Runtime) still(ctx context.Context, sb *sandbox, fn func() error) (pause time.Duration, err error) {
	if sb.GetPhase() != tier.Running || sb.IsPaused() {
		return 0, fn()
	}
	sb.Mu.Lock()
	g := sb.group
	sb.Mu.Unlock()
	begun := time.Now()
	defer func() {
		uctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lifecycle.UndoLimit)
		defer cancel()
		err = errors.Join(err, r.goOn(uctx, sb, g))
	}()
	if err := r.setStill(sb, true); err != nil {
		return 0, err
	}
	// The clock first, as for a pause.
	if err := r.hold.HoldClock(ctx, string(sb.ID), true); err != nil {
		return 0, err
	}
	fctx, cancel := context.WithTimeout(ctx, freezeWithin)
	defer cancel()
	begun = time.Now()
	if err := g.Freeze(fctx); err != nil {
		if ctx.Err() == nil && dsec.ClassOf(err) == dsec.Timeout {
			err = dsec.Errorf(dsec.Unavailable, "freeze sandbox", string(sb.ID), "not all of its processes stand still within %v: %w", freezeWithin, err)
		}
		return time.Since(begun), err
	}
	if err := failpoint.Hit(ctx, "container.pack.frozen"); err != nil {
		return time.Since(begun), err
	}
	if err := fn(); err != nil {
		return time.Since(begun), err
	}
	err = g.Thaw(context.WithoutCancel(ctx))
	return time.Since(begun), err
}

// goOn undoes what still did before it ran.
func (r *Runtime) goOn(ctx context.Context, sb *sandbox, g *cgroup.Group) error {
	return errors.Join(g.Thaw(ctx), r.hold.HoldClock(ctx, string(sb.ID), false), r.setStill(sb, false))
}

func (r *Runtime) setStill(sb *sandbox, on bool) error {
	if sb.record().Still == on {
		return nil
	}
	return r.rerecord(sb, func(rec *record) { rec.Still = on })
}

// rerecord changes what survives this process. The turn is held.
func (r *Runtime) rerecord(sb *sandbox, change func(rec *record)) error {
	rec := *sb.record()
	change(&rec)
	if err := writeRecord(r.dir(sb.ID), &rec); err != nil {
		return diskError("write state of sandbox", string(sb.ID), err)
	}
	sb.Mu.Lock()
	defer sb.Mu.Unlock()
	sb.rec = &rec
	return nil
}

// show describes a disk, or the copy of one, to fn.
func (r *Runtime) show(user string, rec *record, disk diskCopy, fn func(snapshot.Source) error) error {
	src := snapshot.Source{Base: rec.UID, IDs: accounts.IDs, Skip: ours, View: func() (*os.File, error) {
		return r.mounts.View(rootfs.Root{User: user, Layers: digests(rec.Request.Layers), Dir: disk.File})
	}}
	var err error
	if src.Upper, err = openUpper(disk.File); err != nil {
		return err
	}
	defer src.Upper.Close()
	if disk.of != nil {
		if src.Live, err = openUpper(disk.of); err != nil {
			return err
		}
		defer src.Live.Close()
		src.Moment = disk.at
	}
	if src.Below, err = snapshot.OpenBelow(rec.Request.Layers.Layers); err != nil {
		return err
	}
	defer src.Below.Close()
	return fn(src)
}

func openUpper(disk *os.File) (*os.File, error) {
	return linux.OpenBeneath(disk, rootfs.Upper, unix.O_RDONLY|unix.O_DIRECTORY)
}

// likePacked gives the root of a new disk the mode, owner and time that the root
// of the packed disk below it has: of a root, overlayfs shows those of the upper.
func (b *build) likePacked() error {
	layers := b.rec.Request.Layers.Layers
	top := layers[len(layers)-1]
	if top.Lineage == nil {
		return nil
	}
	was, err := snapshot.RootOf(top)
	if err != nil {
		return err
	}
	upper, err := openUpper(b.dir)
	if err != nil {
		return err
	}
	defer upper.Close()
	fd := int(upper.Fd())
	at := unix.Timespec{Sec: was.Mtime, Nsec: int64(was.Nsec)}
	err = errors.Join(unix.Fchown(fd, int(b.rec.UID+was.UID), int(b.rec.UID+was.GID)), unix.Fchmod(fd, was.Mode&0o7777),
		unix.UtimesNanoAt(fd, ".", []unix.Timespec{at, at}, 0))
	if err != nil {
		return diskError("restore root of", string(b.sb.ID), err)
	}
	return nil
}
