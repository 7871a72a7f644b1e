package daemon

import (
	"fmt"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/config"
	"github.com/opendsec/dsec/internal/diskpool"
	"github.com/opendsec/dsec/runtime"
)

// poolSize is what the pool may grow to, and what there is for it: what is free
// and what it has already.
func poolSize(s *settings) (size, free int64, err error) {
	var st unix.Statfs_t
	dir := s.poolDir()
	for err = unix.Statfs(dir, &st); err == unix.ENOENT && dir != "/"; err = unix.Statfs(dir, &st) { // it was never up
		dir = filepath.Dir(dir)
	}
	if err != nil {
		return 0, 0, dsec.E(dsec.Internal, "measure free space", s.poolDir(), err)
	}
	used := int64(0) // an existing pool file counts as free: it is ours to fill
	if files, err := filepath.Glob(filepath.Join(s.poolDir(), "*")); err == nil {
		for _, f := range files {
			var fst unix.Stat_t
			if unix.Stat(f, &fst) == nil {
				used += fst.Blocks * 512
			}
		}
	}
	free = int64(st.Bavail)*st.Bsize + used
	if size, err = config.Bytes(s.Node.DiskPool, free); err != nil {
		return 0, 0, dsec.E(dsec.Invalid, "read size", "node.disk_pool", err)
	}
	return size, free, nil
}

// poolLeast refuses to make a pool that is too small to be one. One that is there
// is opened all the same: somebody may want to end what is in it.
func poolLeast(s *settings, size int64) error {
	if files, err := filepath.Glob(filepath.Join(s.poolDir(), "*")); err != nil || len(files) > 0 || size >= diskpool.MinPool {
		return err
	}
	return dsec.Errorf(dsec.Invalid, "check configuration", "node.disk_pool", "%s is %s here, want at least %s",
		dsec.Quote(s.Node.DiskPool), sized(size), sized(diskpool.MinPool))
}

// poolRoom holds a size of the pool against what there is for it. A pool file
// that the disk cannot take is an I/O error for every sandbox in it.
func poolRoom(s *settings, size, free int64) runtime.Check {
	c := runtime.Check{Name: "disk pool"}
	if err := poolLeast(s, size); err != nil {
		c.Detail = err.Error()
		return c
	}
	if size > free {
		c.Detail = fmt.Sprintf("the disk pool may grow to %d MiB, but %s has room for %d MiB: when it is full, every sandbox gets I/O errors; set node.disk_pool to less",
			size>>20, s.poolDir(), free>>20)
		return c
	}
	c.OK, c.Detail = true, fmt.Sprintf("may grow to %d MiB of the %d MiB there are", size>>20, free>>20)
	return c
}
