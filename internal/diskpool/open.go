package diskpool

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/linux"
)

// mechanism makes a pool, or says why this machine cannot.
type mechanism struct {
	name string
	open func(ctx context.Context, o Options) (Pool, error)
}

func mechanisms() []mechanism {
	return []mechanism{{ProjectQuota, openProject}, {Btrfs, openBtrfs}, {LoopExt4, openLoop}}
}

// keeperName is the descriptor of a pool's mount in a Keeper.
const keeperName = "diskpool"

var validName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._]{0,127}$`)

// Open probes the mechanisms and opens or makes the pool.
func Open(ctx context.Context, o Options) (Pool, error) {
	const op = "open disk pool"
	if !filepath.IsAbs(o.Dir) {
		return nil, dsec.Errorf(dsec.Invalid, op, dsec.Quote(o.Dir), "not an absolute path")
	}
	if err := os.MkdirAll(o.Dir, 0o700); err != nil {
		return nil, dsec.E(dsec.Internal, op, o.Dir, err)
	}
	if o.Keeper == nil {
		o.own = linux.NewKeeper()
		o.Keeper = o.own
	}
	var refused []string
	for _, m := range mechanisms() {
		if o.Mechanism != "" && o.Mechanism != m.name {
			continue
		}
		p, err := m.open(ctx, o)
		if err == nil {
			p.(interface{ setWhy(string) }).setWhy(why(m.name, o.Mechanism, refused))
			return p, nil
		}
		if dsec.ClassOf(err) != dsec.Unsupported {
			return nil, err
		}
		refused = append(refused, m.name+": "+causeOf(err))
	}
	if refused == nil {
		return nil, dsec.Errorf(dsec.Invalid, op, dsec.Quote(o.Mechanism), "unknown mechanism")
	}
	return nil, dsec.Errorf(dsec.Unsupported, op, o.Dir, "%s", strings.Join(refused, "; "))
}

func causeOf(err error) string {
	if e, ok := errors.AsType[*dsec.Error](err); ok && e.Err != nil {
		return e.Err.Error()
	}
	return err.Error()
}

func why(chosen, asked string, refused []string) string {
	if asked != "" {
		return chosen + ": configured"
	}
	return strings.Join(append(refused, chosen+": works"), "; ")
}

// base is what the mechanisms have in common.
type base struct {
	o   Options
	why string
}

func (b *base) setWhy(s string) { b.why = s }
func (b *base) Why() string     { return b.why }

// admit checks a name and that the file system under the pool has room. Below
// the reserve nothing new begins, because a write into a sparse pool file that
// the disk cannot take is an I/O error for every sandbox in it.
func (b *base) admit(op, name string, limit int64) error {
	if err := checkName(op, name); err != nil {
		return err
	}
	if limit < 1<<20 {
		return dsec.Errorf(dsec.Invalid, op, name, "limit of %d bytes, want at least 1 MiB", limit)
	}
	size, free, err := statfs(b.o.Dir)
	if err != nil {
		return dsec.E(dsec.Internal, op, name, err)
	}
	reserve := b.o.Reserve
	if reserve == 0 {
		reserve = min(size/20, 2<<30)
	}
	if free < reserve {
		return dsec.Errorf(dsec.NoSpace, op, name, "%s has %d MiB free, less than its reserve of %d MiB", b.o.Dir, free>>20, reserve>>20)
	}
	return nil
}

func checkName(op, name string) error {
	if !validName.MatchString(name) {
		return dsec.Errorf(dsec.Invalid, op, dsec.Quote(name), "want %s", validName)
	}
	return nil
}

func statfs(path string) (size, free int64, err error) {
	var s unix.Statfs_t
	if err := unix.Statfs(path, &s); err != nil {
		return 0, 0, &os.PathError{Op: "statfs", Path: path, Err: err}
	}
	return int64(s.Blocks) * s.Frsize, int64(s.Bavail) * s.Frsize, nil
}

func fstatfs(f *os.File) (size, free int64, err error) {
	var s unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &s); err != nil {
		return 0, 0, &os.PathError{Op: "statfs", Path: f.Name(), Err: err}
	}
	return int64(s.Blocks) * s.Frsize, int64(s.Bavail) * s.Frsize, nil
}

func classOf(err error) dsec.Class {
	switch {
	case errors.Is(err, os.ErrExist):
		return dsec.AlreadyExists
	case errors.Is(err, os.ErrNotExist):
		return dsec.NotFound
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return dsec.NoSpace
	case errors.Is(err, unix.EROFS): // see begin
		return dsec.Unavailable
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return dsec.ClassOf(err)
	}
	return dsec.Internal
}

func wrap(op, name string, err error) error {
	if err == nil {
		return nil
	}
	if _, ok := errors.AsType[*dsec.Error](err); ok {
		return err
	}
	return dsec.E(classOf(err), op, name, err)
}

// openDirAt opens a directory below another; it follows no link.
func openDirAt(dir *os.File, name string) (*os.File, error) {
	fd, err := unix.Openat(int(dir.Fd()), name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: dir.Name() + "/" + name, Err: err}
	}
	return os.NewFile(uintptr(fd), dir.Name()+"/"+name), nil
}

func readNames(dir *os.File) ([]string, error) {
	d, err := openDirAt(dir, ".") // an offset of its own
	if err != nil {
		return nil, err
	}
	defer func() { _ = d.Close() }()
	all, err := d.Readdirnames(-1)
	names := all[:0]
	for _, n := range all {
		if validName.MatchString(n) {
			names = append(names, n)
		}
	}
	return names, err
}
