package hold

import (
	"cmp"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// Bounds of what is asked for plain processes.
const (
	maxPlain      = 1024     // that run, or whose end is not acknowledged
	maxPlainFiles = 48       // each
	maxPlainArgs  = 1024     // each
	maxPlainText  = 96 << 10 // bytes of path and arguments
	maxGroups     = 32
)

// plain is a process of the node's own: the hold is its parent and nothing more. It
// is in no sandbox, and nothing in one can name it.
type plain struct {
	s       *server
	spec    wirePlain
	started chan struct{} // closed when the start succeeded or failed
	failed  error
	pid     int
	begun   time.Time
	vigil   vigil
	done    chan struct{} // closed when it was reaped

	mu    sync.Mutex
	pidfd *os.File // nil once it has ended
	ended bool
	end   ending
}

// wirePlain is a PlainSpec with its bytes intact.
type wirePlain struct {
	Name        string
	Path        raw
	Args        []raw
	UID, GID    uint32
	Groups      []uint32
	Cgroup      string
	Tasks       []string
	OOMScoreAdj int
}

func toWirePlain(s PlainSpec) wirePlain {
	return wirePlain{Name: s.Name, Path: raw(s.Path), Args: toRaw(s.Args), UID: s.UID, GID: s.GID, Groups: s.Groups, Cgroup: s.Cgroup, Tasks: s.Tasks, OOMScoreAdj: s.OOMScoreAdj}
}

func (w wirePlain) spec() PlainSpec {
	return PlainSpec{Name: w.Name, Path: string(w.Path), Args: fromRaw(w.Args), UID: w.UID, GID: w.GID, Groups: w.Groups, Cgroup: w.Cgroup, Tasks: w.Tasks, OOMScoreAdj: w.OOMScoreAdj}
}

func (w wirePlain) equal(v wirePlain) bool {
	return w.Name == v.Name && w.Path == v.Path && slices.Equal(w.Args, v.Args) && w.UID == v.UID && w.GID == v.GID && slices.Equal(w.Groups, v.Groups) &&
		w.Cgroup == v.Cgroup && slices.Equal(w.Tasks, v.Tasks) && w.OOMScoreAdj == v.OOMScoreAdj
}

func (w wirePlain) check() error {
	const op = "start process"
	bad := func(format string, args ...any) error {
		return dsec.Errorf(dsec.Invalid, op, dsec.Quote(w.Name), format, args...)
	}
	text := len(w.Path)
	for _, a := range w.Args {
		text += len(a) + 1
	}
	switch {
	case !validID(w.Name):
		return bad("needs a valid name")
	case !filepath.IsAbs(string(w.Path)) || strings.IndexByte(string(w.Path), 0) >= 0:
		return bad("needs an absolute path")
	case len(w.Args) > maxPlainArgs || text > maxPlainText:
		return bad("%d arguments, %d bytes: at most %d and %d", len(w.Args), text, maxPlainArgs, maxPlainText)
	case slices.ContainsFunc(w.Args, func(a raw) bool { return strings.IndexByte(string(a), 0) >= 0 }):
		return bad("a NUL in an argument")
	case w.UID == 0 || w.GID == 0 || w.UID == ^uint32(0) || w.GID == ^uint32(0):
		return bad("user %d, group %d: it is never root", w.UID, w.GID)
	case len(w.Groups) > maxGroups || slices.Contains(w.Groups, 0) || slices.Contains(w.Groups, ^uint32(0)):
		return bad("groups %v: at most %d, and not root's", w.Groups, maxGroups)
	case w.Cgroup != "" && !filepath.IsAbs(w.Cgroup) || len(w.Tasks) > 32 || slices.ContainsFunc(w.Tasks, func(t string) bool { return !filepath.IsAbs(t) }):
		return bad("its control groups: absolute paths, at most 32")
	case w.OOMScoreAdj < -1000 || w.OOMScoreAdj > 1000:
		return bad("oom_score_adj %d, from -1000 to 1000", w.OOMScoreAdj)
	}
	return nil
}

// wirePlainInfo is a PlainInfo on its way.
type wirePlainInfo struct {
	Spec         wirePlain
	PID          int
	Begun        time.Time
	Ended        bool `json:",omitempty"`
	Code, Signal int  `json:",omitempty"`
}

func (w wirePlainInfo) info() PlainInfo {
	return PlainInfo{Spec: w.Spec.spec(), PID: w.PID, Started: w.Begun, Ended: w.Ended, Code: w.Code, Signal: w.Signal}
}

func newPlain(s *server, w wirePlain) *plain {
	return &plain{s: s, spec: w, started: make(chan struct{}), done: make(chan struct{})}
}

// startPlain starts a process, or finds the one that was started with the same name.
// Its descriptors are those of the request: output, then 3 and on.
func (s *server) startPlain(ctx context.Context, w wirePlain, f *frame) (any, []*os.File, error) {
	if err := w.check(); err != nil {
		return nil, nil, err
	}
	if n := len(f.files); n == 0 || n > 1+maxPlainFiles {
		return nil, nil, dsec.Errorf(dsec.Invalid, "start process", w.Name, "%d descriptors: its output, and at most %d", n, maxPlainFiles)
	}
	p := newPlain(s, w)
	s.mu.Lock()
	old := s.plains[w.Name]
	if old == nil && len(s.plains) >= maxPlain {
		s.mu.Unlock()
		return nil, nil, dsec.Errorf(dsec.ResourceExhausted, "start process", w.Name, "%d of them are known, as many as may be", maxPlain)
	}
	if old == nil {
		s.plains[w.Name] = p
	}
	s.mu.Unlock()
	if old != nil {
		<-old.started
		if old.failed != nil {
			return nil, nil, old.failed
		}
		if !old.spec.equal(w) {
			return nil, nil, dsec.Errorf(dsec.Conflict, "start process", w.Name, "another process has this name")
		}
		return old.found()
	}
	if err := p.start(ctx, f.files); err != nil {
		p.failed = plainError(w.Name, err)
		s.mu.Lock()
		delete(s.plains, w.Name)
		s.mu.Unlock()
		close(p.started)
		return nil, nil, p.failed
	}
	close(p.started)
	// Whoever waits for us to be found may ask before its end can be told.
	body, files, err := p.found()
	p.watch()
	return body, files, err
}

func plainError(name string, err error) error {
	if e, ok := errors.AsType[*dsec.Error](err); ok {
		return e
	}
	return dsec.E(dsec.ClassOf(err), "start process", name, err)
}

// found is what a client is told, with a pidfd while it runs.
func (p *plain) found() (any, []*os.File, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	i := p.infoLocked()
	if p.ended {
		return i, nil, nil
	}
	d, err := duplicate(p.pidfd)
	if err != nil {
		return nil, nil, err
	}
	return i, []*os.File{d}, nil
}

func (p *plain) info() wirePlainInfo {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.infoLocked()
}

func (p *plain) infoLocked() wirePlainInfo {
	return wirePlainInfo{Spec: p.spec, PID: p.pid, Begun: p.begun, Ended: p.ended, Code: p.end.code, Signal: p.end.signal}
}

func (p *plain) watch() {
	p.mu.Lock()
	pidfd := p.pidfd
	p.mu.Unlock()
	if pidfd != nil {
		p.s.attend(&p.vigil, pidfd, p.ending)
	}
}

func (p *plain) ending(e ending, err error) {
	if err != nil {
		p.s.log.Error("wait for process", "name", p.spec.Name, "error", err)
	}
	p.mu.Lock()
	p.ended, p.end = true, e
	_ = p.pidfd.Close()
	p.pidfd = nil
	ev := p.eventLocked()
	p.mu.Unlock()
	p.s.log.Info("process ended", "name", p.spec.Name, "code", e.code, "signal", e.signal)
	p.s.emit(wireEvent{Event: ev})
	close(p.done)
}

func (p *plain) eventLocked() Event {
	return Event{Type: PlainExited, Plain: p.spec.Name, PID: p.pid, Code: p.end.code, Signal: p.end.signal}
}

// pending is its end, if it came.
func (p *plain) pending() []Event {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.ended {
		return nil
	}
	return []Event{p.eventLocked()}
}

func (p *plain) kill() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pidfd != nil {
		_ = signalPidfd(p.pidfd, syscall.SIGKILL) // or it is about to be reaped
	}
}

