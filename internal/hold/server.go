package hold

import (
	"context"
	"encoding/json"
	"log/slog"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/process"
)

// server is the hold itself.
type server struct {
	socket   string
	started  time.Time
	log      *slog.Logger
	forkers  chan *forker // idle ones
	all      []*forker
	turn     atomic.Uint32
	binary   *os.File // our program, and that of file helpers
	digest   func() string
	null     *os.File // stdin of commands that have none
	lock     *os.File // held as long as we live
	image    *os.File // the forker's program
	respawn  chan respawn
	replace  chan replacement
	births   chan *birth
	quit     chan struct{}
	quitOnce sync.Once
	lis      *net.UnixListener

	warmth warmth

	requests  gate // being served
	watchers  gate // that wait for ends, and for clients
	pumping   gate
	quiesced  atomic.Bool
	upgrading sync.Mutex
	accepting vigil

	most    int          // commands that may run
	running atomic.Int64 // commands that do, or are being started

	listening atomic.Int64 // filters that have a listener, at most as many
	unheard   atomic.Int64 // commands whose filter got none
	pace      pace         // of answers to them
	filters   filters
	refused   *refusals

	mu        sync.Mutex
	client    *session
	store     map[string]*os.File
	sandboxes map[string]*sandbox
	lingering map[string]struct{} // directories of cgroups that were not empty
	pumps     map[*pump]struct{}
	plains    map[string]*plain
}

// session is one client's connection.
type session struct {
	s    *server
	w    *wire
	ctx  context.Context
	stop context.CancelFunc

	foreign bool    // it speaks another version: it may only replace us
	pending []Event // ends from before this client
}

// emit reports an end before it is seen in any reply. If nobody is there it is
// found in the state later. It waits while the client takes nothing.
func (s *server) emit(e wireEvent) {
	s.mu.Lock()
	c := s.client
	s.mu.Unlock()
	if c != nil && !c.foreign {
		_ = c.sendEvent(e) // the next client finds it, too
	}
}

func (c *session) sendEvent(e wireEvent) error {
	b, err := json.Marshal(e)
	if err != nil {
		return err
	}
	return c.w.send(frame{op: opEvent, body: b})
}

// sendPending reports what ended before this client came.
func (c *session) sendPending() {
	for _, e := range c.pending {
		if c.sendEvent(wireEvent{Event: e}) != nil {
			return
		}
	}
}

// reply answers f and closes files.
func (c *session) reply(f frame, body any, files []*os.File, err error) {
	out := frame{op: f.op, id: f.id, files: files}
	if err != nil {
		out.flags, out.body, out.files = flagError, encodeError(err), nil
	} else if body != nil {
		out.body, err = json.Marshal(body)
		if err != nil {
			out.flags, out.body = flagError, encodeError(err)
		}
	}
	if err := c.w.send(out); err != nil && c.ctx.Err() == nil {
		c.s.log.Warn("reply", "op", f.op, "error", err)
		_ = c.w.c.Close() // a client that waits for ever is worse than one that comes back
	}
	closeAll(files)
}

// told serves a request that is not answered, before the next one is read.
func (c *session) told(f *frame) {
	defer f.close()
	r, err := read[wireRef](f)
	if err != nil {
		c.s.log.Warn("client told", "op", f.op, "error", err)
		return
	}
	if f.op == opAck && r.Type == PlainExited {
		c.s.ackPlain(r.Exec)
		return
	}
	sb, err := c.s.sandbox(r.Sandbox)
	if err != nil {
		return // removed, with all there was to forget
	}
	switch f.op {
	case opAck:
		sb.ack(r)
	case opRelease:
		if err := sb.release(r.Exec); err != nil {
			c.s.log.Warn("client told", "op", f.op, "error", err)
		}
	default:
		c.s.log.Warn("client told what needs an answer", "op", f.op)
	}
}

func (c *session) handle(f frame) {
	body, files, err := c.dispatch(&f)
	f.close()
	c.reply(f, body, files, err)
}

// read decodes the body of a request.
func read[T any](f *frame) (T, error) {
	var v T
	if err := json.Unmarshal(f.body, &v); err != nil {
		return v, dsec.E(dsec.Invalid, "read request", "", err)
	}
	return v, nil
}

// take gives the i-th descriptor of a request to the caller.
func (f *frame) take(i int) (*os.File, error) {
	if i >= len(f.files) || f.files[i] == nil {
		return nil, dsec.Errorf(dsec.Invalid, "read request", "", "descriptor %d is missing", i)
	}
	return f.files[i], nil
}

