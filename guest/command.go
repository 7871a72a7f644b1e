package guest

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"slices"
	"sync"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/process"
)

const maxExecs = 64 << 10 // commands that a guest may list

// command is a process.Process in a guest.
type command struct {
	c    *Client
	spec process.Spec
}

// Exec starts a command, or finds the one that was started with the same id.
func (c *Client) Exec(ctx context.Context, e Exec) (process.Process, error) {
	spec := e.Command.Process()
	if err := spec.Validate(); err != nil {
		return nil, err
	}
	if _, err := c.call(ctx, Request{Op: OpExec, Exec: &e}); err != nil {
		return nil, err
	}
	return &command{c, spec}, nil
}

// Process finds a command that runs or waits for Release.
func (c *Client) Process(ctx context.Context, id string) (process.Process, error) {
	a, err := c.call(ctx, Request{Op: OpFind, ID: id})
	if err != nil {
		return nil, err
	}
	if a.Spec == nil {
		return nil, broken(Request{Op: OpFind, ID: id}, errProtocol)
	}
	spec := a.Spec.Process()
	if err := spec.Validate(); err != nil || spec.ID != id {
		return nil, broken(Request{Op: OpFind, ID: id}, errProtocol)
	}
	return &command{c, spec}, nil
}

// List is the ids of commands that run or wait for Release.
func (c *Client) List(ctx context.Context) ([]string, error) {
	a, err := c.call(ctx, Request{Op: OpList})
	if err != nil {
		return nil, err
	}
	if len(a.Execs) > maxExecs {
		return nil, broken(Request{Op: OpList}, errTooMuch)
	}
	for i, id := range a.Execs {
		a.Execs[i] = plain(id)
	}
	slices.Sort(a.Execs)
	return a.Execs, nil
}

func (p *command) Spec() process.Spec { return p.spec }

func (p *command) do(ctx context.Context, q Request) error {
	q.ID = p.spec.ID
	_, err := p.c.call(ctx, q)
	return err
}

// Write feeds stdin. When its context ends it asks how much was written, which
// the guest answers at once or not at all.
func (p *command) Write(ctx context.Context, b []byte) (int, error) {
	if len(b) == 0 {
		return 0, nil
	}
	q := Request{Op: OpStdin, ID: p.spec.ID, Length: int64(len(b))}
	s, err := p.c.open(ctx, talkWindow, q)
	if err != nil {
		return 0, broken(q, err)
	}
	defer s.abandon()
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		_, _ = s.WriteContext(ctx, b) // the answer tells
	}()
	stop := context.AfterFunc(ctx, func() {
		<-sent
		_ = s.CloseWrite() // what breaks it breaks the answer, too
	})
	defer stop()
	late, cancel := afterwards(ctx)
	defer cancel()
	a, err := p.c.answer(late, s)
	n := int(min(max(a.N, 0), int64(len(b))))
	switch _, answered := errors.AsType[*dsec.Error](err); {
	case err == nil && n == len(b):
		return n, nil
	case err == nil:
		err = orContext(ctx, io.ErrShortWrite)
	case !answered:
		err = orContext(ctx, err)
	}
	return n, broken(q, err)
}

func (p *command) CloseStdin(ctx context.Context) error { return p.do(ctx, Request{Op: OpClose}) }

func (p *command) Resize(ctx context.Context, s process.Size) error {
	return p.do(ctx, Request{Op: OpResize, Size: s})
}

func (p *command) Signal(ctx context.Context, sig int) error {
	return p.do(ctx, Request{Op: OpSignal, Signal: sig})
}

func (p *command) Kill(ctx context.Context) error { return p.do(ctx, Request{Op: OpKill}) }

func (p *command) Release(ctx context.Context) error { return p.do(ctx, Request{Op: OpRelease}) }

func (p *command) Wait(ctx context.Context) (process.Result, error) {
	q := Request{Op: OpWait, ID: p.spec.ID}
	a, err := p.c.call(ctx, q)
	if err != nil {
		return process.Result{}, err
	}
	if a.Result == nil || !sound(a.Result) {
		return process.Result{}, broken(q, errProtocol)
	}
	a.Result.Blame = "" // the node's word, not the guest's
	return *a.Result, nil
}

// sound reports whether a result is one that a command can have.
func sound(r *process.Result) bool {
	known := []process.Status{process.Exited, process.TimedOut, process.Killed, process.OutputLimit}
	for _, o := range []process.OutputSummary{r.Stdout, r.Stderr} {
		if o.Total < 0 || o.Dropped < 0 || o.Dropped > o.Total {
			return false
		}
	}
	return slices.Contains(known, r.Status) && r.ExitCode >= 0 && r.ExitCode <= 255 && r.Signal >= 0 && r.Signal <= 64 &&
		r.Wall >= 0 && r.CPU >= 0 && r.Throttle >= 0 && r.Held >= 0 && r.OOMLimit >= 0 && r.OOMPeak >= 0
}

