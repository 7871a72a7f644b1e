package files

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Serve answers the requests of a Client on the other end of conn until that
// end is closed, the connection breaks or ctx ends; then it cancels what still
// runs, waits for it and returns. With idle > 0 it tells the client to go away
// when that long nothing was asked, and returns when it has. Closing conn is
// Serve's. An end that the client wanted is no error.
func Serve(ctx context.Context, conn io.ReadWriteCloser, fs FS, idle time.Duration) error {
	ctx, cancel := context.WithCancel(ctx)
	s := &server{link: newLink(conn), fs: fs, ctx: ctx, streams: map[uint32]*serving{}, idle: idle}
	stop := context.AfterFunc(ctx, func() { s.link.fail(ctx.Err()) })
	if idle > 0 {
		s.timer = time.AfterFunc(idle, s.goAway)
	}
	err := s.read()
	s.link.fail(io.EOF)
	stop()
	cancel()
	s.calls.Wait()
	s.link.writer.Wait()
	s.stopTimers()
	if errors.Is(err, net.ErrClosed) && !s.left(err) {
		err = s.link.err // writing met the end of the connection first
	}
	if err == io.EOF || errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.EPIPE) || s.left(err) {
		return nil
	}
	return fail("serve files", "", err)
}

type server struct {
	link  *link
	fs    FS
	ctx   context.Context
	idle  time.Duration
	timer *time.Timer // nil without idle
	calls sync.WaitGroup

	mu      sync.Mutex
	streams map[uint32]*serving
	last    uint32 // highest id seen
	away    bool   // requests are no longer begun
	grace   *time.Timer
}

// left reports whether err is that of a connection that was closed here, because
// the client did not go by itself.
func (s *server) left(err error) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.away && errors.Is(err, net.ErrClosed)
}

func (s *server) stopTimers() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range []*time.Timer{s.timer, s.grace} {
		if t != nil {
			t.Stop()
		}
	}
}

// serving is a request being answered.
type serving struct {
	*stream
	cancel context.CancelFunc
}

func (s *server) read() error {
	r := newFrameReader(s.link.conn)
	if err := readHello(r); err != nil {
		return err
	}
	for {
		f, err := r.next()
		if err != nil {
			return err
		}
		if err := s.frame(f); err != nil {
			return err
		}
	}
}

func readHello(r *frameReader) error {
	f, err := r.next()
	if err != nil {
		return err
	}
	if f.kind != frameHello || string(f.payload) != string(wireMagic) {
		return errProtocol
	}
	return nil
}

func (s *server) frame(f frame) error {
	if f.kind == frameRequest {
		return s.request(f)
	}
	s.mu.Lock()
	st, last := s.streams[f.id], s.last
	s.mu.Unlock()
	if st == nil {
		if f.id > last {
			return errProtocol
		}
		return nil // answered meanwhile
	}
	switch {
	case f.kind == frameData:
		return st.push(f.payload)
	case f.kind == frameEnd && len(f.payload) == 1 && f.payload[0] == 0:
		st.finish(io.EOF)
	case f.kind == frameEnd && len(f.payload) == 1:
		st.finish(errGivenUp)
	case f.kind == frameCancel:
		st.cancel()
	case f.kind == frameCredit && len(f.payload) == 4:
		return st.grant(binary.BigEndian.Uint32(f.payload))
	default:
		return errProtocol
	}
	return nil
}

func (s *server) request(f frame) error {
	c, err := decodeCall(f.payload)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if f.id <= s.last || len(s.streams) >= maxStreams {
		return errProtocol
	}
	if s.away {
		return nil // the client knows from the go-away
	}
	s.last = f.id
	ctx, cancel := context.WithCancel(s.ctx)
	if c.limit > 0 {
		ctx, cancel = deadline(ctx, cancel, c.limit)
	}
	st := &serving{stream: newStream(ctx, s.link, f.id), cancel: cancel}
	st.out = window
	s.streams[f.id] = st
	if s.timer != nil {
		s.timer.Stop()
	}
	if c.op.takesBody() {
		st.allow()
	}
	s.calls.Go(func() { s.answer(ctx, st, c) })
	return nil
}

