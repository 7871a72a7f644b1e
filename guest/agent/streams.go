package agent

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"net"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/guest"
	"github.com/opendsec/dsec/process"
)

const (
	maxChunk    = 64 << 10
	chunkHeader = 16
	chunkEOF    = 1
	dialLimit   = 10 * time.Second

	// fileCaps is what root holds on files: chown, dac_override, dac_read_search,
	// fowner, fsetid, mknod, setfcap.
	fileCaps = 1<<0 | 1<<1 | 1<<2 | 1<<3 | 1<<4 | 1<<27 | 1<<31
)

// stdin writes what the host sends. When the host says early that this was all,
// it tells how much was written.
func (a *Agent) stdin(_ context.Context, s *guest.Stream, q guest.Request) error {
	const op = "write to exec"
	e, err := a.find(q.ID)
	if err != nil {
		return err
	}
	e.mu.Lock()
	if e.input == nil || e.over {
		e.mu.Unlock()
		return dsec.Errorf(dsec.IllegalState, op, q.ID, "its stdin is closed")
	}
	f, err := duplicate(e.input) // who closes stdin meanwhile does not close it under us
	e.mu.Unlock()
	if err != nil {
		return dsec.E(dsec.Internal, op, q.ID, err)
	}
	defer func() { _ = f.Close() }()
	finished := make(chan struct{})
	defer close(finished)
	go func() {
		select {
		case <-s.Over(): // it says no end when it has sent everything
			_ = f.SetWriteDeadline(aLongTimeAgo)
		case <-e.done: // a terminal that nobody reads any more
			_ = f.SetWriteDeadline(aLongTimeAgo)
		case <-finished:
		}
	}()
	n, err := io.CopyBuffer(justWriter{f}, io.LimitReader(s, q.Length), make([]byte, 32<<10))
	answer := guest.Answer{N: n}
	switch {
	case err == nil || errors.Is(err, os.ErrDeadlineExceeded) && !e.hasEnded():
	case errors.Is(err, unix.EPIPE), errors.Is(err, unix.EIO), errors.Is(err, os.ErrDeadlineExceeded):
		answer.Error = guest.NewFault(dsec.Errorf(dsec.IllegalState, op, q.ID, "it reads no more"))
	default:
		answer.Error = guest.NewFault(dsec.E(dsec.Internal, op, q.ID, err))
	}
	a.say(s, answer)
	return nil
}

// justWriter hides methods with which copying would do without the buffer.
type justWriter struct{ io.Writer }

func (e *execution) hasEnded() bool {
	select {
	case <-e.done:
		return true
	default:
		return false
	}
}

