package loader

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"maps"
	"net"
	"os"
	"sync"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/layer/ondemand"
	"github.com/opendsec/dsec/layer/ondemand/fuse"
)

// Options of a Server; zero values are the defaults.
type Options struct {
	Blobs blob.Store
	// BlobStats is what Blobs counts, as JSON has it, for who asks for counts; nil:
	// nothing.
	BlobStats func() any
	Lanes     int           // requests at one time; default 32
	Deadline  time.Duration // after which a read that cannot be served is an error; default 30 s
	Window    time.Duration // how long the trace of a layer is written; default 2 min
	// NoteWithin is how long a reader waits for the agent to note that its read
	// failed; default 10 s.
	NoteWithin time.Duration
	Log        *slog.Logger
}

// Server is the loader.
type Server struct {
	opts  Options
	lanes *ondemand.Lanes
	room  *ondemand.Room

	ctx  context.Context
	stop context.CancelCauseFunc
	work sync.WaitGroup

	mu      sync.Mutex
	agent   *conn
	layers  map[layer.Digest]*served
	failing map[failing]*troubles
	files   map[fileID]*served // of layers whose reads come as events
	ready   chan struct{}      // closed when an agent has handed over all it has
	isReady bool
	groups  int // being answered
}

// fileID is what an event says of the file.
type fileID struct{ dev, ino uint64 }

// served is a layer and what reads it.
type served struct {
	digest   layer.Digest
	data     data
	l        *ondemand.Layer      // data, unless the layer was whole when it came
	sessions map[string]bool      // true: by events, which does not end by itself
	ended    map[string]time.Time // sessions that did, until the layer is let go
	syncing  sync.Mutex           // of sync
	landed   int64                // bytes that were on the disk when it was last synced; or unsynced
	synced   time.Time            // all that had landed then was on the disk
	said     time.Time            // when the last failed read was logged
}

// NewServer serves nothing yet.
func NewServer(o Options) *Server {
	if o.Log == nil {
		o.Log = slog.Default()
	}
	if o.Window == 0 {
		o.Window = 2 * time.Minute
	}
	if o.NoteWithin == 0 {
		o.NoteWithin = noteWithin
	}
	s := &Server{opts: o, lanes: ondemand.NewLanes(o.Lanes), layers: map[layer.Digest]*served{}, failing: map[failing]*troubles{}, files: map[fileID]*served{}, ready: make(chan struct{})}
	s.room = ondemand.NewRoom(func(diskFull bool) { go s.tell(frame{Op: opShort, Full: diskFull}) })
	s.ctx, s.stop = context.WithCancelCause(context.Background())
	return s
}

// Run accepts agents, one after the other, until the listener is closed. What
// is served is served on without one. Then it ends without an answer to reads
// that wait: who runs next finds them. With an agent of another version it ends,
// too, with an error: its supervisor starts another.
func (s *Server) Run(l *net.UnixListener) error {
	s.work.Go(s.watch)
	defer func() {
		s.stop(nil)
		s.work.Wait()
	}()
	stop := context.AfterFunc(s.ctx, func() { _ = l.SetDeadline(time.Unix(1, 0)) }) // others have the listener too
	defer stop()
	for {
		c, err := l.AcceptUnix()
		if s.ctx.Err() != nil && err != nil {
			return context.Cause(s.ctx)
		}
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			return dsec.E(dsec.Internal, "accept agent", l.Addr().String(), err)
		}
		s.adopt(&conn{c: c})
	}
}

// adopt talks to an agent, instead of the one before it.
func (s *Server) adopt(c *conn) {
	s.mu.Lock()
	if s.agent != nil {
		_ = s.agent.c.Close()
	}
	s.agent = c
	s.mu.Unlock()
	s.work.Go(func() {
		defer s.leave(c)
		stop := context.AfterFunc(s.ctx, func() { _ = c.c.Close() })
		defer stop()
		buf := make([]byte, maxFrame)
		for {
			f, err := c.recv(buf)
			if err != nil {
				switch {
				case s.ctx.Err() != nil || errors.Is(err, net.ErrClosed):
				case errors.Is(err, io.EOF): // it ended, or is started anew
					s.opts.Log.Info("the agent hung up")
				default:
					s.opts.Log.Warn("connection to the agent", "err", err)
				}
				if errors.Is(err, errVersion) {
					err = dsec.E(dsec.Unsupported, "serve agent", "", err)
					_ = c.send(frame{Op: opHello, Error: troubleOf(err)}) // for its log
					s.stop(err)
				}
				return
			}
			s.handle(c, f)
		}
	})
}

