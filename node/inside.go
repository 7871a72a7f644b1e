package node

import (
	"context"
	"net"
	"sync"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/files"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
)

// reach finds a sandbox whose processes can be reached. A paused one is
// resumed first. One that ended, stopped ones included, is SandboxGone.
func (n *Node) reach(ctx context.Context, what string, id dsec.SandboxID) (*box, error) {
	b := n.find(id)
	if b == nil {
		return nil, n.goneError(what, id)
	}
	if err := b.settled(what); err != nil && b.state().Live() {
		return nil, err
	}
	switch state := b.state(); state {
	case dsec.Running:
		b.touch()
		return b, nil
	case dsec.Paused:
		if err := b.lock(ctx); err != nil {
			return nil, err
		}
		defer b.unlock()
		b.touch()
		if b.state() == dsec.Paused {
			if err := n.resume(ctx, b, nil); err != nil {
				return nil, err
			}
		}
		if b.state() != dsec.Running {
			return nil, b.goneNow(what)
		}
		return b, nil
	case dsec.Pending, dsec.Creating, dsec.Starting:
		return nil, b.illegal(what)
	}
	return nil, b.goneNow(what)
}

// goneNow is the error of a sandbox without processes.
func (b *box) goneNow(what string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.rec.Result != nil {
		return dsec.Errorf(dsec.SandboxGone, what, string(b.id), "it is %s: %s", b.rec.State, b.rec.Result.Cause)
	}
	return dsec.Errorf(dsec.SandboxGone, what, string(b.id), "it is %s", b.rec.State)
}

// explain turns the runtime's error into SandboxGone if the sandbox ended
// during the call.
func (b *box) explain(what string, err error) error {
	if err == nil || dsec.ClassOf(err) == dsec.SandboxGone {
		return err
	}
	switch b.state() {
	case dsec.Running, dsec.Paused, dsec.Starting:
		return err
	}
	switch dsec.ClassOf(err) {
	case dsec.IllegalState, dsec.NotFound, dsec.Internal, dsec.Unavailable:
		return b.goneNow(what)
	}
	return err
}

// Exec implements Inside. On a paused sandbox it resumes it first.
func (n *Node) Exec(ctx context.Context, id dsec.SandboxID, s process.Spec) (process.Process, error) {
	if err := s.Validate(); err != nil {
		return nil, err
	}
	b, err := n.reach(ctx, "exec", id)
	if err != nil {
		return nil, err
	}
	e, ok := b.rt.(runtime.Execer)
	if !ok {
		return nil, b.unsupported("exec")
	}
	if s.Service && b.phase() == nil {
		return nil, dsec.Errorf(dsec.IllegalState, "exec", string(id), "a service is of a sandbox with phases, and it was made without")
	}
	if s.ID == "" {
		s.ID = dsec.Random(16)
	}
	b.use(1)
	defer b.use(-1)
	p, err := e.Exec(ctx, id, s)
	if err != nil {
		b.suspectDamage(err)
		return nil, b.explain("exec", err)
	}
	return b.track(p, false), nil
}

// Process implements Inside. Of a stopped sandbox it finds what its tier kept.
func (n *Node) Process(ctx context.Context, id dsec.SandboxID, exec string) (process.Process, error) {
	b := n.find(id)
	if b == nil {
		return nil, n.goneError("find command", id)
	}
	e, ok := b.rt.(runtime.Execer)
	if !ok {
		return nil, b.unsupported("find command")
	}
	b.touch()
	p, err := e.Process(ctx, id, exec)
	if err != nil {
		return nil, b.explain("find command", err)
	}
	return b.track(p, false), nil
}

// Files implements Inside. It works on the kept disk of a stopped or failed
// sandbox too, where the tier can.
func (n *Node) Files(ctx context.Context, id dsec.SandboxID, user string) (files.FS, error) {
	b := n.find(id)
	if b == nil {
		return nil, n.goneError("open files", id)
	}
	f, ok := b.rt.(runtime.Filer)
	if !ok {
		return nil, b.unsupported("open files")
	}
	b.touch()
	fs, err := f.Files(ctx, id, user)
	if err != nil {
		return nil, b.explain("open files", err)
	}
	w := &seenFS{FS: fs, b: b}
	if _, ok := fs.(files.Watcher); ok {
		return &watchedFS{w}, nil
	}
	return w, nil
}

// Dial implements Inside. The connection is an attached client.
func (n *Node) Dial(ctx context.Context, id dsec.SandboxID, port uint16) (net.Conn, error) {
	b, err := n.reach(ctx, "dial", id)
	if err != nil {
		return nil, err
	}
	d, ok := b.rt.(runtime.Dialer)
	if !ok {
		return nil, b.unsupported("dial")
	}
	c, err := d.Dial(ctx, id, port)
	if err != nil {
		return nil, b.explain("dial", err)
	}
	b.use(1)
	seen := &seenConn{Conn: c, end: sync.OnceFunc(func() { b.use(-1) })}
	if h, ok := c.(halfCloser); ok {
		return &halfConn{seen, h}, nil
	}
	return seen, nil
}

type halfCloser interface{ CloseWrite() error }

// seenConn is an attached client until it is closed.
type seenConn struct {
	net.Conn
	end func()
}

func (c *seenConn) Close() error {
	c.end()
	return c.Conn.Close()
}

type halfConn struct {
	*seenConn
	half halfCloser
}

func (c *halfConn) CloseWrite() error { return c.half.CloseWrite() }

// Stats implements Inside.
func (n *Node) Stats(ctx context.Context, id dsec.SandboxID) (runtime.Stats, error) {
	b := n.find(id)
	if b == nil {
		return runtime.Stats{}, n.goneError("read stats", id)
	}
	s, err := b.rt.Stats(ctx, id)
	return s, b.explain("read stats", err)
}

// Attach implements Inside. It does not mind an id that is gone.
func (n *Node) Attach(id dsec.SandboxID) (release func()) {
	b := n.find(id)
	if b == nil {
		return func() {}
	}
	b.use(1)
	return sync.OnceFunc(func() { b.use(-1) })
}

// use counts attached clients.
func (b *box) use(d int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.attached += d
	b.touchLocked()
}
