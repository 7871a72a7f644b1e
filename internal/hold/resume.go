package hold

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/version"
	"github.com/opendsec/dsec/process"
)

// followerGrace is how long the output that a follower had not read is kept
// for it, if there is no room for more: its connection ended with the upgrade.
const followerGrace = 2 * time.Second

// runResume is the hold after an upgrade.
func runResume(args []string) error {
	if len(args) < 2 {
		return errors.New("no state")
	}
	fd, err := strconv.Atoi(args[1])
	if err != nil {
		return err
	}
	unix.CloseOnExec(fd)
	m := os.NewFile(uintptr(fd), "state")
	b, err := io.ReadAll(io.NewSectionReader(m, 0, 1<<40))
	if err != nil {
		return err
	}
	_ = m.Close()
	st, err := decodeState(b)
	if err != nil {
		return err
	}
	log, err := settle()
	if err != nil {
		return err
	}
	s, err := emptyServer(st.Socket, log)
	if err != nil {
		return err
	}
	r := &resumption{s: s, ago: monotonic() - st.At, files: map[int]*os.File{}}
	if err := r.all(st); err != nil {
		log.Error("the state cannot be gone on with", "error", err)
		return err
	}
	log.Info("hold goes on", "version", version.Version, "sandboxes", len(st.Sandboxes), "paused", r.ago)
	return s.run()
}

// resumption makes a server of a state. Nothing runs before the server is resumed.
type resumption struct {
	s     *server
	ago   time.Duration
	files map[int]*os.File
}

// file takes over a descriptor, nil for 0; the same file for the same number.
func (r *resumption) file(fd int, name string) *os.File {
	if fd == 0 {
		return nil
	}
	if r.files[fd] == nil {
		unix.CloseOnExec(fd)
		r.files[fd] = os.NewFile(uintptr(fd), name)
	}
	return r.files[fd]
}

func (r *resumption) all(st *holdState) error {
	s := r.s
	s.started = st.Started
	s.binary, s.lock = r.file(st.Binary, "helper"), r.file(st.Lock, "lock")
	for n, fd := range st.Store {
		s.store[n] = r.file(fd, "received")
	}
	for _, d := range st.Lingering {
		s.lingering[d] = struct{}{}
	}
	for _, fd := range st.Discards {
		s.add(&pump{s: s, r: r.file(fd, pipeName), stage: pumpDiscards})
	}
	s.refused.restore(st.Batch, st.Refusals)
	l := r.file(st.Listener, "listener")
	lis, err := net.FileListener(l)
	if err != nil {
		return err
	}
	_ = l.Close()
	s.lis = lis.(*net.UnixListener)
	for i := range st.Sandboxes {
		if err := r.sandbox(&st.Sandboxes[i], st.Native); err != nil {
			return fmt.Errorf("sandbox %s: %w", st.Sandboxes[i].ID, err)
		}
		sb := s.sandboxes[st.Sandboxes[i].ID]
		for _, l := range st.Sandboxes[i].Listeners {
			sb.addListener(l.Exec, r.file(l.File, "listener"), s.filters.same(st.Filters[l.Filter]))
		}
	}
	for i := range st.Plains {
		r.plain(&st.Plains[i])
	}
	return r.forkers(st)
}

func (r *resumption) plain(st *plainState) {
	p := newPlain(r.s, st.Spec)
	p.pid, p.begun, p.ended, p.end = st.PID, st.Begun, st.Ended, ending{code: st.Code, signal: st.Signal}
	if close(p.started); p.ended {
		close(p.done)
	} else {
		p.pidfd = r.file(st.Pidfd, "pidfd")
	}
	r.s.plains[st.Spec.Name] = p
}

// forkers keeps the old ones if they understand us.
func (r *resumption) forkers(st *holdState) error {
	var all []*forker
	for _, old := range st.Forkers {
		c, err := newPackets(r.file(old.Socket, "pair"))
		if err != nil {
			return err
		}
		proc, err := os.FindProcess(old.PID)
		if err != nil {
			return err
		}
		all = append(all, &forker{c: c, proc: proc, ended: make(chan struct{})})
	}
	if st.Native == nativeFormat {
		r.s.employ(all)
		return nil
	}
	for _, k := range all {
		_ = k.c.Close() // it ends
		go func() { _, _ = k.proc.Wait() }()
	}
	return r.s.startForkers(len(all))
}

