package mirror

import (
	"bufio"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"sync"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/linux"
)

// What agent and mirror say to each other: docs/formats/mirror.md.
const (
	linkVersion = 1
	maxLine     = 1 << 20 // bytes of an answer: 1,024 names
	linkWait    = 5 * time.Second
)

// hello is the first line of a mirror.
type hello struct {
	Version int `json:"version"`
}

// answered is what an agent says of an address.
type answered struct {
	Known  bool   `json:"known"`
	Access Access `json:"access,omitzero"`
}

// Link is the mirror's end of a connection to the agent, which brings the listener
// of the sandboxes and knows who has an address. The next agent takes the place of
// one that went; meanwhile nobody is known.
type Link struct {
	Log *slog.Logger

	mu      sync.Mutex
	conn    *net.UnixConn
	answers *bufio.Reader
	server  *http.Server
	work    sync.WaitGroup
}

// Lookup asks the agent; it is a Config's.
func (k *Link) Lookup(a netip.Addr) (Access, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.conn == nil {
		return Access{}, false
	}
	var say answered
	_ = k.conn.SetDeadline(time.Now().Add(linkWait))
	_, err := k.conn.Write([]byte(a.String() + "\n"))
	var line []byte
	if err == nil {
		line, err = readLine(k.answers)
	}
	if err == nil {
		err = json.Unmarshal(line, &say)
	}
	if err != nil { // what comes next would be the answer to something else
		k.Log.Warn("agent not asked", "err", err)
		_ = k.conn.Close()
		k.conn = nil
		return Access{}, false
	}
	return say.Access, say.Known
}

func readLine(r *bufio.Reader) ([]byte, error) {
	line, err := r.ReadSlice('\n')
	if errors.Is(err, bufio.ErrBufferFull) {
		return nil, dsec.Errorf(dsec.Corrupt, "read line", "", "more than %d bytes", maxLine)
	}
	return line, err
}

// Run takes agents, one after the other, until the listener is closed.
func (k *Link) Run(l *net.UnixListener, m *Mirror) error {
	defer k.work.Wait()
	defer k.drop()
	for {
		c, err := l.AcceptUnix()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return nil
			}
			return dsec.E(dsec.Internal, "wait for the agent", "", err)
		}
		if err := k.take(c, m); err != nil {
			k.Log.Warn("agent not understood", "err", err)
			_ = c.Close()
		}
	}
}

// drop ends what the last agent brought: its port is free then.
func (k *Link) drop() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.server != nil {
		_ = k.server.Close()
		k.server = nil
	}
	if k.conn != nil {
		_ = k.conn.Close()
		k.conn = nil
	}
}

func (k *Link) take(c *net.UnixConn, m *Mirror) error {
	k.drop()
	k.work.Wait()
	_ = c.SetDeadline(time.Now().Add(linkWait))
	b, err := json.Marshal(hello{linkVersion})
	if err != nil {
		return err
	}
	if _, err := c.Write(append(b, '\n')); err != nil {
		return err
	}
	l, err := receiveListener(c)
	if err != nil {
		return err
	}
	s := Server(m)
	k.mu.Lock()
	k.conn, k.answers, k.server = c, bufio.NewReaderSize(c, maxLine), s
	k.mu.Unlock()
	k.work.Go(func() { _ = s.Serve(Listen(l)) }) // until drop
	return nil
}

// receiveListener takes one byte with one descriptor.
func receiveListener(c *net.UnixConn) (net.Listener, error) {
	one, oob := make([]byte, 1), make([]byte, 256)
	n, oobn, _, _, err := c.ReadMsgUnix(one, oob)
	if err != nil {
		return nil, err
	}
	fds, err := linux.Received(oob[:oobn])
	if err != nil {
		return nil, err
	}
	var files []*os.File
	defer func() {
		for _, f := range files {
			_ = f.Close()
		}
	}()
	for _, fd := range fds {
		files = append(files, os.NewFile(uintptr(fd), "mirror"))
	}
	if n != 1 || len(files) != 1 {
		return nil, dsec.Errorf(dsec.Corrupt, "receive listener", "", "%d bytes, %d descriptors", n, len(files))
	}
	return net.FileListener(files[0])
}
