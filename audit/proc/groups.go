package proc

import (
	"encoding/binary"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/procinfo"
)

// groups finds the command that a control group was made for.
type groups struct {
	tree *os.File // something in the v2 tree; nil: not found

	mu    sync.Mutex
	known map[uint64]string
	older map[uint64]string // known before there were too many
}

const (
	mostGroups = 4096
	kernfs     = 0xfe // FILEID_KERNFS: the handle is the id of the group
)

func openGroups() *groups {
	g := &groups{known: map[uint64]string{}}
	for _, at := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		var st unix.Statfs_t
		if unix.Statfs(at, &st) == nil && st.Type == unix.CGROUP2_SUPER_MAGIC {
			g.tree, _ = os.Open(at) // without it no command is named
		}
	}
	return g
}

// exec is the id of the command, or "" for what is no command's. !named: the group is gone, and
// nobody has said what it was.
func (g *groups) exec(id uint64) (exec string, named bool) {
	if exec, named = g.said(id); named || g.tree == nil {
		return exec, named || g.tree == nil
	}
	fd, err := unix.OpenByHandleAt(int(g.tree.Fd()), unix.NewFileHandle(kernfs, binary.NativeEndian.AppendUint64(nil, id)), unix.O_PATH|unix.O_CLOEXEC)
	if err != nil {
		return "", false
	}
	defer func() { _ = unix.Close(fd) }()
	path, err := procinfo.Link(fd)
	if err != nil {
		return "", false
	}
	exec = procinfo.ExecOf(procinfo.Inside(path, g.tree.Name())) // it may go while it is asked
	g.say(id, exec)
	return exec, true
}

// said is exec without asking the kernel.
func (g *groups) said(id uint64) (exec string, named bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if exec, named = g.known[id]; !named {
		exec, named = g.older[id]
	}
	return exec, named
}

// say is for who knows.
func (g *groups) say(id uint64, exec string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.known) >= mostGroups {
		g.known, g.older = map[uint64]string{}, g.known
	}
	g.known[id] = exec
}

func (g *groups) close() error {
	if g.tree == nil {
		return nil
	}
	return g.tree.Close()
}
