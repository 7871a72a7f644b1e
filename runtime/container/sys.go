package container

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/linux"
)

// sysName is what the hold knows the shared /sys by.
const sysName = "shared/sys"

// sysTrees are what of the machine's sysfs programs read to size themselves:
// processors, memory nodes, huge pages.
var sysTrees = []string{"devices/system/cpu", "devices/system/node", "kernel/mm/transparent_hugepage"}

// sysEmpty are directories whose absence would confuse.
var sysEmpty = []string{"block", "bus", "class/net", "dev", "firmware", "fs/cgroup", "module", "power"}

// sysSkip are names that are left out of sysTrees: they change all the time, tell of
// the machine's weaknesses, or are many.
var sysSkip = []string{"cpuidle", "cpufreq", "hotplug", "microcode", "power", "thermal_throttle", "uevent", "vulnerabilities",
	"vmstat", "numastat", "hugepages", "crash_notes", "crash_notes_size"}

const (
	sysFileMost  = 64 << 10 // bytes of one file
	sysFilesMost = 50_000
)

// makeSys makes the one /sys that every sandbox has a read-only clone of: plain
// files with what the machine's said when the first sandbox was made. Nothing in
// it reaches the kernel, and it costs one mount where sysfs costs a file system
// for each network namespace and a mask for each thing to hide.
func makeSys() (m *os.File, err error) {
	m, err = linux.NewFS("tmpfs").String("mode", "0555").String("size", "64m").
		Mount(unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC | unix.MOUNT_ATTR_NOATIME)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			m.Close()
		}
	}()
	root, err := os.OpenRoot(fmt.Sprintf("/proc/self/fd/%d", m.Fd()))
	if err != nil {
		return nil, err
	}
	defer root.Close()
	for _, d := range sysEmpty {
		if err := root.MkdirAll(d, 0o555); err != nil {
			return nil, err
		}
	}
	left := sysFilesMost
	for _, t := range sysTrees {
		if err := copySys(root, "/sys", t, &left); err != nil {
			return nil, err
		}
	}
	return m, linux.SetMountAttr(m, unix.MOUNT_ATTR_RDONLY)
}

// copySys copies one tree of a sysfs. What cannot be read is left out, and so
// are links, which lead to devices.
func copySys(root *os.Root, from, tree string, left *int) error {
	return filepath.WalkDir(filepath.Join(from, tree), func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil // gone, or not there on this machine
		}
		name, err := filepath.Rel(from, p)
		if err != nil {
			return err
		}
		if slices.Contains(sysSkip, d.Name()) {
			if d.IsDir() {
				return filepath.SkipDir
			}
			return nil
		}
		switch {
		case d.IsDir():
			return root.MkdirAll(name, 0o755)
		case !d.Type().IsRegular():
			return nil
		}
		if *left--; *left < 0 {
			return filepath.SkipAll
		}
		b, err := readSys(p)
		if err != nil {
			return nil
		}
		return root.WriteFile(name, b, 0o444)
	})
}

func readSys(p string) ([]byte, error) {
	st, err := os.Stat(p)
	if err != nil {
		return nil, err
	}
	if st.Mode()&0o444 != 0o444 {
		return nil, fs.ErrPermission
	}
	f, err := os.Open(p)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, sysFileMost+1))
	if err == nil && (len(b) > sysFileMost || strings.Contains(string(b), "\x00")) {
		err = errors.New("not text")
	}
	return b, err
}
