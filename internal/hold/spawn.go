package hold

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// spawn makes a shell: PID 1 in its namespaces, its ids mapped, in its cgroups.
func (s *server) spawn(ctx context.Context, w wireSpawn, f *frame) (any, []*os.File, error) {
	if !validID(w.ID) || w.Count == 0 || w.UIDBase == 0 || w.GIDBase == 0 || w.Cgroup == "" {
		return nil, nil, dsec.Errorf(dsec.Invalid, "spawn sandbox", dsec.Quote(w.ID), "needs a valid id, a uid and gid range and a cgroup")
	}
	sb := newSandbox(s, w.SpawnSpec)
	s.mu.Lock()
	if s.sandboxes[w.ID] != nil {
		s.mu.Unlock()
		return nil, nil, dsec.E(dsec.AlreadyExists, "spawn sandbox", w.ID, nil)
	}
	s.sandboxes[w.ID] = sb
	s.mu.Unlock()
	files, err := sb.spawn(ctx, &w, f)
	if err != nil {
		s.mu.Lock()
		delete(s.sandboxes, w.ID)
		s.mu.Unlock()
		if dsec.ClassOf(err) == dsec.Internal {
			err = dsec.E(dsec.Internal, "spawn sandbox", w.ID, err)
		}
		return nil, nil, err
	}
	return wireShell{PID: sb.pid}, files, nil
}

func openTasks(paths []string) ([]*os.File, error) {
	var files []*os.File
	for _, p := range paths {
		f, err := openPlain(p, unix.O_WRONLY)
		if err != nil {
			closeAll(files)
			return nil, err
		}
		files = append(files, f)
	}
	return files, nil
}

func (sb *sandbox) spawn(ctx context.Context, w *wireSpawn, f *frame) (out []*os.File, err error) {
	group, err := openPlain(sb.spec.Cgroup, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return nil, err
	}
	defer func() { _ = group.Close() }()
	warm, err := sb.s.warmth.use(sb)
	if err != nil {
		return nil, err
	}
	defer func() {
		sb.s.warmth.done(warm)
		if err != nil {
			sb.s.warmth.cool(sb)
		}
	}()
	var sys *os.File
	if w.HasSys {
		if sys, err = f.take(0); err != nil {
			return nil, err
		}
	}
	ctl, theirs, err := packetPair()
	if err != nil {
		return nil, err
	}
	defer func() { _ = theirs.Close() }()
	files := []*os.File{group, theirs}
	var pidfd *os.File
	err = sb.s.withForker(ctx, func(k *forker) error {
		a, fd, err := k.call(request(nativeSpawn, 0, sb.spec.UIDBase, 0), files)
		if err != nil {
			return err
		}
		if !a.ok() {
			return fmt.Errorf("%s: %w", a.stepName(), a.errno())
		}
		sb.pid, pidfd = int(a.PID), fd
		return nil
	})
	if err != nil {
		_ = ctl.Close()
		return nil, err
	}
	out, err = sb.born(pidfd, ctl, warm.tasks)
	if err != nil {
		_ = ctl.Close()
		_ = syscall.Kill(sb.pid, syscall.SIGKILL) // ours and not reaped, so it is still that process
		reapPID(sb.pid)
		return nil, err
	}
	f.keep() // prepare closes it
	go sb.prepare(ctl, sys)
	return out, nil
}

// born gives a new PID 1 its ids and opens its namespaces.
func (sb *sandbox) born(pidfd *os.File, ctl *packets, tasks []*os.File) ([]*os.File, error) {
	pidfd, err := pollableFile(pidfd)
	if err != nil {
		return nil, err
	}
	if err := ours(fdOf(pidfd)); err != nil {
		_ = pidfd.Close()
		return nil, err
	}
	proc := "/proc/" + strconv.Itoa(sb.pid)
	oom := strconv.Itoa(sb.spec.OOMScoreAdj)
	for _, w := range [][2]string{
		{"/uid_map", fmt.Sprintf("0 %d %d", sb.spec.UIDBase, sb.spec.Count)},
		{"/gid_map", fmt.Sprintf("0 %d %d", sb.spec.GIDBase, sb.spec.Count)},
		{"/oom_score_adj", oom},
	} {
		if err := os.WriteFile(proc+w[0], []byte(w[1]), 0); err != nil {
			_ = pidfd.Close()
			return nil, err
		}
	}
	if err := ctl.send([]byte{0}, tasks); err != nil {
		_ = pidfd.Close()
		return nil, err
	}
	out, err := openNamespaces(sb.pid)
	if err != nil {
		_ = pidfd.Close()
		return nil, err
	}
	sb.mu.Lock()
	sb.ctl = ctl
	sb.mu.Unlock()
	sb.s.mu.Lock()
	sb.pidfd = pidfd
	sb.s.mu.Unlock()
	sb.watch()
	return out, nil
}

func openNamespaces(pid int) ([]*os.File, error) {
	user, err := os.Open(fmt.Sprintf("/proc/%d/ns/user", pid))
	if err != nil {
		return nil, err
	}
	netns, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", pid))
	if err != nil {
		_ = user.Close()
		return nil, err
	}
	return []*os.File{user, netns}, nil
}
