package hold

import (
	"os"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// helper is a process of ours inside the user and mount namespaces of a
// sandbox, where nothing inside sees it: it is in no pid namespace but ours.
type helper struct {
	sb    *sandbox
	child *child
	vigil vigil
}

func (h *helper) kill() { _ = signalPidfd(h.child.pidfd, unix.SIGKILL) }

// startFiles starts a file helper; its socket is its stdin.
func (s *server) startFiles(w FilesSpec) (*os.File, error) {
	sb, err := s.sandbox(w.Sandbox)
	if err != nil {
		return nil, err
	}
	if err := sb.alive("start file helper"); err != nil {
		return nil, err
	}
	im := execImage{flags: imageFile, join: joinFiles, uid: w.UID, gid: w.GID, groups: w.Groups, caps: w.Caps, umask: 0o022,
		cwd: "/", argv: []string{"dsec-hold", roleFiles}, env: []string{"GOMAXPROCS=2", "GODEBUG=madvdontneed=1"}}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, dsec.E(dsec.Internal, "start file helper", w.Sandbox, err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "files"), os.NewFile(uintptr(fds[1]), "files")
	defer func() { _ = theirs.Close() }()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		_ = ours.Close()
		return nil, dsec.E(dsec.Internal, "start file helper", w.Sandbox, err)
	}
	defer func() { _ = null.Close() }()
	tasks, err := openTasks(w.Tasks)
	if err != nil {
		_ = ours.Close()
		return nil, dsec.E(dsec.Internal, "start file helper", w.Sandbox, err)
	}
	defer closeAll(tasks)
	l := &launch{sb: sb, group: w.Cgroup, tasks: tasks, image: im.encode(), last: []*os.File{theirs, null, null, s.binary}}
	c, _, err := l.run()
	if err != nil {
		_ = ours.Close()
		return nil, dsec.E(errnoClass(unwrapErrno(err)), "start file helper", w.Sandbox, err)
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

func (h *helper) watch() { h.sb.s.attend(&h.vigil, h.child.pidfd, h.ending) }

func (h *helper) ending(_ ending, err error) {
	if err != nil {
		h.sb.s.log.Error("wait for file helper", "sandbox", h.sb.name(), "error", err)
	}
	h.sb.mu.Lock()
	delete(h.sb.helpers, h)
	h.sb.mu.Unlock()
	_ = h.child.pidfd.Close()
}

func unwrapErrno(err error) error {
	if l, ok := err.(*launchError); ok {
		return l.a.errno()
	}
	return err
}
