package hold

import (
	"context"
	"fmt"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// Plain is a process of the node's own, as this client knows it. Close it when it is
// not asked any more; the process goes on.
type Plain struct {
	c    *Client
	done chan struct{} // closed when its end was told

	mu    sync.Mutex
	info  PlainInfo
	pidfd *os.File
	early []Event // that came before the answer
}

// plainEnds are the processes that this client started or found, by name.
type plainEnds struct {
	mu sync.Mutex
	m  map[string]map[*Plain]struct{}
}

func (e *plainEnds) expect(name string, p *Plain) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.m == nil {
		e.m = map[string]map[*Plain]struct{}{}
	}
	if e.m[name] == nil {
		e.m[name] = map[*Plain]struct{}{}
	}
	e.m[name][p] = struct{}{}
}

func (e *plainEnds) drop(name string, p *Plain) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if delete(e.m[name], p); len(e.m[name]) == 0 {
		delete(e.m, name)
	}
}

// ended tells those that wait for the end of a process.
func (e *plainEnds) ended(ev Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for p := range e.m[ev.Plain] {
		p.end(ev)
	}
}

// end takes an event that is of a process of this name, perhaps of an earlier one.
func (p *Plain) end(e Event) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.info.PID == 0: // whether it is ours is not known yet
		p.early = append(p.early, e)
	case p.info.PID == e.PID && !p.info.Ended:
		p.info.Ended, p.info.Code, p.info.Signal = true, e.Code, e.Signal
		close(p.done)
	}
}

// answered takes what the hold says about it.
func (p *Plain) answered(i PlainInfo, pidfd *os.File) {
	p.mu.Lock()
	p.info, p.pidfd = i, pidfd
	if i.Ended {
		close(p.done)
	}
	early := p.early
	p.early = nil
	p.mu.Unlock()
	for _, e := range early {
		p.end(e)
	}
}

// StartPlain starts a process, or finds the one of this name and an equal spec, which
// then has the descriptors that it was started with. Another spec is a Conflict, also
// of one that has ended, until that is acknowledged. output becomes its descriptors 1
// and 2, files those from 3 on; 0 is the null device. They stay the caller's.
func (c *Client) StartPlain(ctx context.Context, s PlainSpec, output *os.File, files ...*os.File) (*Plain, error) {
	if output == nil || len(files) > maxPlainFiles {
		return nil, dsec.Errorf(dsec.Invalid, "start process", dsec.Quote(s.Name), "%d descriptors: its output, and at most %d", len(files), maxPlainFiles)
	}
	return c.plain(ctx, opPlain, s.Name, toWirePlain(s), append([]*os.File{output}, files...), func(frame) {
		// It came too late for whoever asked.
		ctx := context.WithoutCancel(ctx)
		p, err := c.FindPlain(ctx, s.Name)
		if err != nil {
			return
		}
		defer p.Close()
		p.Kill()
		if p.Wait(ctx) == nil {
			_ = p.Ack(ctx)
		}
	})
}

// FindPlain finds one that runs, or whose end is not acknowledged; NotFound.
func (c *Client) FindPlain(ctx context.Context, name string) (*Plain, error) {
	return c.plain(ctx, opFindPlain, name, wireName{name}, nil, nil)
}

func (c *Client) plain(ctx context.Context, o op, name string, body any, files []*os.File, undo func(frame)) (*Plain, error) {
	p := &Plain{c: c, done: make(chan struct{}), info: PlainInfo{Spec: PlainSpec{Name: name}}}
	c.plains.expect(name, p) // before the request, so that no end is missed
	var w wirePlainInfo
	f, ok, err := c.request(ctx, o, body, files, undo)
	var got []*os.File
	if err == nil {
		got, err = finish(f, ok, &w)
	}
	if err == nil && len(got) != 1 && !w.Ended {
		closeAll(got)
		err = dsec.Errorf(dsec.Internal, "read reply of hold", "", "%d descriptors, want 1", len(got))
	}
	if err != nil {
		c.plains.drop(name, p)
		return nil, err
	}
	var pidfd *os.File
	if len(got) == 1 {
		pidfd = got[0]
	}
	p.answered(w.info(), pidfd)
	return p, nil
}

// Plains lists those whose names begin with prefix.
func (c *Client) Plains(ctx context.Context, prefix string) ([]PlainInfo, error) {
	var w []wirePlainInfo
	if err := c.call(ctx, opPlains, wireName{prefix}, nil, &w); err != nil {
		return nil, err
	}
	list := make([]PlainInfo, len(w))
	for i, x := range w {
		list[i] = x.info()
	}
	return list, nil
}

// KillPlain sends SIGKILL; one that has ended is a success, an unknown one NotFound.
func (c *Client) KillPlain(ctx context.Context, name string) error {
	return c.call(ctx, opKillPlain, wireName{name}, nil, nil)
}

// AckPlain says that an end was recorded; the name is free then. Of one that
// runs it does nothing.
func (c *Client) AckPlain(ctx context.Context, name string) error {
	return c.tell(ctx, opAck, wireRef{Type: PlainExited, Exec: name})
}

// Info is what is known of it now.
func (p *Plain) Info() PlainInfo {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.info
}

// Kill sends SIGKILL, also if the hold is not there any more.
func (p *Plain) Kill() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pidfd != nil {
		_ = signalPidfd(p.pidfd, syscall.SIGKILL) // or it has ended
	}
}

// Wait returns nil when the process has ended; Info says how. If the connection to the
// hold is lost it is Unavailable once the process has ended, and nobody knows how.
func (p *Plain) Wait(ctx context.Context) error {
	select {
	case <-p.done:
		return nil
	case <-ctx.Done():
		return dsec.E(dsec.ClassOf(ctx.Err()), "wait for process", p.Info().Spec.Name, ctx.Err())
	case <-p.c.done:
	}
	if err := p.awaitEnd(ctx); err != nil {
		return dsec.E(dsec.ClassOf(err), "wait for process", p.Info().Spec.Name, err)
	}
	select {
	case <-p.done:
		return nil
	default:
	}
	return dsec.E(dsec.Unavailable, "wait for process", p.Info().Spec.Name, fmt.Errorf("how it ended is not known: %w", errHoldGone))
}

// awaitEnd waits for the end of the process without the hold.
func (p *Plain) awaitEnd(ctx context.Context) error {
	p.mu.Lock()
	f := p.pidfd
	p.mu.Unlock()
	if f == nil {
		return nil
	}
	rc, err := f.SyscallConn()
	if err != nil {
		return err
	}
	_ = f.SetReadDeadline(never)
	stop := context.AfterFunc(ctx, func() { _ = f.SetReadDeadline(aLongTimeAgo) })
	defer stop()
	err = rc.Read(func(fd uintptr) bool { // the poller wakes us, and this says for what
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		return n > 0 || err != nil && err != unix.EINTR
	})
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

// Ack is AckPlain of it.
func (p *Plain) Ack(ctx context.Context) error { return p.c.AckPlain(ctx, p.Info().Spec.Name) }

// Close gives back what this client has of it.
func (p *Plain) Close() {
	p.c.plains.drop(p.Info().Spec.Name, p)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pidfd != nil {
		_ = p.pidfd.Close()
		p.pidfd = nil
	}
}
