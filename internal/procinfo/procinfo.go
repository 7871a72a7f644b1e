// Package procinfo reads from /proc what a process is, and remembers it for a while:
// one that asks after the process has ended still learns who it was.
//
// What Read returns belongs to one process, but not to one program: a caller that
// knows the command name checks Name. Everything may be used concurrently.
package procinfo

import (
	"bytes"
	"errors"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Info is what is known of a process.
type Info struct {
	Name   string // command name, as the kernel prints it
	UID    uint32 // real, as this machine counts
	GID    uint32
	PID    int    // in its own pid namespace
	Parent int    // in ours
	Group  string // path in the v2 tree of control groups
	Exe    string // as it is linked
	Args   []string
}

const (
	argBytes    = 4096 // of the arguments are read
	statusBytes = 4096
	commBytes   = 64
)

// Read asks the kernel, for all but the Group. The name is read last, so that the rest
// is not of a later program than it.
func Read(pid int) (i Info, err error) {
	var buf [argBytes]byte
	args, err := head("/proc/"+strconv.Itoa(pid)+"/cmdline", buf[:])
	if err != nil {
		return i, err
	}
	if i, err = Who(pid); err != nil {
		return i, err
	}
	if args = bytes.TrimRight(args, "\x00"); len(args) > 0 {
		i.Args = strings.Split(string(args), "\x00")
	}
	return i, nil
}

// Who is Read without Group and Args: it never waits for the memory of the process. The
// number may be of a thread.
func Who(pid int) (i Info, err error) {
	dir := "/proc/" + strconv.Itoa(pid) + "/"
	if i.Exe, err = os.Readlink(dir + "exe"); err != nil {
		return i, err
	}
	var buf [statusBytes]byte
	status, err := head(dir+"status", buf[:])
	if err != nil {
		return i, err
	}
	return i, i.status(string(status))
}

// Program is what a process runs: Exe and Name, as Read has them, and in UID the effective one. It
// costs half of what Read does. The name is read last.
func Program(pid int) (i Info, err error) {
	dir := "/proc/" + strconv.Itoa(pid)
	if i.Exe, err = os.Readlink(dir + "/exe"); err != nil {
		return i, err
	}
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return i, &os.PathError{Op: "stat", Path: dir, Err: err}
	}
	i.UID = st.Uid
	var buf [commBytes]byte
	name, err := head(dir+"/comm", buf[:])
	i.Name = strings.TrimSuffix(string(name), "\n")
	return i, err
}

func (i *Info) status(text string) error {
	var found int
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(line, ":")
		f := strings.Fields(value)
		if len(f) == 0 {
			continue
		}
		switch key {
		case "Name":
			i.Name = strings.Trim(value, "\t\n")
		case "PPid":
			i.Parent, _ = strconv.Atoi(f[0])
		case "Uid":
			i.UID = id(f[0])
			found++
		case "Gid":
			i.GID = id(f[0])
			found++
		case "NStgid":
			if len(f) > 1 { // else it is in ours, or has ended meanwhile
				i.PID, _ = strconv.Atoi(f[len(f)-1])
			}
			found++
		}
	}
	if found < 3 {
		return errors.New("the status of the process is not whole")
	}
	return nil
}

func id(s string) uint32 {
	n, _ := strconv.ParseUint(s, 10, 32) // of the kernel
	return uint32(n)
}

// unified is the path of the line that has no controller.
func unified(text string) string {
	for line := range strings.Lines(text) {
		if path, ok := strings.CutPrefix(line, "0::"); ok {
			return strings.TrimSuffix(path, "\n")
		}
	}
	return ""
}

// head reads the beginning of a file into b. It is done for each start of a program, and there is
// none to wait for in /proc: without os.File, which asks the poller first, it is a third cheaper.
func head(path string, b []byte) ([]byte, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	defer func() { _ = unix.Close(fd) }() // only read
	n := 0
	for n < len(b) {
		m, err := unix.Read(fd, b[n:])
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return nil, &os.PathError{Op: "read", Path: path, Err: err}
		}
		if m == 0 {
			break
		}
		n += m
	}
	return b[:n], nil
}

const (
	remembered = 8192
	keepFor    = 10 * time.Second // then the number may be of another process
)

// Cache remembers the last processes it was told of.
type Cache struct {
	mu    sync.Mutex
	known map[int]entry
	order [remembered]int
	next  int
}

type entry struct {
	Info
	at time.Time
}

// Put remembers a process.
func (c *Cache) Put(pid int, i Info) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.known == nil {
		c.known = map[int]entry{}
	}
	if _, ok := c.known[pid]; !ok {
		delete(c.known, c.order[c.next])
		c.order[c.next] = pid
		c.next = (c.next + 1) % remembered
	}
	c.known[pid] = entry{i, time.Now()}
}

// Get returns what was put a moment ago.
func (c *Cache) Get(pid int) (Info, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e, ok := c.known[pid]
	return e.Info, ok && time.Since(e.at) < keepFor
}

// Find returns what is remembered of a process, or else reads it.
func (c *Cache) Find(pid int) (Info, bool) {
	i, err := Read(pid)
	if err == nil {
		if group, err := head("/proc/"+strconv.Itoa(pid)+"/cgroup", make([]byte, statusBytes)); err == nil {
			i.Group = unified(string(group))
		}
		return i, true
	}
	return c.Get(pid)
}

// Link is the path of an open file, as the kernel prints it.
func Link(fd int) (string, error) { return os.Readlink("/proc/self/fd/" + strconv.Itoa(fd)) }

// Inside is a link without the prefix of a root, and without what the kernel says of
// files that are no more.
func Inside(link, prefix string) string {
	if p, ok := strings.CutPrefix(link, prefix+"/"); ok {
		link = "/" + p
	}
	return strings.TrimSuffix(link, " (deleted)")
}

// execPrefix is what the control group of a command begins with; its id follows.
const execPrefix = "exec-"

// ExecOf is the id of the command in the path of a control group, or "".
func ExecOf(group string) string {
	for e := range strings.SplitSeq(group, "/") {
		if id, ok := strings.CutPrefix(e, execPrefix); ok {
			return id
		}
	}
	return ""
}

// GroupOf is a path of which ExecOf is that id.
func GroupOf(exec string) string {
	if exec == "" {
		return ""
	}
	return execPrefix + exec
}