func duplicate(f *os.File) (*os.File, error) {
	rc, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	fd, derr := -1, error(nil)
	if err := rc.Control(func(old uintptr) { fd, derr = unix.FcntlInt(old, unix.F_DUPFD_CLOEXEC, 3) }); err != nil {
		return nil, err
	}
	if derr != nil {
		return nil, os.NewSyscallError("dup", derr)
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}

func (e *execution) stream(s process.Stream) (*pump, error) {
	if s != process.Stdout && (s != process.Stderr || e.out[1] == nil) {
		return nil, dsec.Errorf(dsec.Invalid, "read output of exec", e.spec.ID, "it has no stream %d", s)
	}
	return e.out[s-1], nil
}

// deaf is a follower's place that only the host moves.
type deaf struct{ *process.Cursor }

func (deaf) Ack(int64) error { return nil }

// follow sends a stream as it grows. What was sent counts as read only when the
// host says so: what is on its way when the host is gone is not lost.
func (a *Agent) follow(ctx context.Context, s *guest.Stream, q guest.Request) error {
	e, err := a.find(q.ID)
	if err != nil {
		return err
	}
	p, err := e.stream(q.Stream)
	if err != nil {
		return err
	}
	cursor, err := p.w.Follow(q.Offset)
	if err != nil {
		return err
	}
	var spool *os.File
	open := func() (_ *process.SpoolFile, err error) {
		if spool, err = os.Open(e.spoolPath(int(q.Stream) - 1)); err != nil {
			return nil, err
		}
		return process.OpenSpool(spool), nil
	}
	r := process.NewLazyReader(open, deaf{cursor}, q.Offset, func() { closeAll([]*os.File{spool}) })
	defer func() { _ = r.Close() }()
	if err := guest.WriteMessage(s, guest.Answer{}); err != nil {
		return nil //nolint:nilerr // who is gone needs no answer
	}
	ctx, cancel := context.WithCancel(ctx)
	var acks sync.WaitGroup
	defer acks.Wait()
	defer s.Close() //nolint:errcheck // it never errs; it ends the reading of acks
	defer cancel()
	acks.Go(func() {
		defer cancel()
		var b [8]byte
		for {
			if _, err := io.ReadFull(s, b[:]); err != nil {
				return
			}
			_ = cursor.Ack(int64(min(binary.LittleEndian.Uint64(b[:]), math.MaxInt64))) // never errs
		}
	})
	for done := false; !done; {
		c, err := r.Next(ctx)
		if err != nil {
			return nil //nolint:nilerr // the stream breaks off, which tells
		}
		done = c.EOF
		if err := sendChunk(s, c); err != nil {
			return nil //nolint:nilerr // who is gone needs no answer
		}
	}
	if s.CloseWrite() == nil { // the host goes when it has read
		<-ctx.Done()
	}
	return nil
}

// sendChunk in pieces that the host takes; only the last one has the end.
func sendChunk(s *guest.Stream, c process.Chunk) error {
	for {
		n := min(len(c.Data), maxChunk)
		b := make([]byte, chunkHeader, chunkHeader+n)
		binary.LittleEndian.PutUint64(b, uint64(c.Offset))
		if c.EOF && n == len(c.Data) {
			b[8] = chunkEOF
		}
		binary.LittleEndian.PutUint32(b[12:], uint32(n))
		if _, err := s.Write(append(b, c.Data[:n]...)); err != nil {
			return err
		}
		if c.Data, c.Offset = c.Data[n:], c.Offset+int64(n); len(c.Data) == 0 {
			return nil
		}
	}
}

// kept sends the kept head and tail.
func (a *Agent) kept(_ context.Context, s *guest.Stream, q guest.Request) error {
	e, err := a.find(q.ID)
	if err != nil {
		return err
	}
	p, err := e.stream(q.Stream)
	if err != nil {
		return err
	}
	head, small := p.w.Bytes()
	var tail []byte
	off := int64(len(head))
	if !small {
		if head, tail, off, err = e.keptFile(p, int(q.Stream)-1); err != nil {
			return err
		}
	}
	if err := guest.WriteMessage(s, guest.Answer{Head: int64(len(head)), Tail: int64(len(tail)), TailOffset: off}); err != nil {
		return nil //nolint:nilerr // who is gone needs no answer
	}
	for _, b := range [][]byte{head, tail} {
		if _, err := s.Write(b); err != nil {
			return nil //nolint:nilerr // who is gone needs no answer
		}
	}
	_ = s.CloseWrite() // who is gone needs no end
	return nil
}

func (e *execution) keptFile(p *pump, i int) (head, tail []byte, off int64, err error) {
	if b, ok := p.w.Image(); ok { // the file could not be made
		if head, ok = keptImage(b); ok {
			return head, nil, int64(len(head)), nil
		}
	}
	f, err := os.Open(e.spoolPath(i))
	if err != nil {
		return nil, nil, 0, dsec.E(dsec.Internal, "read output of exec", e.spec.ID, err)
	}
	defer func() { _ = f.Close() }()
	return process.OpenSpool(f).Kept()
}

// keptImage is what the image of a spool without a file holds.
func keptImage(b []byte) ([]byte, bool) {
	const data = 4096 // docs/formats/spool.md
	h, err := process.DecodeSpoolHeader(b)
	if err != nil || int64(len(b)) < data+h.Head {
		return nil, false
	}
	return b[data : data+h.Head], true
}

// files starts a file service in the root of the sandbox and connects the stream
// with it.
func (a *Agent) files(ctx context.Context, s *guest.Stream, q guest.Request) error {
	conn, err := a.startFiles(q.User)
	if err != nil {
		return err
	}
	return connect(ctx, s, conn)
}

func (a *Agent) startFiles(user string) (net.Conn, error) {
	const op = "open files"
	a.starting.RLock()
	defer a.starting.RUnlock()
	sb, err := a.there(op)
	if err != nil {
		return nil, err
	}
	who, err := sb.identify(user)
	if err != nil {
		return nil, err
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, dsec.E(dsec.Unavailable, op, "", os.NewSyscallError("socketpair", err))
	}
	mine, theirs := os.NewFile(uintptr(pair[0]), "files"), os.NewFile(uintptr(pair[1]), "files")
	defer closeAll([]*os.File{mine, theirs})
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return nil, dsec.E(dsec.Unavailable, op, "", err)
	}
	defer func() { _ = null.Close() }()
	attr := &syscall.ProcAttr{Dir: "/", Env: []string{}, Files: []uintptr{null.Fd(), null.Fd(), null.Fd(), theirs.Fd(), sb.root.Fd()},
		Sys: &syscall.SysProcAttr{Setsid: true, Credential: &syscall.Credential{Uid: who.UID, Gid: who.GID, Groups: who.Groups}}}
	var failed error
	err = sb.threads.on(kindOfForker{caps: fileCaps, noNewPrivs: true}, func() {
		_, _, failed = a.reaper.start(func() (int, error) { return syscall.ForkExec(self, []string{"files", "files"}, attr) })
	})
	if err = errors.Join(err, failed); err != nil {
		return nil, dsec.E(dsec.Unavailable, op, "", err)
	}
	conn, err := net.FileConn(mine)
	if err != nil {
		return nil, dsec.E(dsec.Internal, op, "", err)
	}
	return conn, nil
}