// plain finds one that was started.
func (s *server) plain(name string) (*plain, error) {
	s.mu.Lock()
	p := s.plains[name]
	s.mu.Unlock()
	if p != nil {
		<-p.started
		if p.failed == nil {
			return p, nil
		}
	}
	return nil, dsec.E(dsec.NotFound, "find process", dsec.Quote(name), nil)
}

// startedPlains are those whose start succeeded, by name.
func (s *server) startedPlains() []*plain {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []*plain
	for _, p := range s.plains {
		select {
		case <-p.started:
			if p.failed == nil {
				all = append(all, p)
			}
		default:
		}
	}
	slices.SortFunc(all, func(a, b *plain) int { return cmp.Compare(a.spec.Name, b.spec.Name) })
	return all
}

// plainOp serves what is asked about processes that were started.
func (s *server) plainOp(f *frame) (any, []*os.File, error) {
	r, err := read[wireName](f)
	if err != nil {
		return nil, nil, err
	}
	if f.op == opPlains {
		list := []wirePlainInfo{}
		for _, p := range s.startedPlains() {
			if strings.HasPrefix(p.spec.Name, r.Name) {
				list = append(list, p.info())
			}
		}
		return list, nil, nil
	}
	p, err := s.plain(r.Name)
	if err != nil {
		return nil, nil, err
	}
	if f.op == opKillPlain {
		p.kill()
		return nil, nil, nil
	}
	return p.found()
}

// ackPlain forgets a process whose end was recorded.
func (s *server) ackPlain(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.plains[name]
	if p == nil {
		return
	}
	select {
	case <-p.started:
		if p.info().Ended { // an event that is on its way is known by its PID
			delete(s.plains, name)
			return
		}
	default:
	}
	s.log.Warn("client acknowledged the end of a process that runs", "name", name)
}

// endPlains ends all of them before the hold ends.
func (s *server) endPlains(ctx context.Context) {
	for _, p := range s.startedPlains() {
		p.kill()
		select {
		case <-p.done:
		case <-ctx.Done():
		case <-time.After(nativeWait):
			s.log.Error("shut down", "process", p.spec.Name, "pid", p.pid)
		}
	}
}

// start has the process run its program; on error nothing of it is left.
func (p *plain) start(ctx context.Context, files []*os.File) error {
	ctx, cancel := context.WithTimeout(ctx, plainStart)
	defer cancel()
	b, err := newBirth(p, files)
	if err != nil {
		return err
	}
	defer b.close()
	select {
	case p.s.births <- b:
		err = <-b.born
	case <-p.s.quit:
		err = errHoldGone
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err != nil {
		return err
	}
	p.pid, p.begun = b.pid, time.Now()
	if p.pidfd, err = childPidfd(b.pid); err == nil {
		err = b.await(ctx)
	}
	if err != nil {
		_ = unix.Kill(b.pid, unix.SIGKILL) // ours and not reaped, so it is still that process
		reapPID(b.pid)
		closeAll([]*os.File{p.pidfd})
		return err
	}
	return nil
}
