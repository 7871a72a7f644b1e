package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/confine"
)

// plan is what PID 1 of a sandbox is told.
type plan struct {
	Root     string // "": the root that there is, with all that is mounted
	Hostname string
	Shm      int64
}

const controlFD = 3

// insideMain is PID 1 of the sandbox. It makes the root and what is mounted in
// it, says so, waits for the word, and from then on has nothing and reaps.
func insideMain() error {
	// The namespaces that others join are those of the first thread.
	if unix.Gettid() != unix.Getpid() {
		return errors.New("not on the first thread")
	}
	f := os.NewFile(controlFD, "control")
	conn, err := net.FileConn(f)
	if err != nil {
		return err
	}
	_ = f.Close()
	var p plan
	if err := json.NewDecoder(conn).Decode(&p); err != nil {
		return err
	}
	said := ""
	if p.Root != "" {
		if err := furnish(p); err != nil {
			said = err.Error()
		}
	}
	if err := json.NewEncoder(conn).Encode(said); err != nil || said != "" {
		return errors.Join(err, errors.New(said))
	}
	if _, err := conn.Read(make([]byte, 1)); err != nil {
		return err
	}
	// Nobody inside can end it by a signal, look into it, or get anything from it.
	signal.Ignore()
	reaped := make(chan os.Signal, 1)
	signal.Notify(reaped, unix.SIGCHLD)
	if err := renounce(); err != nil {
		return err
	}
	_ = conn.Close() // tells that it is done
	for range reaped {
		for {
			pid, err := unix.Wait4(-1, nil, unix.WNOHANG|unix.WALL, nil)
			if err != unix.EINTR && (err != nil || pid <= 0) {
				break
			}
		}
	}
	return nil
}

// renounce gives up every capability, of all threads.
func renounce() error {
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return err
	}
	return dropAll()
}

// furnish makes the root of the mount namespace, which then holds nothing else.
func furnish(p plan) error {
	if err := unix.Unshare(unix.CLONE_NEWCGROUP); err != nil {
		return fmt.Errorf("unshare control groups: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := pivot(p.Root); err != nil {
		return fmt.Errorf("enter root: %w", err)
	}
	if err := unix.Sethostname([]byte(p.Hostname)); err != nil {
		return fmt.Errorf("set host name: %w", err)
	}
	shm := p.Shm
	if shm == 0 {
		shm = 64 << 20
	}
	const walled = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	for _, m := range []struct {
		at, fstype string
		flags      uintptr
		options    string
	}{
		{"/proc", "proc", walled, ""},
		{"/sys", "sysfs", walled | unix.MS_RDONLY, ""},
		{"/dev", "tmpfs", unix.MS_NOSUID | unix.MS_NOEXEC, "mode=0755,size=64k,nr_inodes=64"},
		{"/dev/pts", "devpts", unix.MS_NOSUID | unix.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620,gid=5,max=64"},
		{"/dev/shm", "tmpfs", walled, fmt.Sprintf("mode=1777,size=%d", shm)},
		{"/dev/mqueue", "mqueue", walled, ""},
	} {
		if err := directory(m.at, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(m.fstype, m.at, m.fstype, m.flags, m.options); err != nil {
			return fmt.Errorf("mount %s: %w", m.at, err)
		}
	}
	if err := directory("/tmp", 0o1777); err != nil {
		return err
	}
	if err := devices(); err != nil {
		return err
	}
	return mask()
}

// directory makes one that is missing. A link in its place would lead elsewhere.
func directory(at string, mode os.FileMode) error {
	if err := unix.Mkdir(at, uint32(mode)); err == nil {
		return os.NewSyscallError("chmod "+at, unix.Chmod(at, uint32(mode)))
	}
	st, err := os.Lstat(at)
	if err == nil && !st.IsDir() {
		err = unix.ENOTDIR
	}
	return err
}

// pivot makes a mount the root. The root of an initramfs cannot be moved away;
// there the new one is laid over it.
func pivot(root string) error {
	if err := unix.Chdir(root); err != nil {
		return err
	}
	if err := unix.PivotRoot(".", "."); err == nil {
		if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
			return err
		}
		return unix.Chdir("/")
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return err
	}
	if err := unix.Chroot("."); err != nil {
		return err
	}
	return unix.Chdir("/")
}

// devices are all that there are inside.
func devices() error {
	old := unix.Umask(0)
	defer unix.Umask(old)
	for _, d := range []struct {
		name         string
		major, minor uint32
	}{{"null", 1, 3}, {"zero", 1, 5}, {"full", 1, 7}, {"random", 1, 8}, {"urandom", 1, 9}, {"tty", 5, 0}} {
		if err := unix.Mknod("/dev/"+d.name, unix.S_IFCHR|0o666, int(unix.Mkdev(d.major, d.minor))); err != nil {
			return fmt.Errorf("make /dev/%s: %w", d.name, err)
		}
	}
	for _, l := range [][2]string{{"pts/ptmx", "ptmx"}, {"/proc/self/fd", "fd"}, {"/proc/self/fd/0", "stdin"}, {"/proc/self/fd/1", "stdout"}, {"/proc/self/fd/2", "stderr"}} {
		if err := os.Symlink(l[0], "/dev/"+l[1]); err != nil {
			return err
		}
	}
	return remountReadOnly("/dev", unix.MS_NOSUID|unix.MS_NOEXEC)
}

func remountReadOnly(at string, flags uintptr) error {
	if err := unix.Mount("", at, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY|flags, ""); err != nil {
		return fmt.Errorf("make %s read-only: %w", at, err)
	}
	return nil
}

// mask hides what of /proc tells of, or reaches, the machine.
func mask() error {
	for _, at := range confine.ReadOnlyPaths() {
		err := unix.Mount(at, at, "", unix.MS_BIND|unix.MS_REC, "")
		if err == unix.ENOENT {
			continue
		}
		if err != nil {
			return fmt.Errorf("bind %s: %w", at, err)
		}
		if err := remountReadOnly(at, unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC); err != nil {
			return err
		}
	}
	for _, at := range confine.MaskedPaths() {
		st, err := os.Lstat(at)
		switch {
		case errors.Is(err, os.ErrNotExist):
			continue
		case err != nil:
			return err
		case st.IsDir():
			err = unix.Mount("tmpfs", at, "tmpfs", unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "size=0,nr_inodes=1")
		default:
			err = unix.Mount("/dev/null", at, "", unix.MS_BIND, "")
		}
		if err != nil {
			return fmt.Errorf("mask %s: %w", at, err)
		}
	}
	return nil
}

// below joins a path that must stay below a directory.
func below(dir, path string) (string, error) {
	if path == "" || filepath.IsAbs(path) || !filepath.IsLocal(path) || strings.Contains(path, "\x00") {
		return "", fmt.Errorf("%q is no path below the agent's directory", path)
	}
	return filepath.Join(dir, path), nil
}
