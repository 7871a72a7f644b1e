package diskpool

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/linux"
)

// btrfsPool is one btrfs in a sparse file; an entry is a subvolume of its
// root directory, and the quota group that the kernel makes with it is its
// limit.
type btrfsPool struct {
	base
	root   *os.File // root directory of the detached mount
	mount  *os.File // keeps it mounted
	groups string   // directory of the quota groups in /sys
	simple bool     // simple quotas: no walk of back references at commit

	sweeping chan uint64 // quota groups whose subvolume was deleted
	done     chan struct{}
	closing  sync.Once
	stop     chan struct{}

	mu      sync.Mutex
	pending int           // deleted, blocks not back yet
	swept   chan struct{} // closed and made anew when some are
}

const poolFile = "pool.btrfs"

// MinPool is the least that a pool file can have: mkfs.btrfs takes less, but the
// kernel refuses to resize a file system to less, and it grows with its file.
const MinPool = 256 << 20

func openBtrfs(ctx context.Context, o Options) (Pool, error) {
	const op = "open disk pool"
	file := filepath.Join(o.Dir, poolFile)
	mount, err := o.Keeper.Get(ctx, keeperName)
	if errors.Is(err, dsec.NotFound.Err()) {
		mount, err = mountPool(ctx, o, file)
		if err == nil {
			if err = o.Keeper.Put(ctx, keeperName, mount); err != nil {
				_ = mount.Close()
			}
		}
	}
	if err != nil {
		return nil, wrap(op, file, err)
	}
	p := &btrfsPool{base: base{o: o}, mount: mount, sweeping: make(chan uint64, 1024), done: make(chan struct{}),
		stop: make(chan struct{}), swept: make(chan struct{})}
	if err := p.begin(); err != nil {
		if p.root != nil && failed(p.root) {
			err = fmt.Errorf("%w: %w", ErrFailed, err)
		}
		_ = mount.Close()
		if p.root != nil {
			_ = p.root.Close()
		}
		return nil, wrap(op, file, err)
	}
	go p.sweep()
	return p, nil
}

// mountPool makes the file system if there is none and mounts it.
func mountPool(ctx context.Context, o Options, file string) (*os.File, error) {
	if err := makePoolFile(ctx, o, file); err != nil {
		return nil, err
	}
	dev, err := attachLoop(file)
	if err != nil {
		return nil, err
	}
	defer func() { _ = dev.Close() }()
	if err := unix.IoctlSetInt(int(dev.Fd()), unix.LOOP_SET_CAPACITY, 0); err != nil {
		return nil, &os.PathError{Op: "set capacity of", Path: dev.Name(), Err: err}
	}
	return mountDetached("btrfs", dev.Name(), "discard=async")
}

func makePoolFile(ctx context.Context, o Options, file string) error {
	_, free, err := statfs(o.Dir)
	if err != nil {
		return err
	}
	size := o.Size
	if size == 0 {
		size = free / 10 * 9
	}
	size &^= 4095
	if st, err := os.Stat(file); err == nil {
		if o.Size != 0 && st.Size() < size {
			return os.Truncate(file, size)
		}
		return nil
	}
	if size < MinPool {
		return dsec.Errorf(dsec.Unsupported, "make disk pool", file, "%d MiB for the pool file, a btrfs needs %d", size>>20, MinPool>>20)
	}
	mkfs, err := exec.LookPath("mkfs.btrfs")
	if err != nil {
		return dsec.Errorf(dsec.Unsupported, "make disk pool", file, "mkfs.btrfs is not installed (package btrfs-progs)")
	}
	// The file gets its name when it is complete: a killed mkfs leaves no pool.
	part := file + ".part"
	defer func() { _ = os.Remove(part) }()
	f, err := os.OpenFile(part, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	err = errors.Join(f.Truncate(size), f.Close())
	if err != nil {
		return err
	}
	// One copy of metadata: the file lies on one disk, and what is in it is disposable.
	if out, err := exec.CommandContext(ctx, mkfs, "-q", "-K", "-m", "single", "-d", "single", part).CombinedOutput(); err != nil {
		return fmt.Errorf("mkfs.btrfs: %w: %s", err, strings.TrimSpace(string(out)))
	}
	return os.Rename(part, file)
}

// begin turns on quotas and sweeps what another process left.
func (p *btrfsPool) begin() error {
	var err error
	if p.root, err = rootOf(p.mount); err != nil {
		return err
	}
	id, err := filesystemID(p.root)
	if err != nil {
		return err
	}
	p.groups = "/sys/fs/btrfs/" + id + "/qgroups"
	if _, err := os.Stat(p.groups); err != nil {
		err := setQuota(p.root, quotaEnableSimple)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOTTY) {
			err = setQuota(p.root, quotaEnable)
		}
		if err != nil {
			return dsec.Errorf(dsec.Unsupported, "enable quotas of", p.root.Name(), "%w", err)
		}
	}
	mode, err := os.ReadFile(p.groups + "/mode") // Linux 6.7
	p.simple = err == nil && strings.TrimSpace(string(mode)) == "squota"
	// The kernel makes a file system read-only that the disk below failed. What
	// is in it must be found all the same, by whoever ends it.
	if err := growToDevice(p.root); err != nil && !errors.Is(err, unix.EROFS) {
		return err
	}
	return p.sweepStale()
}