func (r *resumption) sandbox(st *sandboxState, native int) error {
	sb := newSandbox(r.s, st.Spec)
	sb.ident.Store(&st.ID)
	sb.pid, sb.pidfd = st.PID, r.file(st.Pidfd, "pidfd")
	sb.entered, sb.held, sb.asked, sb.ended, sb.acked, sb.signal, sb.has = st.Entered, st.Held, st.Asked, st.Ended, st.Acked, st.Signal, st.Prepared
	close(sb.prepared)
	if st.Unready != "" {
		sb.unready = errors.New(st.Unready)
	}
	if st.Control != 0 {
		ctl, err := newPackets(r.file(st.Control, "pair"))
		if err != nil {
			return err
		}
		if native == nativeFormat {
			sb.ctl = ctl
		} else {
			_ = ctl.Close() // an old shell understands no plan of ours: it ends
		}
	}
	if sb.ended {
		close(sb.done)
	}
	for _, h := range st.Helpers {
		sb.helpers[&helper{sb: sb, child: &child{pid: h.PID, pidfd: r.file(h.Pidfd, "pidfd")}}] = struct{}{}
	}
	r.s.sandboxes[st.ID] = sb
	for i := range st.Execs {
		if err := r.exec(sb, &st.Execs[i]); err != nil {
			return fmt.Errorf("exec %s: %w", st.Execs[i].Spec.Spec.ID, err)
		}
	}
	return nil
}

func (r *resumption) exec(sb *sandbox, st *execState) error {
	e := newExecution(sb, st.Spec)
	e.pid, e.pidfd, e.begun, e.mark = st.PID, r.file(st.Pidfd, "pidfd"), st.Begun, time.Now().Add(-st.Ran-r.ago)
	e.usage = usage{oom: st.OOM, throttle: st.Throttle}
	e.spooled.Store(st.Spooled)
	e.clock.restore(st.Clock, r.ago)
	e.input, e.cause, e.ended, e.acked, e.res = r.file(st.Input, pipeName), st.Cause, st.Ended, st.Acked, st.Result
	for i := range st.Out {
		p, err := r.pump(e, i, &st.Out[i])
		if err != nil {
			return err
		}
		e.out[i] = p
	}
	close(e.started)
	if e.ended {
		close(e.done)
		close(e.gone)
	} else {
		r.s.running.Add(1)
	}
	sb.execs[e.spec.Spec.ID] = e
	return nil
}

func (r *resumption) pump(e *execution, i int, st *pumpState) (*pump, error) {
	w, err := process.ResumeSpoolWriter(st.Spool, r.file(st.File, "spool"), e.spoolMaker(i))
	if err != nil {
		return nil, err
	}
	pty := e.spec.Spec.PTY != nil
	p := &pump{s: r.s, e: e, r: r.file(st.Pipe, pipeName), w: w, pty: pty, stage: st.Stage, pending: st.Pending, rest: st.Rest, finished: st.Finished,
		hung: pty && e.ended, drained: make(chan struct{}), stop: make(chan struct{})}
	p.seen.Store(st.Seen)
	switch p.stage {
	case pumpDone:
		close(p.drained)
		return p, nil
	case pumpDiscards:
		close(p.drained)
	}
	if p.hung && p.stage == pumpDiscards {
		p.hangUpLocked()
		p.stage = pumpDone
		return p, nil
	}
	r.s.add(p)
	if st.Spool.Header.EOF {
		return p, nil
	}
	for _, at := range st.Spool.Followers {
		if err := p.await(at); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// place is that of a follower whose connection ended with the upgrade.
type place struct {
	at     int64
	cursor *process.Cursor
}

// await keeps what such a follower had not read, for a while. There is room for
// one to come back before it gives its place up.
func (p *pump) await(at int64) error {
	if len(p.places) == process.MaxFollowers-1 {
		return nil
	}
	c, err := p.w.Follow(at)
	if err != nil {
		return err
	}
	p.places = append(p.places, place{at, c})
	time.AfterFunc(followerGrace, func() { _ = c.Close() })
	return nil
}

// back gives a follower that came again its place, so that what it had read
// without saying so counts as read.
func (p *pump) back(offset int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	best := -1
	for i, x := range p.places {
		if x.at <= offset && (best < 0 || x.at > p.places[best].at) {
			best = i
		}
	}
	if best >= 0 {
		c := p.places[best].cursor
		_, _ = c.Ack(offset), c.Close()
		p.places = slices.Delete(p.places, best, best+1)
	}
}
