package hold

import (
	"bytes"
	"cmp"
	"maps"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// monotonic is a clock that goes on from one program to the next.
func monotonic() time.Duration {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) // cannot go wrong
	return time.Duration(ts.Nano())
}

// baggage are the descriptors that go along to the next program.
type baggage []int

// keep returns the number of f, 0 if it is nil or closed.
func (k *baggage) keep(f *os.File) int {
	if f == nil {
		return 0
	}
	fd := fdOf(f)
	if fd < 0 {
		return 0
	}
	*k = append(*k, fd)
	return fd
}

// state tells all that is, of a hold that is quiesced. The listener comes apart, for it
// is no file.
func (s *server) state(k *baggage, binary *os.File) *holdState {
	st := &holdState{Format: stateFormat, Native: nativeFormat, At: monotonic(), Started: s.started, Socket: s.socket,
		Binary: k.keep(binary), Lock: k.keep(s.lock), Store: map[string]int{}}
	for _, f := range s.all {
		f.mu.Lock()
		st.Forkers = append(st.Forkers, forkerState{PID: f.proc.Pid, Socket: k.keep(f.c.f)})
		f.mu.Unlock()
	}
	orphans := map[*pump]bool{}
	for _, p := range s.allPumps() {
		orphans[p] = true
	}
	var filters filterList
	for _, sb := range s.living() {
		st.Sandboxes = append(st.Sandboxes, sb.state(k, orphans, &filters))
	}
	st.Filters = filters
	st.Batch, st.Refusals = s.refused.state()
	slices.SortFunc(st.Sandboxes, func(a, b sandboxState) int { return cmp.Compare(a.ID, b.ID) })
	for _, p := range s.startedPlains() {
		i := p.info()
		st.Plains = append(st.Plains, plainState{Spec: p.spec, PID: p.pid, Pidfd: k.keep(p.pidfd), Begun: p.begun, Ended: i.Ended, Code: i.Code, Signal: i.Signal})
	}
	for p := range orphans {
		if p.pty {
			continue // closing it is all that is left to do
		}
		if fd := k.keep(p.r); fd != 0 {
			st.Discards = append(st.Discards, fd)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for n, f := range s.store {
		st.Store[n] = k.keep(f)
	}
	st.Lingering = slices.Sorted(maps.Keys(s.lingering))
	return st
}

// filterList numbers the filters that listeners have.
type filterList [][]byte

func (x *filterList) number(f []byte) int {
	i := slices.IndexFunc(*x, func(g []byte) bool { return bytes.Equal(f, g) })
	if i < 0 {
		i = len(*x)
		*x = append(*x, f)
	}
	return i
}

func (sb *sandbox) state(k *baggage, orphans map[*pump]bool, filters *filterList) sandboxState {
	sb.mu.Lock()
	defer sb.mu.Unlock()
	st := sandboxState{ID: sb.name(), Spec: sb.spec, PID: sb.pid, Pidfd: k.keep(sb.pidfd), Entered: sb.entered, Held: sb.held, Asked: sb.asked,
		Ended: sb.ended, Acked: sb.acked, Signal: sb.signal, Prepared: sb.has}
	if sb.ctl != nil {
		st.Control = k.keep(sb.ctl.f)
	}
	if sb.unready != nil {
		st.Unready = sb.unready.Error()
	}
	for h := range sb.helpers {
		st.Helpers = append(st.Helpers, childState{PID: h.child.pid, Pidfd: k.keep(h.child.pidfd)})
	}
	for l := range sb.listeners {
		st.Listeners = append(st.Listeners, listenerState{Exec: l.exec, File: k.keep(l.f), Filter: filters.number(l.filter)})
	}
	slices.SortFunc(st.Listeners, func(a, b listenerState) int { return cmp.Compare(a.File, b.File) })
	for _, e := range sb.execs {
		st.Execs = append(st.Execs, e.state(k, orphans))
	}
	slices.SortFunc(st.Execs, func(a, b execState) int { return cmp.Compare(a.Spec.Spec.ID, b.Spec.Spec.ID) })
	return st
}

func (e *execution) state(k *baggage, orphans map[*pump]bool) execState {
	e.mu.Lock()
	defer e.mu.Unlock()
	st := execState{Spec: e.spec, PID: e.pid, Begun: e.begun, Ran: time.Since(e.mark), Clock: e.clock.state(), OOM: e.usage.oom,
		Throttle: e.usage.throttle, Spooled: e.spooled.Load(), Input: k.keep(e.input), Cause: e.cause, Ended: e.ended, Acked: e.acked, Result: e.res}
	if !e.ended {
		st.Pidfd = k.keep(e.pidfd)
	}
	for _, p := range e.out {
		if p != nil {
			delete(orphans, p)
			st.Out = append(st.Out, p.state(k))
		}
	}
	return st
}

func (p *pump) state(k *baggage) pumpState {
	spool, file := p.w.State()
	return pumpState{Stage: p.stage, Pipe: k.keep(p.r), Finished: p.finished, Seen: p.seen.Load(), Rest: p.rest, Pending: p.pending,
		Spool: spool, File: k.keep(file)}
}
