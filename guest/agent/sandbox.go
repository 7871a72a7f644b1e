package agent

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
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
	"github.com/opendsec/dsec/guest"
	"github.com/opendsec/dsec/internal/accounts"
	"github.com/opendsec/dsec/internal/linux"
)

const (
	defaultSpool = 64 << 20
	insideWait   = 30 * time.Second // for PID 1 of the sandbox to make its root
	undoWait     = 10 * time.Second
)

// sandbox is the one of this machine.
type sandbox struct {
	a       *Agent
	spec    guest.Mount
	group   group // of the whole; PID 1 is in init, commands in exec-ID
	pid     int   // of PID 1
	root    *os.File
	spool   string
	threads *forkers
	oom     int64 // kills of the whole machine before it began
	done    chan struct{}

	mu       sync.Mutex
	stopping bool
	ending   string // why PID 1 is gone
}

func (sb *sandbox) hasEnded() bool {
	select {
	case <-sb.done:
		return true
	default:
		return false
	}
}

func (sb *sandbox) isStopping() bool {
	sb.mu.Lock()
	defer sb.mu.Unlock()
	return sb.stopping
}

// mount makes the sandbox.
func (a *Agent) mount(ctx context.Context, q guest.Request) error {
	const op = "make sandbox"
	if q.Mount == nil {
		return dsec.Errorf(dsec.Invalid, op, "", "no mount")
	}
	form, err := json.Marshal(q.Mount)
	if err != nil {
		return dsec.E(dsec.Invalid, op, "", err)
	}
	a.mounting.Lock()
	defer a.mounting.Unlock()
	a.mu.Lock()
	have, told, resumed := a.mounted, a.told, a.resumed
	a.mu.Unlock()
	switch {
	case have != nil && bytes.Equal(have, form):
		return nil
	case have != nil:
		return dsec.Errorf(dsec.Conflict, op, "", "there is another one")
	case q.Mount.Machine != a.service:
		return dsec.Errorf(dsec.Unsupported, op, "", "the machine is the sandbox: %v, as it was asked for: %v", a.service, q.Mount.Machine)
	case !resumed:
		return dsec.Errorf(dsec.IllegalState, op, "", "nothing is run before the guest is resumed")
	}
	sb := &sandbox{a: a, spec: *q.Mount, group: group(filepath.Join(string(a.groups), "sandbox")), done: make(chan struct{})}
	var undo []func()
	if err := sb.make(ctx, told, &undo); err != nil {
		for i := len(undo) - 1; i >= 0; i-- {
			undo[i]()
		}
		if e, ok := errors.AsType[*dsec.Error](err); ok {
			return e
		}
		return dsec.E(classOf(err), op, "", err)
	}
	a.mu.Lock()
	a.mounted, a.sandbox = form, sb
	a.mu.Unlock()
	return writeMachineID(sb.root, told.MachineID)
}

func (sb *sandbox) make(ctx context.Context, told guest.Resume, undo *[]func()) error {
	root := ""
	if !sb.spec.Machine {
		var err error
		if root, err = sb.mountAll(undo); err == nil {
			err = furnishRoot(root, sb.spec.Dirs, told.Files)
		}
		if err != nil {
			return err
		}
	}
	if err := sb.makeSpool(undo); err != nil {
		return err
	}
	if err := sb.makeGroup(undo); err != nil {
		return err
	}
	sb.oom, _ = counter("/proc/vmstat", "oom_kill")
	*undo = append(*undo, func() { // PID 1 and what it has
		late, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoWait)
		defer cancel()
		_ = sb.group.kill()
		_ = sb.group.empty(late) // removing it tells
	})
	return sb.spawn(plan{Root: root, Hostname: hostnameOr(told.Hostname), Shm: sb.spec.Limits.Shm}, undo)
}

func hostnameOr(name string) string {
	if name == "" {
		return "sandbox"
	}
	return name
}

