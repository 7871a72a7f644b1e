package mirror

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/within"
)

// Agent is what an agent gives to a mirror that is another process.
type Agent struct {
	Socket string                               // of the mirror's Link
	Listen func() (net.Listener, error)         // where sandboxes ask
	Lookup func(from netip.Addr) (Access, bool) // who has an address
	Log    *slog.Logger
}

// Attendance is an agent that answers a mirror, and its next one.
type Attendance struct {
	a      Agent
	ctx    context.Context
	cancel context.CancelFunc
	work   sync.WaitGroup
}

// Attend answers until Close. A mirror that is away is asked again.
func Attend(a Agent) *Attendance {
	t := &Attendance{a: a}
	t.ctx, t.cancel = context.WithCancel(context.Background())
	t.work.Go(t.run)
	return t
}

// Close lets go: the mirror knows nobody then.
func (t *Attendance) Close() error {
	t.cancel()
	t.work.Wait()
	return nil
}

func (t *Attendance) run() {
	for wait := 50 * time.Millisecond; t.ctx.Err() == nil; wait = min(2*wait, 5*time.Second) {
		begun := time.Now()
		err := t.once()
		if t.ctx.Err() != nil {
			return
		}
		t.a.Log.Warn("the mirror of packages is away", "err", err)
		if time.Since(begun) > linkWait { // it was there
			wait = 50 * time.Millisecond
		}
		_ = within.Sleep(t.ctx, wait)
	}
}

// once is one connection, to its end.
func (t *Attendance) once() error {
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: t.a.Socket, Net: "unix"})
	if err != nil {
		return dsec.E(dsec.Unavailable, "connect to the mirror", t.a.Socket, err)
	}
	defer func() { _ = c.Close() }()
	defer context.AfterFunc(t.ctx, func() { _ = c.Close() })()
	_ = c.SetDeadline(time.Now().Add(2 * linkWait)) // it may have to end for another agent first
	r := bufio.NewReaderSize(c, 4096)
	var h hello
	line, err := readLine(r)
	if err == nil {
		err = json.Unmarshal(line, &h)
	}
	if err == nil && h.Version != linkVersion {
		err = dsec.Errorf(dsec.Unsupported, "greet", "", "version %d, this program speaks %d", h.Version, linkVersion)
	}
	if err == nil {
		err = t.bring(c)
	}
	if err != nil {
		return dsec.E(dsec.Unavailable, "greet the mirror", t.a.Socket, err)
	}
	_ = c.SetDeadline(time.Time{})
	for {
		line, err := readLine(r)
		if err != nil {
			return dsec.E(dsec.Unavailable, "hear the mirror", t.a.Socket, err)
		}
		if err := t.answer(c, strings.TrimSpace(string(line))); err != nil {
			return dsec.E(dsec.Unavailable, "answer the mirror", t.a.Socket, err)
		}
	}
}

// bring hands the listener over.
func (t *Attendance) bring(c *net.UnixConn) (err error) {
	l, err := t.a.Listen()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	tcp, ok := l.(*net.TCPListener)
	if !ok {
		return dsec.Errorf(dsec.Internal, "hand over listener", l.Addr().String(), "it is none of TCP")
	}
	f, err := tcp.File()
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	_, _, err = c.WriteMsgUnix([]byte{'L'}, unix.UnixRights(int(f.Fd())), nil)
	return err
}

// answer says who has an address. The mirror asks for one at a time.
func (t *Attendance) answer(c *net.UnixConn, line string) error {
	a, err := netip.ParseAddr(line)
	if err != nil {
		return err
	}
	var say answered
	say.Access, say.Known = t.a.Lookup(a)
	b, err := json.Marshal(say)
	if err != nil {
		return err
	}
	if len(b) >= maxLine {
		b = []byte(`{}`)
	}
	_ = c.SetWriteDeadline(time.Now().Add(linkWait))
	_, err = c.Write(append(b, '\n'))
	return err
}