// failed says whether the kernel has made a file system read-only, which it does
// with one that the disk below has failed. Nothing in it can be relied on.
func failed(root *os.File) bool {
	var st unix.Statfs_t
	return unix.Fstatfs(int(root.Fd()), &st) == nil && st.Flags&unix.ST_RDONLY != 0
}

func isFull(err error) bool { return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) }

func (p *btrfsPool) Mechanism() string {
	if p.simple {
		return "btrfs pool file, simple quotas"
	}
	return "btrfs pool file, quota groups"
}

func (p *btrfsPool) Create(ctx context.Context, name string, limit int64, owner Owner) (*os.File, error) {
	const op = "create disk"
	if err := p.admit(op, name, limit); err != nil {
		return nil, err
	}
	if err := p.makeSubvolume(ctx, name); err != nil {
		return nil, wrap(op, name, err)
	}
	dir, err := p.prepare(name, limit, owner)
	if err != nil {
		return nil, wrap(op, name, errors.Join(err, deleteSubvolume(p.root, name)))
	}
	return dir, nil
}

func (p *btrfsPool) prepare(name string, limit int64, owner Owner) (*os.File, error) {
	dir, err := openDirAt(p.root, name)
	if err != nil {
		return nil, err
	}
	id, err := subvolumeID(dir)
	if err == nil {
		err = limitGroup(p.root, id, limit)
	}
	if err == nil {
		// An extent counts whole until nothing of it is used, so what is rewritten in pieces would count twice.
		linux.WriteInPlace(dir)
		err = errors.Join(dir.Chmod(0o700), dir.Chown(owner.UID, owner.GID))
	}
	if err != nil {
		_ = dir.Close()
		return nil, err
	}
	return dir, nil
}

func (p *btrfsPool) Open(_ context.Context, name string) (*os.File, error) {
	const op = "open disk"
	if err := checkName(op, name); err != nil {
		return nil, err
	}
	dir, err := openDirAt(p.root, name)
	return dir, wrap(op, name, err)
}

// Snapshot implements Snapshotter.
func (p *btrfsPool) Snapshot(_ context.Context, name, as string) (*os.File, error) {
	const op = "snapshot disk"
	if err := p.admit(op, as, 1<<20); err != nil {
		return nil, err
	}
	from, err := p.Open(context.Background(), name)
	if err != nil {
		return nil, err
	}
	defer func() { _ = from.Close() }()
	if err := snapshotSubvolume(p.root, from, as); err != nil {
		return nil, wrap(op, name, err)
	}
	dir, err := openDirAt(p.root, as)
	if err != nil {
		return nil, wrap(op, as, errors.Join(err, deleteSubvolume(p.root, as)))
	}
	return dir, nil
}

func (p *btrfsPool) id(name string) (uint64, error) {
	dir, err := openDirAt(p.root, name)
	if err != nil {
		return 0, err
	}
	defer func() { _ = dir.Close() }()
	return subvolumeID(dir)
}

func (p *btrfsPool) Usage(_ context.Context, name string) (Usage, error) {
	const op = "look at disk"
	if err := checkName(op, name); err != nil {
		return Usage{}, err
	}
	id, err := p.id(name)
	if err != nil {
		return Usage{}, wrap(op, name, err)
	}
	group := p.groups + "/0_" + strconv.FormatUint(id, 10) + "/"
	var u Usage
	// What is written but not yet on disk is reserved, not referenced.
	for _, f := range []struct {
		file string
		into *int64
	}{{"referenced", &u.Used}, {"rsv_data", &u.Used}, {"max_referenced", &u.Limit}} {
		text, err := os.ReadFile(group + f.file)
		if err != nil {
			return Usage{}, wrap(op, name, err)
		}
		n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
		if err != nil {
			return Usage{}, wrap(op, name, err)
		}
		*f.into += n
	}
	return u, nil
}

func (p *btrfsPool) Resize(_ context.Context, name string, limit int64) error {
	const op = "resize disk"
	if err := p.admit(op, name, limit); err != nil {
		return err
	}
	id, err := p.id(name)
	if err == nil {
		err = limitGroup(p.root, id, limit)
	}
	return wrap(op, name, err)
}

func (p *btrfsPool) Remove(_ context.Context, name string) error {
	const op = "remove disk"
	if err := checkName(op, name); err != nil {
		return err
	}
	id, err := p.id(name)
	if err == nil {
		if err = deleteSubvolume(p.root, name); err == nil {
			p.queue(id)
		}
	}
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return wrap(op, name, err)
}

func (p *btrfsPool) List(context.Context) ([]string, error) {
	names, err := readNames(p.root)
	return names, wrap("list disks", p.o.Dir, err)
}

func (p *btrfsPool) Space(context.Context) (Space, error) {
	const op = "look at disk pool"
	if failed(p.root) {
		return Space{}, dsec.E(dsec.Unavailable, op, p.o.Dir, ErrFailed)
	}
	size, free, err := fstatfs(p.root)
	if err != nil {
		return Space{}, wrap(op, p.o.Dir, err)
	}
	_, below, err := statfs(p.o.Dir)
	return Space{Size: size, Free: min(free, below)}, wrap(op, p.o.Dir, err)
}

func (p *btrfsPool) Close() error {
	p.closing.Do(func() {
		close(p.stop)
		<-p.done
		_ = p.root.Close()
		_ = p.mount.Close()
		p.o.letGo()
	})
	return nil
}

// Root implements Shared.
func (p *btrfsPool) Root() *os.File { return p.root }
