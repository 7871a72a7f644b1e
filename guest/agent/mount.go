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
	"github.com/opendsec/dsec/internal/linux"
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
		m, err := withSlots(m)
		if err != nil {
			return "", err
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
		for _, name := range append([]string{m.Source}, m.Options...) {
			if _, value, ok := strings.Cut(name, "="); ok {
				name = value
			}
			if err := flush(name); err != nil {
				return err
			}
		}
		return unix.Mount(m.Source, at, m.FSType, flags, strings.Join(data, ","))
	}
	if err := unix.Mount(m.Source, at, "", unix.MS_BIND, ""); err != nil {
		return err
	}
	return unix.Mount("", at, "", unix.MS_REMOUNT|unix.MS_BIND|flags, "")
}

// flush forgets what the kernel read of a block device before the machine was cloned: the
// one behind it was another. Names that are no device's are passed over.
func flush(name string) error {
	if !strings.HasPrefix(name, "/dev/") {
		return nil
	}
	f, err := os.OpenFile(name, os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	if _, err := unix.IoctlRetInt(int(f.Fd()), unix.BLKFLSBUF); err != nil && err != unix.ENOTTY {
		return fmt.Errorf("flush %s: %w", name, err)
	}
	return nil
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

// daxFiles is how many files of a mount are looked at.
const daxFiles = 32

// checkDAX refuses a mount whose data go through the page cache though they
// must not: the kernel mounts such ones without a word. Whether a file's data do
// is what the kernel decides file by file, and says.
func checkDAX(m guest.FileSystem, at string) error {
	switch m.DAX {
	case "":
		return nil
	case "required":
	default:
		return dsec.Errorf(dsec.Invalid, "mount", m.Source, "dax %s is neither required nor empty", dsec.Quote(m.DAX))
	}
	seen := 0
	err := filepath.WalkDir(at, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		var st unix.Statx_t
		if err := unix.Statx(unix.AT_FDCWD, path, unix.AT_SYMLINK_NOFOLLOW, unix.STATX_SIZE, &st); err != nil {
			return &os.PathError{Op: "statx", Path: path, Err: err}
		}
		if st.Size == 0 {
			return nil
		}
		if st.Attributes&unix.STATX_ATTR_DAX == 0 {
			return fmt.Errorf("%w: %s", errNotDAX, strings.TrimPrefix(path, at))
		}
		if seen++; seen == daxFiles {
			return fs.SkipAll
		}
		return nil
	})
	if err != nil {
		class := dsec.Internal
		if errors.Is(err, errNotDAX) {
			class = dsec.Unsupported
		}
		return dsec.E(class, "mount", m.Source, err)
	}
	return nil
}

var errNotDAX = errors.New("dax is required, and the page cache has the data of a file")

// furnishRoot makes directories and files of a root in which nothing runs yet.
func furnishRoot(root string, dirs []string, files []guest.NewFile) error {
	dir, err := os.Open(root)
	if err != nil {
		return dsec.E(dsec.Internal, "open", "root of sandbox", err)
	}
	defer func() { _ = dir.Close() }()
	for _, name := range dirs {
		d, err := linux.MakeDirs(dir, name, 0, 0)
		if err != nil {
			return furnishError("make", dsec.Quote(name), err)
		}
		_ = d.Close()
	}
	return replaceFiles(dir, files)
}

// replaceFiles puts files into a root.
func replaceFiles(dir *os.File, files []guest.NewFile) error {
	for _, f := range files {
		at, err := linux.MakeDirs(dir, f.Dir, 0, 0)
		if err != nil {
			return furnishError("make", dsec.Quote(f.Dir), err)
		}
		err = linux.ReplaceFile(at, f.Name, f.Content, 0, 0)
		_ = at.Close()
		if err != nil {
			return furnishError("write", dsec.Quote(filepath.Join(f.Dir, f.Name)), err)
		}
	}
	return nil
}

// furnishError tells a full disk from a root that is not what it should be.
func furnishError(op, object string, err error) error {
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return dsec.E(dsec.NoSpace, op, object, err)
	case errors.Is(err, unix.EISDIR):
		return dsec.E(dsec.IsADirectory, op, object, err)
	case errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP), errors.Is(err, unix.EEXIST), errors.Is(err, unix.ENOENT),
		errors.Is(err, unix.ENAMETOOLONG): // EEXIST: a link that leads nowhere
		return dsec.E(dsec.NotADirectory, op, object, err)
	}
	return dsec.E(dsec.Internal, op, object, err)
}
