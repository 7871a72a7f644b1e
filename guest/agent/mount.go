package agent

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/guest"
)

// flagsOf mount(2) by the name that an option has.
var flagsOf = map[string]uintptr{"ro": unix.MS_RDONLY, "nosuid": unix.MS_NOSUID, "nodev": unix.MS_NODEV, "noexec": unix.MS_NOEXEC, "noatime": unix.MS_NOATIME,
	"nodiratime": unix.MS_NODIRATIME, "relatime": unix.MS_RELATIME, "sync": unix.MS_SYNCHRONOUS, "rw": 0}

// mountAll mounts file systems and the overlay over them, and returns its path.
func (sb *sandbox) mountAll(undo *[]func()) (string, error) {
	base := filepath.Join(sb.a.dir, "mnt")
	for _, m := range sb.spec.Mounts {
		at, err := below(base, m.Target)
		if err != nil {
			return "", dsec.E(dsec.Invalid, "make sandbox", "mounts", err)
		}
		if err := mountOne(m, at); err != nil {
			return "", dsec.E(classOf(err), "mount", m.Source, err)
		}
		*undo = append(*undo, func() { _ = unix.Unmount(at, unix.MNT_DETACH) })
		if err := checkDAX(m, at); err != nil {
			return "", err
		}
	}
	root := filepath.Join(sb.a.dir, "root")
	options, err := overlayOptions(base, sb.spec.Overlay)
	if err == nil {
		err = os.MkdirAll(root, 0o755)
	}
	if err != nil {
		return "", dsec.E(classOf(err), "make sandbox", "overlay", err)
	}
	if err := unix.Mount("overlay", root, "overlay", unix.MS_NODEV, options); err != nil {
		return "", dsec.E(classOf(err), "mount", "overlay", err)
	}
	*undo = append(*undo, func() { _ = unix.Unmount(root, unix.MNT_DETACH) })
	return root, nil
}

// unmount is what mountAll did, in reverse.
func (sb *sandbox) unmount() {
	all := []string{filepath.Join(sb.a.dir, "root")}
	for i := len(sb.spec.Mounts) - 1; i >= 0; i-- {
		all = append(all, filepath.Join(sb.a.dir, "mnt", sb.spec.Mounts[i].Target))
	}
	for _, at := range all {
		if err := unix.Unmount(at, 0); err != nil {
			sb.a.log.Warn("unmount", "at", at, "err", err)
			_ = unix.Unmount(at, unix.MNT_DETACH) // synced all the same
		}
	}
}

func mountOne(m guest.FileSystem, at string) error {
	if err := os.MkdirAll(at, 0o755); err != nil {
		return err
	}
	flags, data := uintptr(unix.MS_NODEV), []string{}
	for _, o := range m.Options {
		if f, ok := flagsOf[o]; ok {
			flags |= f
		} else {
			data = append(data, o)
		}
	}
	if m.FSType != "bind" {
		return unix.Mount(m.Source, at, m.FSType, flags, strings.Join(data, ","))
	}
	if err := unix.Mount(m.Source, at, "", unix.MS_BIND, ""); err != nil {
		return err
	}
	return unix.Mount("", at, "", unix.MS_REMOUNT|unix.MS_BIND|flags, "")
}

func overlayOptions(base string, o guest.Overlay) (string, error) {
	if len(o.Lowers) == 0 || o.Upper == "" || o.Work == "" {
		return "", errors.New("it needs lowers, an upper and a work directory")
	}
	var lowers []string
	for _, l := range o.Lowers {
		at, err := below(base, l)
		if err != nil {
			return "", err
		}
		lowers = append(lowers, escape(at))
	}
	options := "lowerdir=" + strings.Join(lowers, ":")
	for _, d := range []struct{ option, path string }{{"upperdir", o.Upper}, {"workdir", o.Work}} {
		at, err := below(base, d.path)
		if err == nil {
			err = os.MkdirAll(at, 0o755)
		}
		if err != nil {
			return "", err
		}
		options += "," + d.option + "=" + escape(at)
	}
	if len(options) >= os.Getpagesize() {
		return "", fmt.Errorf("%d bytes of options, at most %d", len(options), os.Getpagesize()-1)
	}
	return options, nil
}

// escape what overlayfs would take for the end of a path.
func escape(path string) string {
	return strings.NewReplacer(`\`, `\\`, ":", `\:`, ",", `\,`).Replace(path)
}

const (
	daxSample = 8 << 20 // bytes that are read to see where they come from
	daxSlack  = 2 << 20 // that the page cache may grow meanwhile
)

// checkDAX refuses a mount whose data go through the page cache though they
// must not: the kernel mounts such ones without a word.
func checkDAX(m guest.FileSystem, at string) error {
	switch m.DAX {
	case "":
		return nil
	case "required":
	default:
		return dsec.Errorf(dsec.Invalid, "mount", m.Source, "dax %s is neither required nor empty", dsec.Quote(m.DAX))
	}
	before := meminfo("Cached:")
	read, err := readSome(at, daxSample)
	if err != nil {
		return dsec.E(dsec.Internal, "read", m.Source, err)
	}
	grown := (meminfo("Cached:") - before) << 10
	if read < 2*daxSlack {
		return dsec.Errorf(dsec.Unsupported, "mount", m.Source, "dax is required and %d bytes are too few to see whether it is so", read)
	}
	if grown > read/2 {
		return dsec.Errorf(dsec.Unsupported, "mount", m.Source, "dax is required, and reading %d bytes made the page cache grow by %d", read, grown)
	}
	return nil
}

// meminfo is a line of /proc/meminfo, in KiB.
func meminfo(name string) (n int64) {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, name); ok {
			_, _ = fmt.Sscanf(strings.TrimSpace(rest), "%d kB", &n) // 0 if it is no number
		}
	}
	return n
}

// readSome reads up to n bytes of the files below a directory.
func readSome(dir string, n int64) (read int64, err error) {
	buf := make([]byte, 256<<10)
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer func() { _ = f.Close() }()
		for read < n {
			got, err := f.Read(buf)
			read += int64(got)
			if err != nil || got == 0 {
				return nil // the next file
			}
		}
		return fs.SkipAll
	})
	return read, err
}
