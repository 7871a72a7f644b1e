package hold

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// sandbox is one PID 1 and what runs beside it.
type sandbox struct {
	s    *server
	spec SpawnSpec

	ident    atomic.Pointer[string] // Enter may change it
	pid      int
	pidfd    *os.File
	done     chan struct{} // closed when PID 1 is reaped
	vigil    vigil
	prepared chan struct{} // closed when what needs no root is made, or unready is set
	unready  error
	has      [3]bool // what was prepared, by the index in prepared

	warm *warmFiles // guarded by s.warmth, as is cold
	cold bool       // it is being removed
	pace pace       // of answers to what its filters ask

	mu      sync.Mutex
	ctl     *packets // to PID 1; nil once entered
	entered bool
	held    bool
	asked   bool
	ended   bool
	acked   bool
	signal  int
	execs   map[string]*execution
	leaving map[string]*execution // released, whose cgroup is still being removed
	helpers map[*helper]struct{}

	listeners map[*listener]struct{}
}

// name is the sandbox's id.
func (sb *sandbox) name() string { return *sb.ident.Load() }

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

// living are the sandboxes that were made, also if they have ended.
func (s *server) living() []*sandbox {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []*sandbox
	for _, sb := range s.sandboxes {
		if sb.pidfd != nil {
			all = append(all, sb)
		}
	}
	return all
}

func (sb *sandbox) namespaces() ([]*os.File, error) {
	if err := sb.alive("open namespaces"); err != nil {
		return nil, err
	}
	files, err := openNamespaces(sb.pid)
	if err == nil {
		var mounts *os.File
		if mounts, err = os.Open(fmt.Sprintf("/proc/%d/ns/mnt", sb.pid)); err == nil {
			return append(files, mounts), nil
		}
		closeAll(files)
	}
	return nil, dsec.E(dsec.Internal, "open namespaces", sb.name(), err)
}

func (sb *sandbox) alive(what string) error {
	sb.mu.Lock()
	defer sb.mu.Unlock()
	if sb.ended || sb.asked {
		return dsec.Errorf(dsec.SandboxGone, what, sb.name(), "its PID 1 has ended")
	}
	return nil
}

func newSandbox(s *server, spec SpawnSpec) *sandbox {
	sb := &sandbox{s: s, spec: spec, done: make(chan struct{}), prepared: make(chan struct{}), execs: map[string]*execution{},
		leaving: map[string]*execution{}, helpers: map[*helper]struct{}{}, listeners: map[*listener]struct{}{}}
	sb.ident.Store(&spec.ID)
	return sb
}

// watch waits for the end of PID 1.
func (sb *sandbox) watch() { sb.s.attend(&sb.vigil, sb.pidfd, sb.ending) }

// ending is the end of PID 1. The kernel has ended everything inside by then.
func (sb *sandbox) ending(e ending, err error) {
	if err != nil {
		sb.s.log.Error("wait for sandbox", "sandbox", sb.name(), "error", err)
	}
	sb.mu.Lock()
	sb.ended, sb.signal = true, e.signal
	if sb.ctl != nil {
		_ = sb.ctl.Close()
		sb.ctl = nil
	}
	helpers := slices.Collect(maps.Keys(sb.helpers))
	ev := wireEvent{Event: Event{Type: SandboxExited, Sandbox: sb.name(), Signal: sb.signal, Asked: sb.asked}}
	sb.mu.Unlock()
	for _, h := range helpers {
		h.kill()
	}
	if !ev.Asked {
		sb.s.log.Info("sandbox ended", "sandbox", sb.name(), "signal", e.signal)
	}
	sb.s.emit(ev)
	close(sb.done)
}

func (sb *sandbox) find(id string) (*execution, error) {
	sb.mu.Lock()
	e := sb.execs[id]
	sb.mu.Unlock()
	if e != nil && e.hasStarted() {
		return e, nil
	}
	return nil, dsec.E(dsec.NotFound, "find exec", dsec.Quote(id), nil)
}

func (sb *sandbox) signalInit(sig int) error {
	if err := sb.alive("signal sandbox"); err != nil {
		return err
	}
	if err := signalPidfd(sb.pidfd, syscall.Signal(sig)); err != nil {
		return dsec.E(dsec.SandboxGone, "signal sandbox", sb.name(), err)
	}
	return nil
}

// kill ends every process and waits for it.
func (sb *sandbox) kill(ctx context.Context) error {
	sb.mu.Lock()
	sb.asked = true
	sb.mu.Unlock()
	_ = signalPidfd(sb.pidfd, syscall.SIGKILL) // and the kernel ends all it has
	select {
	case <-sb.done:
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(nativeWait):
		return dsec.Errorf(dsec.Timeout, "kill sandbox", sb.name(), "PID 1 (%d) did not end; is it frozen?", sb.pid)
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
	return slices.Collect(maps.Values(sb.execs))
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
	sb.mu.Lock()
	leaving := slices.Collect(maps.Values(sb.leaving))
	sb.mu.Unlock()
	for _, e := range leaving {
		<-e.gone
	}
	s.warmth.cool(sb)
	s.removeLingering(sb.spec.Cgroup + "/")
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sandboxes[sb.name()] == sb {
		delete(s.sandboxes, sb.name())
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
		return nil, dsec.E(dsec.SandboxGone, "open in sandbox", sb.name(), err)
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
		list = append(list, Event{Type: SandboxExited, Sandbox: sb.name(), Signal: sb.signal, Asked: sb.asked})
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
	list := []wireSandboxInfo{}
	for _, sb := range s.living() {
		sb.mu.Lock()
		w := wireSandboxInfo{SandboxInfo: SandboxInfo{ID: sb.name(), PID: sb.pid, Cgroup: sb.spec.Cgroup, Entered: sb.entered,
			Held: sb.held, Ended: sb.ended, Asked: sb.asked, Signal: sb.signal, Acked: sb.acked}}
		sb.mu.Unlock()
		for _, e := range sb.list() {
			if e.hasStarted() {
				w.Execs = append(w.Execs, e.info())
			}
		}
		list = append(list, w)
	}
	return list
}
