package diskpool

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// loopPool is an ext4 in a sparse file for each entry. It costs a loop device
// and some hundred KiB of kernel memory per entry, and creation takes the time
// of a mkfs: the last resort.
type loopPool struct {
	base
	mkfs string
}

const (
	loopSuffix  = ".ext4"
	ext4Resize  = 1<<30 | 8<<16 | 'f'<<8 | 16 // EXT4_IOC_RESIZE_FS
	ext4Block   = 4096
	loopOptions = "discard"
)

func openLoop(_ context.Context, o Options) (Pool, error) {
	mkfs, err := exec.LookPath("mkfs.ext4")
	if err != nil {
		return nil, dsec.Errorf(dsec.Unsupported, "open disk pool", o.Dir, "mkfs.ext4 is not installed (package e2fsprogs)")
	}
	if _, err := os.Stat("/dev/loop-control"); err != nil {
		return nil, dsec.Errorf(dsec.Unsupported, "open disk pool", o.Dir, "no loop devices: %w", err)
	}
	known, err := os.ReadFile("/proc/filesystems")
	if err != nil || !strings.Contains(string(known), "\text4\n") {
		return nil, dsec.Errorf(dsec.Unsupported, "open disk pool", o.Dir, "the kernel has no ext4")
	}
	return &loopPool{base: base{o: o}, mkfs: mkfs}, nil
}

func (p *loopPool) Mechanism() string { return "ext4 in a file per sandbox" }

func (p *loopPool) file(name string) string { return filepath.Join(p.o.Dir, name+loopSuffix) }

func kept(name string) string { return keeperName + "/" + name }

func (p *loopPool) Create(ctx context.Context, name string, limit int64, owner Owner) (*os.File, error) {
	const op = "create disk"
	if err := p.admit(op, name, limit); err != nil {
		return nil, err
	}
	if _, err := os.Lstat(p.file(name)); err == nil {
		return nil, dsec.E(dsec.AlreadyExists, op, name, os.ErrExist)
	}
	part := p.file(name) + ".part"
	defer func() { _ = os.Remove(part) }()
	if err := p.format(ctx, part, limit, owner); err != nil {
		return nil, wrap(op, name, err)
	}
	if err := os.Rename(part, p.file(name)); err != nil {
		return nil, wrap(op, name, err)
	}
	dir, err := p.Open(ctx, name)
	if err == nil {
		err = errors.Join(unix.Unlinkat(int(dir.Fd()), "lost+found", unix.AT_REMOVEDIR), dir.Chmod(0o700))
	}
	if err != nil {
		if dir != nil {
			_ = dir.Close()
		}
		return nil, wrap(op, name, errors.Join(err, p.Remove(context.WithoutCancel(ctx), name)))
	}
	return dir, nil
}

func (p *loopPool) format(ctx context.Context, file string, limit int64, owner Owner) error {
	f, err := os.OpenFile(file, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	if err := errors.Join(f.Truncate(limit&^(ext4Block-1)), f.Close()); err != nil {
		return err
	}
	// No journal: what is in it is worth nothing after a crash of the machine.
	out, err := exec.CommandContext(ctx, p.mkfs, "-q", "-F", "-m", "0", "-b", fmt.Sprint(ext4Block), "-O", "^has_journal",
		"-E", fmt.Sprintf("nodiscard,lazy_itable_init=1,root_owner=%d:%d", owner.UID, owner.GID), file).CombinedOutput()
	if err != nil {
		return fmt.Errorf("mkfs.ext4: %w: %s", err, strings.TrimSpace(string(out)))
	}
	return nil
}

// mounted returns the entry's mount, from the keeper or made now.
func (p *loopPool) mounted(ctx context.Context, name string) (*os.File, error) {
	m, err := p.o.Keeper.Get(ctx, kept(name))
	if !errors.Is(err, dsec.NotFound.Err()) {
		return m, err
	}
	dev, err := attachLoop(p.file(name))
	if err != nil {
		return nil, err
	}
	defer func() { _ = dev.Close() }()
	if m, err = mountDetached("ext4", dev.Name(), loopOptions); err != nil {
		return nil, err
	}
	if err := p.o.Keeper.Put(ctx, kept(name), m); err != nil {
		_ = m.Close()
		return nil, err
	}
	return m, nil
}

func (p *loopPool) Open(ctx context.Context, name string) (*os.File, error) {
	const op = "open disk"
	if err := checkName(op, name); err != nil {
		return nil, err
	}
	m, err := p.mounted(ctx, name)
	if err != nil {
		return nil, wrap(op, name, err)
	}
	defer func() { _ = m.Close() }() // the keeper has it
	dir, err := rootOf(m)
	return dir, wrap(op, name, err)
}

func (p *loopPool) Usage(ctx context.Context, name string) (Usage, error) {
	dir, err := p.Open(ctx, name)
	if err != nil {
		return Usage{}, err
	}
	defer func() { _ = dir.Close() }()
	st, err := os.Stat(p.file(name))
	if err != nil {
		return Usage{}, wrap("look at disk", name, err)
	}
	_, free, err := fstatfs(dir)
	return Usage{Used: st.Size() - free, Limit: st.Size()}, wrap("look at disk", name, err)
}

func (p *loopPool) Resize(ctx context.Context, name string, limit int64) error {
	const op = "resize disk"
	if err := p.admit(op, name, limit); err != nil {
		return err
	}
	limit &^= ext4Block - 1
	dir, err := p.Open(ctx, name)
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	st, err := os.Stat(p.file(name))
	if err != nil {
		return wrap(op, name, err)
	}
	if limit < st.Size() {
		return dsec.Errorf(dsec.Unsupported, op, name, "%s cannot shrink", p.Mechanism())
	}
	if err := os.Truncate(p.file(name), limit); err != nil {
		return wrap(op, name, err)
	}
	dev, err := attachLoop(p.file(name))
	if err != nil {
		return wrap(op, name, err)
	}
	defer func() { _ = dev.Close() }()
	if err := unix.IoctlSetInt(int(dev.Fd()), unix.LOOP_SET_CAPACITY, 0); err != nil {
		return wrap(op, name, err)
	}
	arg := binary.NativeEndian.AppendUint64(nil, uint64(limit/ext4Block))
	err = ioctl(dir, ext4Resize, arg)
	if errors.Is(err, unix.EPERM) {
		return dsec.Errorf(dsec.Unsupported, op, name, "growing an ext4 needs CAP_SYS_RESOURCE: %w", err)
	}
	return wrap(op, name, err)
}

func (p *loopPool) Remove(ctx context.Context, name string) error {
	const op = "remove disk"
	if err := checkName(op, name); err != nil {
		return err
	}
	if err := p.o.Keeper.Drop(ctx, kept(name)); err != nil {
		return wrap(op, name, err)
	}
	if err := os.Remove(p.file(name)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return wrap(op, name, err)
	}
	return nil
}

func (p *loopPool) List(context.Context) ([]string, error) {
	files, err := filepath.Glob(p.file("*"))
	var names []string
	for _, f := range files {
		if n := strings.TrimSuffix(filepath.Base(f), loopSuffix); validName.MatchString(n) {
			names = append(names, n)
		}
	}
	return names, wrap("list disks", p.o.Dir, err)
}

func (p *loopPool) Space(context.Context) (Space, error) {
	size, free, err := statfs(p.o.Dir)
	return Space{Size: size, Free: free}, wrap("look at disk pool", p.o.Dir, err)
}

func (p *loopPool) Close() error {
	p.o.letGo()
	return nil
}
