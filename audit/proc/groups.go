package proc

import (
	"encoding/binary"
	"os"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/procinfo"
)

// groups finds the command that a control group was made for.
type groups struct {
	tree  *os.File // something in the v2 tree; nil: not found
	known map[uint64]string
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

// exec is the id of the command, or "". Only the reader calls it.
func (g *groups) exec(id uint64) string {
	if g.tree == nil {
		return ""
	}
	name, ok := g.known[id]
	if ok {
		return name
	}
	fd, err := unix.OpenByHandleAt(int(g.tree.Fd()), unix.NewFileHandle(kernfs, binary.NativeEndian.AppendUint64(nil, id)), unix.O_PATH|unix.O_CLOEXEC)
	if err != nil {
		return "" // it is gone
	}
	defer func() { _ = unix.Close(fd) }()
	path, err := procinfo.Link(fd)
	if err != nil {
		return ""
	}
	if len(g.known) >= mostGroups {
		clear(g.known)
	}
	g.known[id] = procinfo.ExecOf(path)
	return g.known[id]
}

func (g *groups) close() error {
	if g.tree == nil {
		return nil
	}
	return g.tree.Close()
}