func (sb *sandbox) makeSpool(undo *[]func()) error {
	sb.spool = filepath.Join(sb.a.dir, "spool")
	size := sb.spec.Limits.Spool
	if size <= 0 {
		size = defaultSpool
	}
	if err := os.MkdirAll(sb.spool, 0o700); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", sb.spool, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, fmt.Sprintf("mode=0700,size=%d", size)); err != nil {
		return fmt.Errorf("mount spools: %w", err)
	}
	*undo = append(*undo, func() { _ = unix.Unmount(sb.spool, unix.MNT_DETACH) })
	return nil
}

// makeGroup limits the sandbox as far as controllers are here.
func (sb *sandbox) makeGroup(undo *[]func()) error {
	for _, g := range []group{sb.group, group(sb.group.file("init"))} {
		if err := os.Mkdir(string(g), 0o755); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
		*undo = append(*undo, func() { _ = os.Remove(string(g)) })
	}
	for _, l := range []struct {
		file  string
		value int64
	}{{"memory.max", sb.spec.Limits.Memory}, {"pids.max", sb.spec.Limits.Pids}} {
		if l.value <= 0 {
			continue
		}
		err := sb.group.write(l.file, strconv.FormatInt(l.value, 10))
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, os.ErrPermission) { // no such controller: the node has other means
			sb.a.log.Warn("a limit has no controller here", "file", l.file)
			continue
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// spawn starts PID 1 in namespaces of its own and joins them.
func (sb *sandbox) spawn(p plan, undo *[]func()) error {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socketpair", err)
	}
	ours, theirs := os.NewFile(uintptr(pair[0]), "control"), os.NewFile(uintptr(pair[1]), "control")
	defer func() { _ = theirs.Close() }()
	conn, err := net.FileConn(ours)
	_ = ours.Close()
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	dir, err := os.Open(sb.group.file("init"))
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer func() { _ = null.Close() }()
	pid, end, err := sb.a.reaper.start(func() (int, error) {
		return syscall.ForkExec(self, []string{"init", "init"}, &syscall.ProcAttr{Dir: "/", Env: []string{},
			Files: []uintptr{null.Fd(), null.Fd(), 2, theirs.Fd()},
			Sys: &syscall.SysProcAttr{Setsid: true, UseCgroupFD: true, CgroupFD: int(dir.Fd()),
				Cloneflags: sb.newSpaces()}})
	})
	if err != nil {
		return fmt.Errorf("start PID 1: %w", err)
	}
	sb.pid = pid
	go sb.attend(end)
	_ = theirs.Close()
	_ = conn.SetDeadline(time.Now().Add(insideWait))
	var said string
	dec := json.NewDecoder(conn)
	if err = json.NewEncoder(conn).Encode(p); err == nil {
		err = dec.Decode(&said)
	}
	if err == nil && said != "" {
		err = errors.New(said)
	}
	if err != nil {
		return fmt.Errorf("PID 1: %w", err)
	}
	if err := sb.join(undo); err != nil {
		return err
	}
	if _, err := conn.Write([]byte{1}); err != nil {
		return fmt.Errorf("PID 1: %w", err)
	}
	if _, err := conn.Read(make([]byte, 1)); err != io.EOF {
		return fmt.Errorf("PID 1 has not given up what it had: %w", err)
	}
	return nil
}

// newSpaces are the namespaces that the sandbox does not share with the agent.
func (sb *sandbox) newSpaces() uintptr {
	if sb.spec.Machine {
		return 0
	}
	return unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS
}

// join opens what leads into the sandbox.
func (sb *sandbox) join(undo *[]func()) error {
	spaces, err := spacesOf(sb.pid)
	if err != nil {
		return err
	}
	sb.threads = &forkers{spaces: spaces, tasks: sb.spec.Limits.Tasks, all: map[kindOfForker]*forker{}}
	*undo = append(*undo, func() { sb.threads.close() })
	fd, err := unix.Open(filepath.Join("/proc", strconv.Itoa(sb.pid), "root"), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("open root", err)
	}
	sb.root = os.NewFile(uintptr(fd), "root")
	*undo = append(*undo, func() { _ = sb.root.Close() })
	return nil
}

// attend waits for the end of PID 1, with which the kernel ends all the others.
func (sb *sandbox) attend(end <-chan ending) {
	e := <-end
	sb.mu.Lock()
	sb.ending = fmt.Sprintf("PID 1 exited with %d", e.code)
	if e.signal != 0 {
		sb.ending = fmt.Sprintf("PID 1 was ended by signal %d (%s)", e.signal, syscall.Signal(e.signal))
	}
	sb.mu.Unlock()
	close(sb.done)
}

// dying reports whether PID 1 is on its way out: the others go before it is gone.
func (sb *sandbox) dying() bool {
	if sb.hasEnded() || sb.isStopping() {
		return true
	}
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(sb.pid), "stat"))
	if err != nil {
		return true
	}
	f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	if len(f) < 7 {
		return true
	}
	flags, _ := strconv.ParseUint(f[6], 10, 64)
	const exiting = 0x4
	return flags&exiting != 0
}