// there is the sandbox for what needs no process of it to run.
func (a *Agent) there(op string) (*sandbox, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.sandbox == nil:
		return nil, dsec.Errorf(dsec.IllegalState, op, "", "there is no sandbox yet")
	case a.sandbox.isStopping():
		return nil, dsec.Errorf(dsec.SandboxGone, op, "", "the sandbox has ended")
	}
	return a.sandbox, nil
}

// dial connects the stream with a port of the machine's loopback.
func (a *Agent) dial(ctx context.Context, s *guest.Stream, q guest.Request) error {
	var conn net.Conn
	var err error
	for _, host := range []string{"127.0.0.1", "::1"} {
		d := net.Dialer{Timeout: dialLimit}
		if conn, err = d.DialContext(ctx, "tcp", net.JoinHostPort(host, strconv.Itoa(int(q.Port)))); err == nil {
			break
		}
	}
	if err != nil {
		return dsec.E(dsec.Unavailable, "dial port", strconv.Itoa(int(q.Port)), err)
	}
	return connect(ctx, s, conn)
}

// connect copies in both directions until both have ended, or one has broken.
func connect(ctx context.Context, s *guest.Stream, conn net.Conn) error {
	defer func() { _ = conn.Close() }()
	if err := guest.WriteMessage(s, guest.Answer{}); err != nil {
		return nil //nolint:nilerr // who is gone needs no answer
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	var both sync.WaitGroup
	defer both.Wait()
	defer s.Close() //nolint:errcheck // it never errs; it ends the other direction
	both.Go(func() {
		_, err := io.Copy(conn, s)
		if w, ok := conn.(interface{ CloseWrite() error }); ok && err == nil {
			_ = w.CloseWrite() // a peer that is gone needs no end
			return
		}
		_ = conn.Close()
	})
	if _, err := io.Copy(s, conn); err == nil && s.CloseWrite() == nil {
		<-s.Over()
	}
	return nil
}
