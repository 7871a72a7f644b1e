package files

import (
	"errors"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// temp is a new file in the directory where it shall be, that nobody sees
// until it is published: without a name where the kernel can give it one
// later, else under one that starts with ".dsec-".
type temp struct {
	f    *os.File
	dir  *os.File // not owned
	name string   // "" without a name
}

func (l *Local) newTemp(dir *os.File) (*temp, error) {
	if !l.noTmp.Load() {
		f, err := child(dir, ".", unix.O_TMPFILE|unix.O_RDWR, 0o600)
		if err == nil {
			return &temp{f: f, dir: dir}, nil
		}
		if !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EISDIR) && !errors.Is(err, unix.EINVAL) {
			return nil, err
		}
	}
	return newNamed(dir)
}

func newNamed(dir *os.File) (*temp, error) {
	name := tempName()
	f, err := child(dir, name, unix.O_CREAT|unix.O_EXCL|unix.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	return &temp{f: f, dir: dir, name: name}, nil
}

func tempName() string { return ".dsec-" + dsec.Random(16) }

// elsewhere makes a temp that is never published, in a directory anybody may
// write to.
func (l *Local) elsewhere() (*temp, error) {
	var first error
	for _, path := range []string{"/tmp", "/var/tmp", "/dev/shm"} {
		d, err := l.openPath(path, true)
		if err == nil {
			var t *temp
			if t, err = l.newTemp(d); err == nil {
				t.unlink()
				d.Close()
				return t, nil
			}
			d.Close()
		}
		if first == nil {
			first = err
		}
	}
	return nil, first
}

func (t *temp) unlink() {
	if t.name != "" {
		_ = unix.Unlinkat(int(t.dir.Fd()), t.name, 0)
		t.name = ""
	}
}

// close lets go; what was not published is gone.
func (t *temp) close() {
	t.unlink()
	t.f.Close()
}

// publish gives the file its name, in the place of what is there.
func (t *temp) publish(l *Local, name string, exists bool) error {
	if t.name == "" && !exists {
		err := linkUnnamed(t.f, t.dir, name)
		if err == nil || err != unix.EEXIST && err != unix.ENOENT {
			return err
		}
	}
	if t.name == "" {
		if err := t.giveName(l); err != nil {
			return err
		}
	}
	if err := unix.Renameat2(int(t.dir.Fd()), t.name, int(t.dir.Fd()), name, 0); err != nil {
		return err
	}
	t.name = ""
	return nil
}

// giveName gives an unnamed file a temporary name.
func (t *temp) giveName(l *Local) error {
	name := tempName()
	err := linkUnnamed(t.f, t.dir, name)
	if err == nil {
		t.name = name
	}
	if err != unix.ENOENT {
		return err
	}
	l.noTmp.Store(true) // this kernel lets only the machine's root do that
	return t.copyNamed()
}

func linkUnnamed(f, dir *os.File, name string) error {
	return unix.Linkat(int(f.Fd()), "", int(dir.Fd()), name, unix.AT_EMPTY_PATH)
}

// copyNamed replaces an unnamed file by a copy that has a name.
func (t *temp) copyNamed() error {
	st, err := fstat(t.f)
	if err != nil {
		return err
	}
	n, err := newNamed(t.dir)
	if err != nil {
		return err
	}
	if _, err = t.f.Seek(0, io.SeekStart); err == nil {
		_, err = io.Copy(n.f, t.f)
	}
	if err == nil {
		err = unix.Fchown(int(n.f.Fd()), int(st.Uid), int(st.Gid))
	}
	if err == nil {
		err = unix.Fchmod(int(n.f.Fd()), st.Mode&0o7777)
	}
	if err != nil {
		n.close()
		return errno(err)
	}
	t.f.Close()
	t.f, t.name = n.f, n.name
	return nil
}
