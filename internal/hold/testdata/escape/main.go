// Command escape tries to get out of the root it runs in, and says what it
// sees then: one line per try, "name: what". It is run with every capability.
package main

import (
	"fmt"
	"os"
	"runtime"
	"sort"
	"strings"

	"golang.org/x/sys/unix"
)

func main() {
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		fmt.Println("unshare fs:", err)
	}
	tries := map[string]func() error{
		"chroot": chrootFchdir, "setns": joinOwn, "detach": detachRoot, "unshare": unshareDetach, "move": moveRoot, "pivot": pivot,
		"dotdot": dotdot,
	}
	try := tries[os.Args[1]]
	err := try()
	fmt.Printf("%v; / is %s; . is %s; write: %v; remount: %v; proc: %v\n", err, list("/"), list("."), write(), remount(), proc())
}

func list(p string) string {
	e, err := os.ReadDir(p)
	if err != nil {
		return err.Error()
	}
	var names []string
	for _, x := range e {
		names = append(names, x.Name())
	}
	sort.Strings(names)
	return "[" + strings.Join(names, " ") + "]"
}

func write() error { return os.Mkdir("/escaped", 0o755) }

func remount() error {
	if err := unix.Mount("", "/", "", unix.MS_REMOUNT, ""); err == nil {
		return nil
	}
	return unix.Mount("", "/", "", unix.MS_REMOUNT|unix.MS_BIND, "")
}

func proc() error { return unix.Mount("proc", "/", "proc", 0, "") }

func chrootFchdir() error {
	out, err := unix.Open("/", unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	if err := unix.Chroot("/tmp"); err != nil {
		return err
	}
	if err := unix.Fchdir(out); err != nil {
		return err
	}
	for range 50 {
		if err := unix.Chdir(".."); err != nil {
			return err
		}
	}
	return unix.Chroot(".")
}

func dotdot() error {
	fd, err := unix.Open("/../../..", unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	return unix.Fchdir(fd)
}

func own() (int, error) { return unix.Open("/proc/self/ns/mnt", unix.O_RDONLY, 0) }

func joinOwn() error {
	ns, err := own()
	if err != nil {
		return err
	}
	return unix.Setns(ns, unix.CLONE_NEWNS)
}

func detachRoot() error {
	ns, err := own()
	if err != nil {
		return err
	}
	for range 3 {
		if err = unix.Unmount("/", unix.MNT_DETACH); err != nil {
			break
		}
		if serr := unix.Setns(ns, unix.CLONE_NEWNS); serr != nil {
			return fmt.Errorf("setns: %w", serr)
		}
	}
	return fmt.Errorf("unmount: %w", err)
}

func unshareDetach() error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return err
	}
	return detachRoot()
}

func moveRoot() error {
	if err := unix.Mount("/", "/tmp", "", unix.MS_MOVE, ""); err != nil {
		if err := unix.Mount("/proc", "/tmp", "", unix.MS_MOVE, ""); err != nil {
			return fmt.Errorf("move proc: %w", err)
		}
		return fmt.Errorf("move root: %w", err)
	}
	return joinOwn()
}

func pivot() error {
	if err := unix.Mount("tmpfs", "/tmp", "tmpfs", 0, ""); err != nil {
		return err
	}
	if err := os.Mkdir("/tmp/old", 0o755); err != nil {
		return err
	}
	if err := unix.PivotRoot("/tmp", "/tmp/old"); err != nil {
		return err
	}
	if err := unix.Chdir("/old"); err != nil {
		return err
	}
	for range 50 {
		if err := unix.Chdir(".."); err != nil {
			return err
		}
	}
	return nil
}