// leave lets go of an agent.
func (s *Server) leave(c *conn) {
	_ = c.c.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.agent == c {
		s.agent = nil
	}
}

// handle answers a request. Only fetches take time.
func (s *Server) handle(c *conn, f frame) {
	answer := frame{ID: f.ID, Op: f.Op}
	switch f.Op {
	case opHello:
		answer.Events = s.answering()
		answer.give(s.sessions())
	case opServe:
		answer.Error = troubleOf(s.serve(&f))
	case opEvents:
		answer.Error = troubleOf(s.events(&f))
	case opReady:
		s.mu.Lock()
		if !s.isReady {
			s.isReady = true
			close(s.ready)
		}
		s.mu.Unlock()
		s.tellAgain()
	case opNoted:
		s.noted(&f)
	case opRoom:
		s.room.SetLeft(f.Left)
	case opCounts:
		answer.Error = troubleOf(s.counts(&answer))
	case opStatus:
		answer.give(s.status())
	case opFetch:
		s.work.Go(func() {
			answer.Error = troubleOf(s.fetch(&f))
			f.close()
			_ = c.answer(answer)
		})
		return
	case opTrace:
		if l, err := s.find("read trace", f.Digest); err != nil {
			answer.Error = troubleOf(err)
		} else {
			answer.give(l.Trace())
		}
	case opLet:
		answer.Error = troubleOf(s.let(&f))
	default:
		answer.Error = troubleOf(dsec.Errorf(dsec.Unsupported, "ask the loader", string(f.Op), "it does not know that"))
	}
	f.close()
	_ = c.answer(answer) // an agent that is gone asks again
	answer.close()
}

// tell tells the agent, if there is one; the next one asks.
func (s *Server) tell(f frame) {
	s.mu.Lock()
	c := s.agent
	s.mu.Unlock()
	if c != nil {
		_ = c.send(f)
	}
}

func (s *Server) sessions() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var names []string
	for _, x := range s.layers {
		for name := range x.sessions {
			names = append(names, name)
		}
	}
	return names
}

// Descriptors of a serve, in order; one whose reads come as events has the
// first three.
const (
	fileData = iota
	filePresent
	fileIndex
	fileDev
	fileJournal
	filesOfServe

	filesOfWhole  = 3 // data, dev, journal
	filesOfEvents = 3 // data, present, index; of a layer that has become whole, only the first
)

