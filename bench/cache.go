package bench

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/layer"
)

// MountLayer mounts a whole layer from its files, detached. With direct, the file
// system reads its data file past the page cache, which then has file contents once.
func MountLayer(l layer.Local, direct bool) (*os.File, error) {
	f := linux.NewFS("erofs").String("source", l.Meta).Flag("ro")
	if l.Data != "" {
		f.String("device", l.Data)
	}
	if direct {
		f.Flag("directio")
	}
	return f.Mount(unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOATIME)
}

// Cached is what of a layer the page cache holds, in bytes.
type Cached struct {
	Files  int64 `json:"files"`  // of the mounted file system
	Device int64 `json:"device"` // of its data file
}

// Sum of both.
func (c Cached) Sum() int64 { return c.Files + c.Device }

// CachedOf looks at every file of a mounted layer and at its data file.
func CachedOf(mount *os.File, data string) (c Cached, err error) {
	err = eachFile(mount, func(f *os.File, size int64) error {
		n, err := resident(f, size)
		c.Files += n
		return err
	})
	if err != nil || data == "" {
		return c, err
	}
	f, err := os.Open(data)
	if err != nil {
		return c, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err == nil {
		c.Device, err = resident(f, st.Size())
	}
	return c, err
}

// DropCached gives back what the page cache holds of a layer and nobody maps.
func DropCached(mount *os.File, data string) error {
	if err := eachFile(mount, func(f *os.File, _ int64) error { return dontNeed(f) }); err != nil || data == "" {
		return err
	}
	return DropDevice(data)
}

// DropDevice gives back what the page cache holds of a data file. What was read
// through a file system on it stays cached there.
func DropDevice(data string) error {
	f, err := os.Open(data)
	if err != nil {
		return err
	}
	defer f.Close()
	return linux.DropCache(f)
}

func dontNeed(f *os.File) error {
	return os.NewSyscallError("fadvise", unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED))
}

// eachFile opens every regular file of a mount that is in no namespace.
func eachFile(mount *os.File, do func(f *os.File, size int64) error) error {
	root := fmt.Sprintf("/proc/self/fd/%d/", mount.Fd())
	return filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		st, err := f.Stat()
		if err == nil && st.Size() > 0 {
			err = do(f, st.Size())
		}
		return errors.Join(err, f.Close())
	})
}

// resident counts the bytes of a file that are in the page cache.
func resident(f *os.File, size int64) (n int64, err error) {
	page := int64(os.Getpagesize())
	const window = 1 << 30
	for off := int64(0); off < size; off += window {
		m, err := unix.Mmap(int(f.Fd()), off, int(min(window, size-off)), unix.PROT_READ, unix.MAP_SHARED)
		if err != nil {
			return n, os.NewSyscallError("mmap", err)
		}
		pages := make([]byte, (int64(len(m))+page-1)/page)
		err = mincore(m, pages)
		if err = errors.Join(err, unix.Munmap(m)); err != nil {
			return n, err
		}
		for _, p := range pages {
			n += int64(p&1) * page
		}
	}
	return n, nil
}
