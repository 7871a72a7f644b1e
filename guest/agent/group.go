package agent

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// group is a directory of the unified hierarchy of control groups.
type group string

func (g group) file(name string) string { return filepath.Join(string(g), name) }

func (g group) write(name, text string) error { return os.WriteFile(g.file(name), []byte(text), 0) }

// number reads a file that holds one, or "max"; 0 if it cannot.
func number(path string) int64 {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0
	}
	n, _ := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	return n
}

// counter is the N of a line "name N" of a file, and whether there is one.
func counter(path, name string) (int64, bool) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, false
	}
	for line := range bytes.Lines(b) {
		if rest, ok := bytes.CutPrefix(line, []byte(name+" ")); ok {
			n, err := strconv.ParseInt(string(bytes.TrimSpace(rest)), 10, 64)
			return n, err == nil
		}
	}
	return 0, false
}

func (g group) cpu() time.Duration {
	n, _ := counter(g.file("cpu.stat"), "usage_usec")
	return time.Duration(n) * time.Microsecond
}

func (g group) throttled() time.Duration {
	n, _ := counter(g.file("cpu.stat"), "throttled_usec")
	return time.Duration(n) * time.Microsecond
}

// kill ends every process in the group and below it.
func (g group) kill() error { return g.write("cgroup.kill", "1") }

// pids counts the processes in the group and below it.
func (g group) pids() (n int64) {
	if _, err := os.Stat(g.file("pids.current")); err == nil {
		return number(g.file("pids.current"))
	}
	_ = filepath.WalkDir(string(g), func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Name() == "cgroup.procs" { // a group that is gone has none
			b, _ := os.ReadFile(path)
			n += int64(bytes.Count(b, []byte("\n")))
		}
		return nil
	})
	return n
}

// freeze stops, or lets go on, every process in the group and below it, and
// waits until they have stopped.
func (g group) freeze(ctx context.Context, on bool) error {
	if !on {
		return g.write("cgroup.freeze", "0")
	}
	if err := g.write("cgroup.freeze", "1"); err != nil {
		return err
	}
	return g.await(ctx, "frozen", 1)
}

// empty waits until the group has no process.
func (g group) empty(ctx context.Context) error { return g.await(ctx, "populated", 0) }

// await waits for a line of cgroup.events, which the kernel tells of by POLLPRI.
func (g group) await(ctx context.Context, name string, want int64) error {
	fd, err := unix.Open(g.file("cgroup.events"), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: g.file("cgroup.events"), Err: err}
	}
	defer func() { _ = unix.Close(fd) }()
	b := make([]byte, 256)
	for {
		n, err := unix.Pread(fd, b, 0) // also arms the next notification
		if err != nil {
			return os.NewSyscallError("read cgroup.events", err)
		}
		if bytes.Contains(b[:n], []byte(name+" "+strconv.FormatInt(want, 10)+"\n")) {
			return nil
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLPRI}}
		if _, err := unix.Poll(p, 100); err != nil && err != unix.EINTR { // looks at ctx from time to time
			return os.NewSyscallError("poll", err)
		}
	}
}

// remove removes the group, whose processes are ending.
func (g group) remove(ctx context.Context) error {
	_ = g.kill() // none is left, or they are
	if err := g.empty(ctx); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	err := os.Remove(string(g))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}