func (p *command) Kept(ctx context.Context, s process.Stream) (head, tail []byte, tailOffset int64, err error) {
	q := Request{Op: OpKept, ID: p.spec.ID, Stream: s}
	st, a, err := p.c.begin(ctx, bulkWindow, q)
	if err != nil {
		return nil, nil, 0, err
	}
	defer st.abandon()
	switch {
	case a.Head < 0 || a.Tail < 0 || a.TailOffset < a.Head || a.TailOffset < 0:
		return nil, nil, 0, broken(q, errProtocol)
	case a.Head > keep(p.spec.Head) || a.Tail > keep(p.spec.Tail) || a.Head+a.Tail > p.c.most:
		return nil, nil, 0, dsec.Errorf(dsec.ResourceExhausted, "read output of exec", p.spec.ID, "%d bytes, at most %d", a.Head+a.Tail, p.c.most)
	}
	stop := context.AfterFunc(ctx, st.abandon)
	defer stop()
	if head, err = readN(st, a.Head); err == nil {
		tail, err = readN(st, a.Tail)
	}
	if err != nil {
		return nil, nil, 0, broken(q, orContext(ctx, err))
	}
	return head, tail, a.TailOffset, nil
}

func keep(n int64) int64 {
	if n == 0 {
		return process.DefaultKeep
	}
	return n
}

const (
	chunkHeader = 16
	maxChunk    = 64 << 10
	chunkEOF    = 1
)

// Follow reads a stream from an offset.
func (p *command) Follow(ctx context.Context, s process.Stream, offset int64) (process.Reader, error) {
	q := Request{Op: OpFollow, ID: p.spec.ID, Stream: s, Offset: offset}
	st, _, err := p.c.begin(ctx, bulkWindow, q)
	if err != nil {
		return nil, err
	}
	return &follower{s: st, q: q, pos: offset, acked: offset}, nil
}

// follower is a Reader of chunks that a guest sends.
type follower struct {
	s *Stream
	q Request

	mu    sync.Mutex // one Next at a time
	pos   int64
	acked int64
	buf   []byte // of the chunk on its way, header included
	got   int    // bytes of it that came
	done  bool
}

// Next says first what was read, since the last chunk is given up with it.
func (f *follower) Next(ctx context.Context) (process.Chunk, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.done {
		return process.Chunk{Offset: f.pos, EOF: true}, nil
	}
	c, err := f.nextLocked(ctx)
	if err != nil {
		return process.Chunk{}, broken(f.q, err)
	}
	return c, nil
}

func (f *follower) nextLocked(ctx context.Context) (process.Chunk, error) {
	if f.pos > f.acked {
		if _, err := f.s.WriteContext(ctx, binary.LittleEndian.AppendUint64(nil, uint64(f.pos))); err != nil {
			return process.Chunk{}, err
		}
		f.acked = f.pos
	}
	if f.buf == nil {
		f.buf = make([]byte, chunkHeader+maxChunk)
	}
	if err := f.fillLocked(ctx, chunkHeader); err != nil {
		return process.Chunk{}, err
	}
	n := int(binary.LittleEndian.Uint32(f.buf[12:]))
	if n > maxChunk {
		return process.Chunk{}, errProtocol
	}
	if err := f.fillLocked(ctx, chunkHeader+n); err != nil {
		return process.Chunk{}, err
	}
	f.got = 0
	c := process.Chunk{Offset: int64(binary.LittleEndian.Uint64(f.buf)), Data: f.buf[chunkHeader : chunkHeader+n],
		EOF: binary.LittleEndian.Uint32(f.buf[8:])&chunkEOF != 0}
	end := c.Offset + int64(n)
	if c.Offset < f.pos || end < c.Offset || n == 0 && !c.EOF {
		return process.Chunk{}, errProtocol
	}
	f.pos, f.done = end, c.EOF
	return c, nil
}

// fillLocked goes on where a call before it, whose context ended, was.
func (f *follower) fillLocked(ctx context.Context, n int) error {
	for f.got < n {
		got, err := f.s.ReadContext(ctx, f.buf[f.got:n])
		f.got += got
		if err == io.EOF {
			err = errors.New("the output ended early")
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (f *follower) Close() error { return f.s.Close() }
