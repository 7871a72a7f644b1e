package container

import (
	"context"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/audit"
)

// witness has what the sandbox does seen from here on. One that is not seen is no
// reason not to have it: that is said, in the log of the node and by the Store.
func (r *Runtime) witness(ctx context.Context, rec *record, root, disk *os.File, adopted bool) {
	if r.cfg.Witness == nil {
		return
	}
	id := rec.Request.ID
	s := audit.Subject{ID: id, UID: rec.UID, Root: root, Disk: disk, Watch: rec.Request.Spec.Watch}
	if err := r.cfg.Witness.Add(ctx, s, adopted); err != nil {
		r.log.Error("what a sandbox does is not seen", "sandbox", id, "err", err)
		if r.cfg.Unseen != nil {
			r.cfg.Unseen(id, err)
		}
	}
}

// witnessAdopted goes on with one that an earlier process made; its root is that of
// its first process.
func (r *Runtime) witnessAdopted(ctx context.Context, rec *record, pid int) {
	if r.cfg.Witness == nil {
		return
	}
	fd, err := unix.Open("/proc/"+strconv.Itoa(pid)+"/root", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		r.log.Error("what a sandbox does is not seen", "sandbox", rec.Request.ID, "err", err)
		return
	}
	root := os.NewFile(uintptr(fd), "root")
	defer root.Close()
	r.witness(ctx, rec, root, nil, true)
}

// witnessCommand says which command a control group was made for, which may have ended by now.
func (r *Runtime) witnessCommand(group uint64, exec string) {
	if w, ok := r.cfg.Witness.(audit.CommandWitness); ok && group != 0 {
		w.Command(group, exec)
	}
}

// unwitness ends that, when nothing of the sandbox runs any more.
func (r *Runtime) unwitness(ctx context.Context, id dsec.SandboxID) {
	r.takeRefusals(ctx)
	if r.cfg.Witness == nil {
		return
	}
	disk, err := r.disks.Open(ctx, string(id))
	if err == nil {
		defer disk.Close()
	}
	r.cfg.Witness.Remove(ctx, id, disk)
}
