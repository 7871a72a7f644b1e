package microvm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/diskpool"
	"github.com/opendsec/dsec/internal/fault"
	"github.com/opendsec/dsec/internal/linux"
)

const (
	diskFile = "disk"

	journal  = 4 << 20  // bytes, of disks that are large enough for one
	leastFor = 16 << 20 // and that is how large
	diskRoom = 64 << 20 // that the pool lets a disk have at least
)

// fileSystemSize is that of the file system in which a sandbox may have so much: it keeps
// some for itself, an inode of 256 bytes for each 16 KiB, and maps of each 128 MiB.
func fileSystemSize(limit int64) int64 {
	n := limit + limit/64 + (limit>>27+2)<<14 + 256<<10
	if n >= leastFor {
		n += journal
	}
	return (n + 4095) &^ 4095
}

// poolLimit is what the pool lets the file of a disk take. The file is as large as its file system, which no guest can
// exceed. A pool that is btrfs counts more than that: what a file shared with a moment is in two places from the next write on,
// and an extent counts whole as long as any of it is used; where that is refused, the guest sees a disk that fails.
func poolLimit(limit int64) int64 { return 4*fileSystemSize(limit) + diskRoom }

// makeDisk makes the disk of a machine, with an empty file system of the sandbox's limit.
func (r *Runtime) makeDisk(ctx context.Context, name string, limit int64) (err error) {
	dir, err := r.disks.Create(ctx, name, poolLimit(limit), diskpool.Owner{})
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	if err = fillDisk(ctx, dir, limit); err != nil {
		return errors.Join(dsec.E(fault.Class(err, dsec.Internal), "make disk", name, err), r.disks.Remove(context.WithoutCancel(ctx), name))
	}
	return nil
}

func fillDisk(ctx context.Context, dir *os.File, limit int64) error {
	fd, err := unix.Openat(int(dir.Fd()), diskFile, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), diskFile)
	defer func() { _ = f.Close() }()
	linux.WriteInPlace(f)
	if err := f.Truncate(fileSystemSize(limit)); err != nil {
		return err
	}
	return format(ctx, f, fileSystemSize(limit))
}

// format makes an ext4 with these features, whatever the machine's own defaults are.
func format(ctx context.Context, f *os.File, size int64) error {
	features := "none,extent,flex_bg,uninit_bg,dir_index,filetype,sparse_super,large_file,huge_file,extra_isize,dir_nlink"
	args := []string{"-F", "-q", "-t", "ext4", "-b", "4096", "-I", "256", "-m", "0", "-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard,root_owner=0:0"}
	if size > 8<<40 {
		features += ",64bit"
	}
	if size >= leastFor {
		features += ",has_journal"
		args = append(args, "-J", fmt.Sprintf("size=%d", journal>>20))
	}
	args = append(args, "-O", features, "/proc/self/fd/3", strconv.FormatInt(size/4096, 10))
	cmd := exec.CommandContext(ctx, "mkfs.ext4", args...)
	cmd.ExtraFiles = []*os.File{f}
	if out, err := cmd.CombinedOutput(); err != nil {
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return fmt.Errorf("mkfs.ext4: %w: %s", err, dsec.Quote(string(out)))
	}
	return nil
}

// diskPath is where the disk can be opened, as long as dir is open.
func diskPath(dir *os.File) string { return fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), diskFile) }

// DiskFailed implements runtime.DiskWatcher.
func (r *Runtime) DiskFailed(ctx context.Context) error {
	if _, err := r.disks.Space(ctx); errors.Is(err, diskpool.ErrFailed) {
		return err
	}
	return nil
}

// DiskFull implements runtime.DiskWatcher.
func (r *Runtime) DiskFull(ctx context.Context) error {
	const spare = 64 << 20 // what file systems keep to themselves, about
	s, err := r.disks.Space(ctx)
	if err == nil && s.Free < spare {
		err = dsec.Errorf(dsec.NoSpace, "look at disk pool", r.disks.Mechanism(), "%d MiB are free for all sandboxes", s.Free>>20)
	}
	return err
}
