package hold

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/linux"
)

// CellsSpec asks for the server of cells of a sandbox (native/cell.c), which runs in all
// of its namespaces, in its control groups and with all of its root's rights.
type CellsSpec struct {
	Sandbox     string
	Caps        Caps
	OOMScoreAdj int
}

// cellsGroup is the v2 group of the server and its cells, below the sandbox's.
const cellsGroup = "cells"

// StartCells starts the server of cells in a sandbox, and returns the stream socket it
// serves on. It ends when the socket is closed, and with the sandbox.
func (c *Client) StartCells(ctx context.Context, s CellsSpec) (*os.File, error) {
	return c.oneFile(ctx, opCells, s)
}

func cellImage() (*os.File, error) {
	b, err := nativeBin.ReadFile("native/bin/cell-" + runtime.GOARCH)
	if err != nil {
		return nil, dsec.E(dsec.Unsupported, "start server of cells", runtime.GOARCH, errNotBuilt)
	}
	return linux.SealedFile("cells", b)
}

func (s *server) startCells(w CellsSpec) (*os.File, error) {
	const op = "start server of cells"
	sb, err := s.sandbox(w.Sandbox)
	if err != nil {
		return nil, err
	}
	if err := sb.alive(op); err != nil {
		return nil, err
	}
	program, err := cellImage()
	if err != nil {
		return nil, err
	}
	defer func() { _ = program.Close() }()
	im := execImage{flags: imageFile, join: joinAll, caps: w.Caps, umask: 0o022, cwd: "/", oom: w.OOMScoreAdj, argv: []string{"cells"}}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, dsec.E(dsec.Internal, op, w.Sandbox, err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "cells"), os.NewFile(uintptr(fds[1]), "cells")
	defer func() { _ = theirs.Close() }()
	group := filepath.Join(sb.spec.Cgroup, cellsGroup)
	if err = os.Mkdir(group, 0o755); errors.Is(err, os.ErrExist) {
		err = nil
	}
	var tasks []*os.File
	if err == nil {
		tasks, err = openTasks(sb.spec.Tasks)
	}
	if err != nil {
		_ = ours.Close()
		return nil, dsec.E(dsec.Internal, op, w.Sandbox, err)
	}
	defer closeAll(tasks)
	l := &launch{sb: sb, group: group, tasks: tasks, image: im.encode(), last: []*os.File{theirs, s.null, s.null, program}}
	c, _, err := l.run()
	if err != nil {
		_ = ours.Close()
		return nil, dsec.E(errnoClass(unwrapErrno(err)), op, w.Sandbox, err)
	}
	h := &helper{sb: sb, child: c}
	sb.mu.Lock()
	sb.helpers[h] = struct{}{}
	gone := sb.ended
	sb.mu.Unlock()
	if gone {
		h.kill()
	}
	h.watch()
	return ours, nil
}
