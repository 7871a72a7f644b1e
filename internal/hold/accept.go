package hold

import (
	"context"
	"errors"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/version"
)

// listen begins to accept clients, also after it was quiesced.
func (s *server) listen() {
	s.accepting.mu.Lock()
	defer s.accepting.mu.Unlock()
	_ = s.lis.SetDeadline(never)
	if !s.accepting.on {
		s.accepting.on = true
		s.watchers.enter()
		go s.accept()
	}
}

// stopAccepting is true if no client came because the hold is being quiesced.
func (s *server) stopAccepting() bool {
	s.accepting.mu.Lock()
	defer s.accepting.mu.Unlock()
	s.accepting.on = !s.quiesced.Load()
	return !s.accepting.on
}

// accept serves clients until the listener is closed.
func (s *server) accept() {
	defer s.watchers.leave()
	for {
		c, err := s.lis.AcceptUnix()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case errors.Is(err, os.ErrDeadlineExceeded):
			if s.stopAccepting() {
				return
			}
			continue
		case err != nil:
			s.log.Error("accept", "error", err)
			time.Sleep(10 * time.Millisecond) // out of descriptors: ends of commands free some
			continue
		}
		go s.serve(c)
	}
}

func peerUID(c *net.UnixConn) (uint32, int32, error) {
	rc, err := c.SyscallConn()
	if err != nil {
		return 0, 0, err
	}
	var cred *unix.Ucred
	var cerr error
	if err := rc.Control(func(fd uintptr) {
		cred, cerr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return 0, 0, err
	}
	if cerr != nil {
		return 0, 0, cerr
	}
	return cred.Uid, cred.Pid, nil
}

func (s *server) serve(c *net.UnixConn) {
	defer func() { _ = c.Close() }()
	uid, pid, err := peerUID(c)
	if err != nil || uid != uint32(os.Getuid()) {
		s.log.Warn("client refused", "uid", uid, "pid", pid, "error", err)
		return
	}
	w := newWire(c)
	f, err := w.recv()
	if err != nil {
		s.log.Warn("client sent no hello", "pid", pid, "error", err)
		return
	}
	f.close()
	ctx, stop := context.WithCancel(context.Background())
	ses := &session{s: s, w: w, ctx: ctx, stop: stop, foreign: f.version != protocolVersion}
	defer stop()
	if !ses.greet(f) {
		return
	}
	defer s.dropClient(ses)
	s.log.Info("client", "pid", pid, "protocol", f.version)
	reason := ses.serve()
	s.log.Info("client left", "pid", pid, "reason", reason)
}

// serve returns why there are no more requests, once none is served any more.
func (c *session) serve() (reason error) {
	var running sync.WaitGroup
	running.Go(c.sendPending)
	for {
		f, err := c.w.recv()
		if err != nil {
			reason = err
			break
		}
		if f.op == opUpgrade {
			running.Go(func() { c.upgrade(f) })
			continue
		}
		c.s.requests.enter() // waits while we are quiesced
		if f.id == 0 {
			c.told(&f)
			c.s.requests.leave()
			continue
		}
		running.Go(func() {
			defer c.s.requests.leave()
			c.handle(f)
		})
	}
	c.stop()
	_ = c.w.c.Close()
	running.Wait()
	return reason
}

// greet answers a hello and makes who sent it the client.
func (c *session) greet(f frame) bool {
	c.s.requests.enter()
	defer c.s.requests.leave()
	if f.op != opHello {
		c.reply(f, nil, nil, dsec.Errorf(dsec.Invalid, "greet hold", "", "first message is not a hello"))
		return false
	}
	if !c.s.takeClient(c) {
		c.reply(f, nil, nil, dsec.Errorf(dsec.Conflict, "greet hold", "", "it has a live client"))
		return false
	}
	c.reply(f, wireHello{Protocol: protocolVersion, Version: version.Version, PID: os.Getpid(), Started: c.s.started, Digest: c.s.digest()}, nil, nil)
	return true
}

func (s *server) takeClient(ses *session) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.client != nil {
		return false
	}
	s.client = ses
	if ses.foreign {
		return true
	}
	for _, sb := range s.sandboxes {
		ses.pending = append(ses.pending, sb.pending()...)
	}
	for _, p := range s.plains {
		ses.pending = append(ses.pending, p.pending()...)
	}
	if s.refused.any() {
		ses.pending = append(ses.pending, Event{Type: Refused})
	}
	return true
}

func (s *server) dropClient(ses *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.client == ses {
		s.client = nil
	}
}