func deadline(ctx context.Context, outer context.CancelFunc, limit time.Duration) (context.Context, context.CancelFunc) {
	ctx, inner := context.WithTimeout(ctx, limit)
	return ctx, func() { inner(); outer() }
}

func (s *server) answer(ctx context.Context, st *serving, c *call) {
	r := run(ctx, s.fs, st.stream, c)
	st.cancel()
	s.mu.Lock()
	delete(s.streams, st.id) // before the client can know that it may ask again
	if len(s.streams) == 0 && s.timer != nil {
		s.timer.Reset(s.idle)
	}
	s.mu.Unlock()
	// The response must come after the data and is owed even to a request that
	// was cancelled, so it waits for the link, not for its context.
	select {
	case s.link.data <- newFrame(frameResponse, st.id, r.encode()):
	case <-s.link.done:
	}
}

// goAway is called by the timer.
func (s *server) goAway() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.streams) > 0 || s.away {
		return
	}
	s.away = true
	s.link.tell(frameGoAway, s.last, nil)
	s.grace = time.AfterFunc(goAwayGrace, func() { s.link.fail(io.EOF) }) // for a client that does not go
}

const goAwayGrace = 5 * time.Second

// run executes a call on fs, its bodies on st.
func run(ctx context.Context, fs FS, st *stream, c *call) (r response) {
	var info Info
	switch c.op {
	case callStat:
		info, r.err = fs.Stat(ctx, c.path, c.flag)
		r.info = &info
	case callList:
		r.err = sendList(ctx, fs, st, c)
	case callRead:
		_, r.err = fs.Read(ctx, c.path, c.offset, c.length, st)
	case callWrite:
		info, r.err = fs.Write(ctx, c.path, st, WriteOptions{Mode: c.mode, UID: c.uid, GID: c.gid, Parents: c.flag, SHA256: c.to, Append: c.append})
		r.info = &info
	case callMkdir:
		mode := uint32(0)
		if c.mode != nil {
			mode = *c.mode
		}
		r.err = fs.Mkdir(ctx, c.path, mode, c.flag)
	case callMove:
		r.err = fs.Move(ctx, c.path, c.to)
	case callRemove:
		r.err = fs.Remove(ctx, c.path, c.flag)
	case callSetAttr:
		r.err = fs.SetAttr(ctx, c.path, Attr{Mode: c.mode, UID: c.uid, GID: c.gid, MTime: c.mtime})
	case callDownload:
		r.err = fs.Download(ctx, c.path, st, TreeOptions{Globs: c.globs, Max: c.length})
	case callUpload:
		r.err = fs.Upload(ctx, c.path, st, TreeOptions{UID: c.uid, GID: c.gid})
	case callWatch:
		r.err = sendWatch(ctx, fs, st, c)
	}
	return r
}

func sendList(ctx context.Context, fs FS, st *stream, c *call) error {
	all, err := fs.List(ctx, c.path, int(min(c.depth, maxDepth)))
	if err != nil {
		return err
	}
	var e encoder
	for i := range all {
		var one encoder
		one.info(&all[i])
		e.str(string(one.b))
		if len(e.b) >= maxPayload/2 || i == len(all)-1 {
			if _, err := st.Write(e.b); err != nil {
				return failPeer(opList, c.path, err)
			}
			e.b = e.b[:0]
		}
	}
	return nil
}

func sendWatch(ctx context.Context, fs FS, st *stream, c *call) error {
	w, ok := fs.(Watcher)
	if !ok {
		return invalid(opWatch, c.path, "cannot be watched here")
	}
	return w.Watch(ctx, c.path, c.flag, func(ch Change) error {
		var e, one encoder
		one.change(ch)
		e.str(string(one.b))
		_, err := st.Write(e.b)
		return err
	})
}