func (a *Agent) ended(ctx context.Context) (string, error) {
	a.mu.Lock()
	sb := a.sandbox
	a.mu.Unlock()
	if sb == nil {
		return "", dsec.Errorf(dsec.IllegalState, "wait for sandbox", "", "there is no sandbox yet")
	}
	select {
	case <-sb.done:
		sb.mu.Lock()
		defer sb.mu.Unlock()
		return sb.ending, nil
	case <-ctx.Done():
		return "", dsec.E(dsec.Canceled, "wait for sandbox", "", ctx.Err())
	}
}

// identify looks a user up in the sandbox's own files, which are read where they
// are on its root and nowhere else.
func (sb *sandbox) identify(user string) (accounts.Identity, error) {
	if user == "" {
		user = sb.spec.Defaults.User
	}
	var all accounts.Files
	for _, f := range []struct {
		path string
		into *[]byte
	}{{"/etc/passwd", &all.Passwd}, {"/etc/group", &all.Group}} {
		file, err := linux.OpenOnMount(sb.root, f.path, unix.O_RDONLY)
		if err != nil {
			continue // counts as empty
		}
		*f.into, _ = accounts.ReadCapped(file) // so does one that cannot be read
		_ = file.Close()
	}
	return all.Lookup(user)
}

// shutdown ends the sandbox. The machine is of no use afterwards.
func (a *Agent) shutdown(ctx context.Context, grace time.Duration) error {
	const op = "end sandbox"
	a.mu.Lock()
	sb := a.sandbox
	a.mu.Unlock()
	if sb == nil {
		return nil
	}
	if grace > 0 && !sb.hasEnded() {
		a.askMain(ctx, grace)
	}
	sb.mu.Lock()
	sb.stopping = true
	sb.mu.Unlock()
	_ = sb.group.kill() // also what does not get to begin; the next one tells
	a.starting.Lock()   // what was starting has started
	defer a.starting.Unlock()
	if err := sb.group.kill(); err != nil {
		return dsec.E(dsec.Internal, op, "", err)
	}
	if err := sb.group.empty(ctx); err != nil {
		return dsec.E(dsec.ClassOf(err), op, "", err)
	}
	for _, e := range a.all() {
		<-e.done // no more than what is left in the pipes
	}
	sb.threads.close() // they hold the mount namespace
	_ = sb.root.Close()
	if !sb.spec.Machine {
		sb.unmount()
	}
	unix.Sync()
	return nil
}

// askMain gives the main command a chance to end by itself.
func (a *Agent) askMain(ctx context.Context, grace time.Duration) {
	e, err := a.find("main")
	if err != nil || e.signal(int(unix.SIGTERM)) != nil {
		return
	}
	late := time.NewTimer(grace)
	defer late.Stop()
	select {
	case <-e.done:
	case <-late.C:
	case <-ctx.Done():
	}
}