// keep takes all descriptors of a request from its frame.
func (f *frame) keep() { f.files = nil }

func (c *session) dispatch(f *frame) (any, []*os.File, error) {
	if f.op == 0 || f.op >= opEnd {
		return nil, nil, errUnknown(f.op)
	}
	switch f.op {
	case opPut, opGet, opDrop, opNames:
		return c.s.storeOp(c.ctx, f)
	case opSpawn:
		w, err := read[wireSpawn](f)
		if err != nil {
			return nil, nil, err
		}
		return c.s.spawn(c.ctx, w, f)
	case opEnter:
		w, err := read[wireEnter](f)
		if err != nil {
			return nil, nil, err
		}
		return nil, nil, c.s.enter(w, f)
	case opExec:
		w, err := decodeExec(f.body)
		if err != nil {
			return nil, nil, dsec.E(dsec.Invalid, "read request", "", err)
		}
		e, err := c.s.exec(w)
		if err != nil {
			return nil, nil, err
		}
		return e.begunInfo(), nil, nil
	case opFiles:
		w, err := read[FilesSpec](f)
		if err != nil {
			return nil, nil, err
		}
		sock, err := c.s.startFiles(w)
		return nil, []*os.File{sock}, err
	case opCells:
		w, err := read[CellsSpec](f)
		if err != nil {
			return nil, nil, err
		}
		sock, err := c.s.startCells(w)
		return nil, []*os.File{sock}, err
	case opPlain:
		w, err := read[wirePlain](f)
		if err != nil {
			return nil, nil, err
		}
		return c.s.startPlain(c.ctx, w, f)
	case opFindPlain, opPlains, opKillPlain:
		return c.s.plainOp(f)
	case opList:
		return c.s.list(), nil, nil
	case opRefusals:
		w, err := read[wireRefusals](f)
		if err != nil {
			return nil, nil, err
		}
		return c.s.refused.take(w.Written), nil, nil
	case opShutdown:
		c.s.shutdown(c.ctx)
		return nil, nil, nil
	}
	r, err := read[wireRef](f)
	if err != nil {
		return nil, nil, err
	}
	sb, err := c.s.sandbox(r.Sandbox)
	if err != nil {
		if (f.op == opKillSandbox || f.op == opRemove || f.op == opRelease) && dsec.ClassOf(err) == dsec.NotFound {
			return nil, nil, nil
		}
		return nil, nil, err
	}
	if body, files, err, ok := c.sandboxOp(f.op, sb, r); ok {
		return body, files, err
	}
	return c.execOp(f.op, sb, r)
}

func (c *session) sandboxOp(o op, sb *sandbox, r wireRef) (body any, files []*os.File, err error, ok bool) {
	switch o {
	case opClock:
		sb.hold(r.Held)
	case opSignalInit:
		err = sb.signalInit(r.Signal)
	case opKillSandbox:
		err = sb.kill(c.ctx)
	case opRemove:
		err = c.s.remove(c.ctx, sb)
	case opOpenIn:
		var f *os.File
		f, err = sb.openIn(string(r.Path))
		files = []*os.File{f}
	case opNamespaces:
		files, err = sb.namespaces()
		body = wireShell{PID: sb.pid}
	default:
		return nil, nil, nil, false
	}
	if err != nil {
		closeAll(files)
		return nil, nil, err, true
	}
	return body, files, nil, true
}

func (c *session) execOp(o op, sb *sandbox, r wireRef) (any, []*os.File, error) {
	if o == opRelease {
		return nil, nil, sb.release(r.Exec)
	}
	e, err := sb.find(r.Exec)
	if err != nil {
		return nil, nil, err
	}
	switch o {
	case opFind:
		return e.info(), nil, nil
	case opSignal:
		return nil, nil, e.signal(r.Signal)
	case opKill:
		e.end(process.Killed)
		return nil, nil, nil
	case opStdin:
		f, err := e.stdinFile()
		return nil, []*os.File{f}, err
	case opCloseStdin:
		return nil, nil, e.closeStdin()
	case opResize:
		return nil, nil, e.resize(r.Size)
	case opSpool:
		f, err := e.spoolFile(r.Stream)
		return nil, []*os.File{f}, err
	case opFollow:
		f, err := e.follow(r.Stream, r.Offset)
		return nil, []*os.File{f}, err
	}
	return nil, nil, errUnknown(o)
}

func errUnknown(o op) error {
	return dsec.Errorf(dsec.Unsupported, "serve request", "", "operation %d is unknown to this hold", o)
}
