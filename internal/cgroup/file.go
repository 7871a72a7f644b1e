package cgroup

import (
	"errors"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// dir is an open directory of a hierarchy. Paths below are relative to it, so
// that a mount that changes meanwhile cannot redirect a write.
type dir struct {
	fd   int
	path string // for messages and for inotify only
}

func openDir(path string) (dir, error) {
	fd, err := retry(func() (int, error) {
		return unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	})
	return dir{fd, path}, err
}

// retry repeats a call that a signal interrupted: limit writes of v1 can take
// long enough for the Go scheduler's own signals to hit them.
func retry[T any](call func() (T, error)) (T, error) {
	for {
		v, err := call()
		if !errors.Is(err, unix.EINTR) {
			return v, err
		}
	}
}

// write puts a value into a control file.
func (d dir) write(name, value string) error {
	fd, err := retry(func() (int, error) {
		return unix.Openat(d.fd, name, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	})
	if err == nil {
		_, err = retry(func() (int, error) { return unix.Write(fd, []byte(value)) })
		_ = unix.Close(fd)
	}
	if err != nil {
		return &os.PathError{Op: "write " + value + " to", Path: d.path + "/" + name, Err: err}
	}
	return nil
}

// read returns a control file, without the newline at its end.
func (d dir) read(name string) (string, error) {
	fd, err := retry(func() (int, error) {
		return unix.Openat(d.fd, name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	})
	if err != nil {
		return "", &os.PathError{Op: "read", Path: d.path + "/" + name, Err: err}
	}
	defer func() { _ = unix.Close(fd) }()
	buf := make([]byte, 0, 4096)
	for {
		if len(buf) == cap(buf) {
			buf = append(buf, 0)[:len(buf)]
		}
		n, err := retry(func() (int, error) { return unix.Read(fd, buf[len(buf):cap(buf)]) })
		if err != nil {
			return "", &os.PathError{Op: "read", Path: d.path + "/" + name, Err: err}
		}
		if n == 0 {
			return strings.TrimSuffix(string(buf), "\n"), nil
		}
		buf = buf[:len(buf)+n]
	}
}

// number reads a file with one number; "max" is 0, for "no limit".
func (d dir) number(name string) (int64, error) {
	s, err := d.read(name)
	if err != nil || s == "max" {
		return 0, err
	}
	return strconv.ParseInt(s, 10, 64)
}

// keyed reads a file of "key number" lines.
func (d dir) keyed(name string) (map[string]int64, error) {
	s, err := d.read(name)
	if err != nil {
		return nil, err
	}
	m := map[string]int64{}
	for line := range strings.SplitSeq(s, "\n") {
		if k, v, ok := strings.Cut(line, " "); ok {
			if n, err := strconv.ParseInt(v, 10, 64); err == nil {
				m[k] = n
			}
		}
	}
	return m, nil
}

func (d dir) mkdir(name string) error {
	_, err := retry(func() (struct{}, error) { return struct{}{}, unix.Mkdirat(d.fd, name, 0o755) })
	if err != nil {
		return &os.PathError{Op: "mkdir", Path: d.path + "/" + name, Err: err}
	}
	return nil
}

// rmdir removes a group; one that is not there is no error.
func (d dir) rmdir(name string) error {
	_, err := retry(func() (struct{}, error) { return struct{}{}, unix.Unlinkat(d.fd, name, unix.AT_REMOVEDIR) })
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return &os.PathError{Op: "rmdir", Path: d.path + "/" + name, Err: err}
	}
	return nil
}

func (d dir) exists(name string) bool {
	return unix.Faccessat(d.fd, name, unix.F_OK, 0) == nil
}

// dirs lists the groups directly below name.
func (d dir) dirs(name string) ([]string, error) {
	fd, err := retry(func() (int, error) {
		return unix.Openat(d.fd, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	})
	if err != nil {
		if errors.Is(err, unix.ENOENT) {
			return nil, nil
		}
		return nil, &os.PathError{Op: "open", Path: d.path + "/" + name, Err: err}
	}
	f := os.NewFile(uintptr(fd), d.path+"/"+name)
	defer func() { _ = f.Close() }()
	entries, err := f.ReadDir(-1)
	var names []string
	for _, e := range entries {
		if e.IsDir() {
			names = append(names, e.Name())
		}
	}
	return names, err
}

// open opens a file or directory for another process to use.
func (d dir) open(name string, flags int) (*os.File, error) {
	fd, err := retry(func() (int, error) { return unix.Openat(d.fd, name, flags|unix.O_CLOEXEC, 0) })
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: d.path + "/" + name, Err: err}
	}
	return os.NewFile(uintptr(fd), d.path+"/"+name), nil
}

// note and noted keep a text on a group itself, so that it lives exactly as
// long as the group does.
func (d dir) note(name, key, text string) error {
	if err := unix.Setxattr(d.path+"/"+name, "trusted.dsec."+key, []byte(text), 0); err != nil {
		return &os.PathError{Op: "note " + key + " on", Path: d.path + "/" + name, Err: err}
	}
	return nil
}

func (d dir) noted(name, key string) (string, error) {
	buf := make([]byte, 4096)
	n, err := unix.Getxattr(d.path+"/"+name, "trusted.dsec."+key, buf)
	if err != nil {
		return "", &os.PathError{Op: "read note " + key + " of", Path: d.path + "/" + name, Err: err}
	}
	return string(buf[:n]), nil
}
