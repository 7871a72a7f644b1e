package tree

import (
	"errors"
	"strings"

	"golang.org/x/sys/unix"
)

// own are attributes that file systems keep for themselves.
const own = "trusted.overlay."

// copyAttributes copies the extended attributes, those of links included.
func copyAttributes(from, to Place) error {
	src, err := openAt(from, unix.O_PATH)
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := openAt(to, unix.O_PATH)
	if err != nil {
		return err
	}
	defer dst.Close()
	// A path to a descriptor of the link itself: what is behind it is not followed
	// again.
	names, err := list(procPath(src))
	if err != nil {
		return wrap("list attributes of", from.Name, err)
	}
	for _, n := range names {
		if strings.HasPrefix(n, own) {
			continue
		}
		v, err := get(procPath(src), n)
		if errors.Is(err, unix.ENODATA) {
			continue
		}
		if err == nil {
			err = unix.Setxattr(procPath(dst), n, v, 0)
		}
		if errors.Is(err, unix.ENOTSUP) && strings.HasPrefix(n, "system.") {
			continue
		}
		if err != nil {
			return wrap("copy attribute "+n+" to", to.Name, err)
		}
	}
	return nil
}

const maxAttributes = 64 << 10 // bytes of a list, and of a value, as the kernel has it

func list(p string) ([]string, error) {
	buf := make([]byte, 1024)
	n, err := unix.Listxattr(p, buf)
	if errors.Is(err, unix.ERANGE) {
		buf = make([]byte, maxAttributes)
		n, err = unix.Listxattr(p, buf)
	}
	if errors.Is(err, unix.ENOTSUP) {
		return nil, nil
	}
	if err != nil || n == 0 {
		return nil, err
	}
	return strings.Split(strings.TrimSuffix(string(buf[:n]), "\x00"), "\x00"), nil
}

func get(p, name string) ([]byte, error) {
	buf := make([]byte, 1024)
	n, err := unix.Getxattr(p, name, buf)
	if errors.Is(err, unix.ERANGE) {
		buf = make([]byte, maxAttributes)
		n, err = unix.Getxattr(p, name, buf)
	}
	if err != nil {
		return nil, err
	}
	return buf[:n], nil
}
