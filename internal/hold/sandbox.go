package hold

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/linux"
)

// sandbox is one PID 1 and what runs beside it.
type sandbox struct {
	s    *server
	spec SpawnSpec
	net  bool // it has a network namespace of its own

	pid   int
	pidfd *os.File
	done  chan struct{} // closed when PID 1 is reaped

	mu      sync.Mutex
	ctl     *net.UnixConn // to PID 1; nil once entered
	entered bool
	held    bool
	asked   bool
	ended   bool
	acked   bool
	signal  int
	execs   map[string]*execution
	helpers map[*helper]struct{}
}

func validID(id string) bool {
	if id == "" || len(id) > 64 || id[0] == '.' {
		return false
	}
	for i := 0; i < len(id); i++ {
		c := id[i]
		if !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '_' || c == '.' || c == '-') {
			return false
		}
	}
	return true
}

func (s *server) sandbox(id string) (*sandbox, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if sb := s.sandboxes[id]; sb != nil && sb.pidfd != nil {
		return sb, nil
	}
	return nil, dsec.E(dsec.NotFound, "find sandbox", dsec.Quote(id), nil)
}

// withForker lends an idle forker.
func (s *server) withForker(ctx context.Context, f func(*forker) error) error {
	select {
	case k := <-s.forkers:
		defer func() { s.forkers <- k }()
		return f(k)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// anyForker is for requests that are not answered by the forker itself.
func (s *server) anyForker() *forker {
	return s.all[int(s.turn.Add(1))%len(s.all)]
}

// spawn makes a shell: PID 1 in its namespaces, its ids mapped, in its cgroups.
func (s *server) spawn(ctx context.Context, w wireSpawn, f *frame) (any, []*os.File, error) {
	if !validID(w.ID) || w.Count == 0 || w.UIDBase == 0 || w.GIDBase == 0 || w.Cgroup == "" {
		return nil, nil, dsec.Errorf(dsec.Invalid, "spawn sandbox", dsec.Quote(w.ID), "needs a valid id, a uid and gid range and a cgroup")
	}
	sb := &sandbox{s: s, spec: w.SpawnSpec, net: !w.HasNet, done: make(chan struct{}), execs: map[string]*execution{}, helpers: map[*helper]struct{}{}}
	s.mu.Lock()
	if s.sandboxes[w.ID] != nil {
		s.mu.Unlock()
		return nil, nil, dsec.E(dsec.AlreadyExists, "spawn sandbox", w.ID, nil)
	}
	s.sandboxes[w.ID] = sb
	s.mu.Unlock()
	files, err := sb.spawn(ctx, f)
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
		f, err := os.OpenFile(p, os.O_WRONLY, 0)
		if err != nil {
			closeAll(files)
			return nil, err
		}
		files = append(files, f)
	}
	return files, nil
}

func (sb *sandbox) spawn(ctx context.Context, f *frame) ([]*os.File, error) {
	group, err := os.Open(sb.spec.Cgroup)
	if err != nil {
		return nil, err
	}
	defer func() { _ = group.Close() }()
	tasks, err := openTasks(sb.spec.Tasks)
	if err != nil {
		return nil, err
	}
	defer closeAll(tasks)
	ours, theirs, err := seqpacketPair()
	if err != nil {
		return nil, err
	}
	defer func() { _ = theirs.Close() }()
	ctl, err := unixConn(ours)
	if err != nil {
		return nil, err
	}
	files := []*os.File{group, theirs}
	var flags uint32
	if !sb.net {
		ns, err := f.take(0)
		if err != nil {
			return nil, err
		}
		files, flags = append(files, ns), nativeJoinNetNS
	}
	var pidfd *os.File
	err = sb.s.withForker(ctx, func(k *forker) error {
		a, fd, err := k.call(nativeSpawn, flags, files)
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
	out, err := sb.born(pidfd, ctl, tasks)
	if err != nil {
		_ = ctl.Close()
		_ = syscall.Kill(sb.pid, syscall.SIGKILL) // ours and not reaped, so it is still that process
		reapPID(sb.pid)
		return nil, err
	}
	return out, nil
}

// born gives a new PID 1 its ids and opens its namespaces.
func (sb *sandbox) born(pidfd *os.File, ctl *net.UnixConn, tasks []*os.File) ([]*os.File, error) {
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
	own := byte(0)
	if sb.net {
		own = 1
	}
	if err := sendFiles(ctl, []byte{own, 0, 0, 0}, tasks); err != nil {
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
	go sb.watch()
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

func (sb *sandbox) namespaces() ([]*os.File, error) {
	if err := sb.alive("open namespaces"); err != nil {
		return nil, err
	}
	files, err := openNamespaces(sb.pid)
	if err != nil {
		return nil, dsec.E(dsec.Internal, "open namespaces", sb.spec.ID, err)
	}
	return files, nil
}

func (sb *sandbox) alive(what string) error {
	sb.mu.Lock()
	defer sb.mu.Unlock()
	if sb.ended || sb.asked {
		return dsec.Errorf(dsec.SandboxGone, what, sb.spec.ID, "its PID 1 has ended")
	}
	return nil
}

// watch waits for the end of PID 1. The kernel has ended everything inside by
// then.
func (sb *sandbox) watch() {
	e, err := awaitEnd(sb.pidfd)
	if err != nil {
		sb.s.log.Error("wait for sandbox", "sandbox", sb.spec.ID, "error", err)
	}
	sb.mu.Lock()
	sb.ended, sb.signal = true, e.signal
	if sb.ctl != nil {
		_ = sb.ctl.Close()
		sb.ctl = nil
	}
	var helpers []*helper
	for h := range sb.helpers {
		helpers = append(helpers, h)
	}
	ev := Event{Type: SandboxExited, Sandbox: sb.spec.ID, Signal: sb.signal, Asked: sb.asked}
	sb.mu.Unlock()
	for _, h := range helpers {
		h.kill()
	}
	close(sb.done)
	sb.s.log.Info("sandbox ended", "sandbox", sb.spec.ID, "signal", e.signal, "asked", ev.Asked)
	sb.s.emit(ev)
}

func (sb *sandbox) find(id string) (*execution, error) {
	sb.mu.Lock()
	e := sb.execs[id]
	sb.mu.Unlock()
	if e != nil {
		select {
		case <-e.started:
			if e.failed == nil {
				return e, nil
			}
		default:
		}
	}
	return nil, dsec.E(dsec.NotFound, "find exec", dsec.Quote(id), nil)
}

func (sb *sandbox) signalInit(sig int) error {
	if err := sb.alive("signal sandbox"); err != nil {
		return err
	}
	if err := signalPidfd(sb.pidfd, syscall.Signal(sig)); err != nil {
		return dsec.E(dsec.SandboxGone, "signal sandbox", sb.spec.ID, err)
	}
	return nil
}

// kill ends every process and waits for it.
func (sb *sandbox) kill(ctx context.Context) error {
	sb.mu.Lock()
	sb.asked = true
	sb.mu.Unlock()
	_ = signalPidfd(sb.pidfd, syscall.SIGKILL)
	_ = killCgroup(sb.spec.Cgroup)
	select {
	case <-sb.done:
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(nativeWait):
		return dsec.Errorf(dsec.Timeout, "kill sandbox", sb.spec.ID, "PID 1 (%d) did not end; is it frozen?", sb.pid)
	}
	for _, e := range sb.list() {
		select {
		case <-e.done:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

func (sb *sandbox) list() []*execution {
	sb.mu.Lock()
	defer sb.mu.Unlock()
	list := make([]*execution, 0, len(sb.execs))
	for _, e := range sb.execs {
		list = append(list, e)
	}
	return list
}

// remove forgets a sandbox and all that is left of its commands.
func (s *server) remove(ctx context.Context, sb *sandbox) error {
	if err := sb.kill(ctx); err != nil {
		return err
	}
	for _, e := range sb.list() {
		if err := sb.release(e.spec.Spec.ID); err != nil {
			return err
		}
	}
	groups, _ := filepath.Glob(filepath.Join(sb.spec.Cgroup, "exec-*"))
	for _, g := range groups {
		s.removeCgroup(g)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sandboxes[sb.spec.ID] == sb {
		delete(s.sandboxes, sb.spec.ID)
		_ = sb.pidfd.Close()
	}
	return nil
}

func (sb *sandbox) hold(held bool) {
	sb.mu.Lock()
	defer sb.mu.Unlock()
	sb.held = held
	for _, e := range sb.execs {
		e.clock.hold(held)
	}
}

// openIn opens a regular file of the root's own file system. It crosses no
// mount: one that was made inside could hang us.
func (sb *sandbox) openIn(path string) (*os.File, error) {
	if err := sb.alive("open in sandbox"); err != nil {
		return nil, err
	}
	root, err := os.OpenFile(fmt.Sprintf("/proc/%d/root", sb.pid), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, dsec.E(dsec.SandboxGone, "open in sandbox", sb.spec.ID, err)
	}
	defer func() { _ = root.Close() }()
	how := &unix.OpenHow{Flags: unix.O_RDONLY | unix.O_CLOEXEC | unix.O_NONBLOCK | unix.O_NOCTTY,
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV}
	var fd int
	err = noEINTR(func() (err error) {
		fd, err = unix.Openat2(fdOf(root), strings.TrimPrefix(path, "/"), how)
		return err
	})
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
		return nil, dsec.E(dsec.FileNotFound, "open in sandbox", dsec.Quote(path), err)
	}
	if err != nil {
		return nil, dsec.E(dsec.Invalid, "open in sandbox", dsec.Quote(path), err)
	}
	f := os.NewFile(uintptr(fd), path)
	if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
		_ = f.Close()
		return nil, dsec.Errorf(dsec.Invalid, "open in sandbox", dsec.Quote(path), "not a regular file")
	}
	return f, nil
}

// pending lists the ends nobody has acknowledged.
func (sb *sandbox) pending() []Event {
	sb.mu.Lock()
	defer sb.mu.Unlock()
	var list []Event
	for _, e := range sb.execs {
		if i := e.info(); i.Ended && !i.Acked {
			list = append(list, Event{Type: ExecExited, Sandbox: i.Sandbox, Exec: i.Spec.ID, Result: i.Result})
		}
	}
	if sb.ended && !sb.acked {
		list = append(list, Event{Type: SandboxExited, Sandbox: sb.spec.ID, Signal: sb.signal, Asked: sb.asked})
	}
	return list
}

func (sb *sandbox) ack(r wireRef) {
	sb.mu.Lock()
	defer sb.mu.Unlock()
	if r.Type == SandboxExited {
		sb.acked = true
		return
	}
	if e := sb.execs[r.Exec]; e != nil {
		e.mu.Lock()
		e.acked = true
		e.mu.Unlock()
	}
}

func (s *server) list() []wireSandboxInfo {
	s.mu.Lock()
	var all []*sandbox
	for _, sb := range s.sandboxes {
		if sb.pidfd != nil {
			all = append(all, sb)
		}
	}
	s.mu.Unlock()
	list := []wireSandboxInfo{}
	for _, sb := range all {
		sb.mu.Lock()
		w := wireSandboxInfo{SandboxInfo: SandboxInfo{ID: sb.spec.ID, PID: sb.pid, Cgroup: sb.spec.Cgroup, Entered: sb.entered,
			Held: sb.held, Ended: sb.ended, Asked: sb.asked, Signal: sb.signal, Acked: sb.acked}}
		execs := make([]*execution, 0, len(sb.execs))
		for _, e := range sb.execs {
			execs = append(execs, e)
		}
		sb.mu.Unlock()
		for _, e := range execs {
			select {
			case <-e.started:
				if e.failed == nil {
					w.Execs = append(w.Execs, e.info())
				}
			default:
			}
		}
		list = append(list, w)
	}
	return list
}

// fsmountFrom mounts what PID 1 configured. It may not do so itself: the kernel
// wants to see a proc and a sysfs that are as visible in the mount namespace of
// the caller, and PID 1's holds nothing.
func fsmountFrom(fs *os.File, attrs int) (*os.File, error) {
	var fd int
	err := noEINTR(func() (err error) {
		fd, err = unix.Fsmount(fdOf(fs), unix.FSMOUNT_CLOEXEC, attrs)
		return err
	})
	if err != nil {
		return nil, os.NewSyscallError("fsmount", err)
	}
	return os.NewFile(uintptr(fd), "mount"), nil
}

// sysfsOf mounts the sysfs of a network namespace that is not PID 1's own.
func sysfsOf(pid int) (m *os.File, err error) {
	err = linux.OnThread(func() error {
		ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", pid))
		if err != nil {
			return err
		}
		defer func() { _ = ns.Close() }()
		if err := linux.JoinNS(ns, unix.CLONE_NEWNET); err != nil {
			return err
		}
		m, err = linux.NewFS("sysfs").Mount(walled | unix.MOUNT_ATTR_NOEXEC | unix.MOUNT_ATTR_RDONLY)
		return err
	})
	return m, err
}
