package client

import (
	"context"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
	"github.com/opendsec/dsec/process"
)

// Running is a command a session waits for.
type Running struct {
	*Process
	s    *Session
	mode Mode
	fn   func(Chunk) error
	done chan struct{} // closed when end or err is final

	// Guarded by the session's mu.
	started  bool
	finished bool
	tries    int
	end      Ended
	err      error
	haveEnd  bool
	got      Offsets // received
	consumed Offsets // and taken by fn
	acked    Offsets
	eof      map[process.Stream]bool
	queue    []Chunk       // received, not taken yet; bounded by the window
	more     chan struct{} // holds one element while queue is not empty
}

// Ended is how a command ended, with its kept output in ModeKept.
type Ended struct {
	process.Result
	KeptStdout, KeptStderr Kept
}

func newRunning(s *Session, p *Process, mode Mode, fn func(Chunk) error) *Running {
	r := &Running{Process: p, s: s, mode: mode, fn: fn, done: make(chan struct{}), eof: map[process.Stream]bool{},
		more: make(chan struct{}, 1)}
	if mode == ModeStream {
		s.wg.Go(r.consume)
	}
	return r
}

// Done is closed when Wait answers at once.
func (r *Running) Done() <-chan struct{} { return r.done }

// Wait returns how the command ended, in ModeStream when fn got all output.
func (r *Running) Wait(ctx context.Context) (Ended, error) {
	select {
	case <-r.done:
		return r.end, r.err
	case <-ctx.Done():
		return Ended{}, dsec.E(dsec.ClassOf(ctx.Err()), "wait for exec", r.ID, ctx.Err())
	}
}

func (r *Running) failLocked(err error) {
	if !r.finished {
		r.err, r.finished = err, true
		close(r.done)
	}
}

// settleLocked finishes r when nothing more is to come.
func (r *Running) settleLocked() {
	if !r.haveEnd || r.finished {
		return
	}
	if r.mode == ModeStream && (!r.eof[process.Stdout] || !r.eof[process.Stderr] || len(r.queue) > 0) {
		return
	}
	r.finished = true
	delete(r.s.execs, wire.ExecKey(string(r.Sandbox), r.ID))
	close(r.done)
}

func (r *Running) subscriptionLocked() *dsecv1.ExecSubscription {
	return &dsecv1.ExecSubscription{Sandbox: string(r.Sandbox), Exec: r.ID, Mode: string(r.mode),
		StdoutOffset: r.got.Stdout, StderrOffset: r.got.Stderr, Window: defaultWindow}
}

func (s *Session) ended(e *dsecv1.ExecEnded) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.execs[wire.ExecKey(e.Sandbox, e.Exec)]
	if r == nil || r.haveEnd {
		return
	}
	r.haveEnd = true
	r.end = Ended{Result: wire.ExecResultFrom(e.Result), KeptStdout: kept(e.Stdout), KeptStderr: kept(e.Stderr)}
	r.settleLocked()
}

// output queues a chunk. What was received before (an older subscription and a
// newer one overlap) is cut off.
func (s *Session) output(o *dsecv1.ExecOutput) {
	c, err := chunkFrom(o.Chunk)
	if err != nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.execs[wire.ExecKey(o.Sandbox, o.Exec)]
	if r == nil || r.eof[c.Stream] {
		return
	}
	at := r.got.Stdout
	if c.Stream == process.Stderr {
		at = r.got.Stderr
	}
	if skip := at - c.Offset; skip > 0 {
		c.Data = c.Data[min(skip, int64(len(c.Data))):]
		c.Offset = at
	}
	if len(c.Data) == 0 && !c.EOF {
		return
	}
	r.tries = 0
	r.got.moved(c)
	r.eof[c.Stream] = c.EOF
	r.queue = append(r.queue, c)
	select {
	case r.more <- struct{}{}:
	default:
	}
}

// consume gives the queue to fn.
func (r *Running) consume() {
	for {
		select {
		case <-r.done:
			return
		case <-r.s.ctx.Done():
			return
		case <-r.more:
		}
		for r.one() {
		}
	}
}

// one takes the first chunk; it stays in the queue until fn is done with it.
func (r *Running) one() bool {
	r.s.mu.Lock()
	if len(r.queue) == 0 || r.finished {
		r.s.mu.Unlock()
		return false
	}
	c := r.queue[0]
	r.s.mu.Unlock()
	var err error
	if r.fn != nil {
		err = r.fn(c)
	}
	r.s.mu.Lock()
	defer r.s.mu.Unlock()
	r.queue = r.queue[1:]
	r.consumed.moved(c)
	if err != nil {
		r.failLocked(err)
		delete(r.s.execs, wire.ExecKey(string(r.Sandbox), r.ID))
		return false
	}
	r.ackLocked()
	r.settleLocked()
	return true
}

// ackLocked asks for an acknowledgement when half a window was consumed.
func (r *Running) ackLocked() {
	const step = defaultWindow / 2
	if r.consumed.Stdout-r.acked.Stdout < step && r.consumed.Stderr-r.acked.Stderr < step {
		return
	}
	r.acked = r.consumed
	r.s.acks[wire.ExecKey(string(r.Sandbox), r.ID)] = &dsecv1.ExecAck{Sandbox: string(r.Sandbox), Exec: r.ID,
		StdoutOffset: r.acked.Stdout, StderrOffset: r.acked.Stderr}
	select {
	case r.s.wake <- struct{}{}:
	default:
	}
}