// serve begins a session.
func (s *Server) serve(f *frame) error {
	byEvents := len(f.files) == filesOfEvents && !f.Whole || len(f.files) == 1 && f.Whole
	if f.Whole && len(f.files) == filesOfWhole { // the others are not there
		f.files = append([]*os.File{f.files[0], nil, nil}, f.files[1:]...)
	}
	if len(f.files) != filesOfServe && !byEvents || f.Session == "" || f.Digest == "" {
		return dsec.Errorf(dsec.Invalid, "serve layer", string(f.Digest), "%d descriptors", len(f.files))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	x := s.layers[f.Digest]
	if x == nil {
		id, err := idOf(f.files[fileData])
		if err != nil {
			return dsec.E(dsec.Internal, "serve layer", string(f.Digest), err)
		}
		if x, err = s.newServed(f); err != nil {
			return err
		}
		s.layers[f.Digest], s.files[id] = x, x
	}
	if _, ok := x.sessions[f.Session]; ok {
		return nil
	}
	if x.sessions[f.Session] = byEvents; byEvents {
		if x.l != nil {
			x.l.KeepAll()
		}
		return nil
	}
	dev, journal := f.files[fileDev], f.files[fileJournal]
	f.files[fileDev], f.files[fileJournal] = nil, nil
	name, digest := f.Session, f.Digest
	s.work.Go(func() {
		err := fuse.Serve(s.ctx, dev, journal, s.reader(x, name))
		_ = dev.Close()
		_ = journal.Close()
		if s.ctx.Err() != nil {
			return
		}
		if err != nil {
			s.opts.Log.Error("serve layer", "layer", digest, "err", err)
		}
		s.mu.Lock()
		delete(x.sessions, name)
		at, again := x.ended[name]
		if !again {
			at = time.Now()
			x.ended[name] = at
		}
		s.mu.Unlock()
		s.tell(frame{Op: opEnded, Session: name, Digest: digest, At: at})
	})
	return nil
}

// newServed is a layer without a session; the descriptors it takes are nil then.
func (s *Server) newServed(f *frame) (*served, error) {
	x := &served{digest: f.Digest, sessions: map[string]bool{}, ended: map[string]time.Time{}}
	if f.Whole {
		x.data, f.files[fileData] = whole{f.files[fileData], f.Size}, nil
		return x, nil
	}
	l, err := s.open(f)
	if err != nil {
		return nil, err
	}
	// A loader before this one may have ended without a sync.
	x.l, x.data, x.landed, x.synced = l, l, unsynced, time.Now().Add(-syncEvery)
	s.work.Go(func() { s.awaitWhole(x) })
	return x, nil
}

// open makes the engine of a layer; the descriptors it takes are nil then.
func (s *Server) open(f *frame) (*ondemand.Layer, error) {
	ix, err := readIndex(f.files[fileIndex], f.Table)
	if err != nil {
		return nil, dsec.E(dsec.Corrupt, "read chunk index", string(f.Digest), err)
	}
	present, err := layer.OpenPresence(f.files[filePresent], len(ix.Chunks))
	f.files[filePresent] = nil
	if err != nil {
		return nil, err
	}
	data := f.files[fileData]
	f.files[fileData] = nil
	l, err := ondemand.Open(ondemand.Parts{Digest: f.Digest, Index: ix, Data: data, Present: present},
		ondemand.Options{Blobs: s.opts.Blobs, Lanes: s.lanes, Deadline: s.opts.Deadline, Window: s.opts.Window, Room: s.room})
	if err != nil {
		return nil, errors.Join(err, present.Close(), data.Close())
	}
	return l, nil
}

func readIndex(f *os.File, table layer.Digest) (layer.Index, error) {
	b, err := readWhole(f, layer.MaxIndex)
	if err != nil {
		return layer.Index{}, err
	}
	return layer.DecodeIndexOf(b, table)
}

func (s *Server) find(op string, d layer.Digest) (*ondemand.Layer, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if x := s.layers[d]; x != nil && x.l != nil {
		return x.l, nil
	}
	return nil, dsec.Errorf(dsec.NotFound, op, string(d), "it is not served")
}

func (s *Server) fetch(f *frame) error {
	l, err := s.find("fetch layer", f.Digest)
	if err != nil {
		return err
	}
	if len(f.files) == 0 {
		return l.Fill(s.ctx)
	}
	ranges, err := readList[layer.Range](f.files[0])
	if err != nil {
		return dsec.E(dsec.Invalid, "fetch layer", string(f.Digest), err)
	}
	return l.Prefetch(s.ctx, ranges)
}

// let closes a layer that nobody reads any more. Sessions by events end here, the
// one that is named or all.
func (s *Server) let(f *frame) error {
	d := f.Digest
	s.mu.Lock()
	x := s.layers[d]
	if x == nil {
		s.mu.Unlock()
		return nil
	}
	maps.DeleteFunc(x.sessions, func(name string, events bool) bool { return events && (f.Events || name == f.Session) })
	if len(x.sessions) > 0 {
		s.mu.Unlock()
		return dsec.Errorf(dsec.IllegalState, "let go of layer", string(d), "it is being read")
	}
	delete(s.layers, d)
	for id, y := range s.files {
		if y == x {
			delete(s.files, id)
		}
	}
	s.mu.Unlock()
	s.sync(x) // if it fails, what was not on the disk is fetched again
	return x.data.Close()
}
