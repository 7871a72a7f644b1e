package hold

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/linux"
)

// The hold is replaced in its own process: so it stays the parent of all it
// started, and keeps its lock and the descriptors that the state names.

const (
	quiesceMost = 5 * time.Second // what is in flight may take
	acceptMost  = 5 * time.Second // the new program may take to read the state
)

// replacement asks the thread that owns all children to become another program;
// an answer means that it did not.
type replacement struct {
	binary *os.File
	failed chan error
}

// upgrade is answered only if it fails.
func (c *session) upgrade(f frame) {
	binary, err := f.take(0)
	if err == nil {
		err = c.s.upgrade(c.ctx, binary)
		c.s.log.Error("the hold stays what it is", "error", err)
	}
	f.close()
	c.reply(f, nil, nil, err)
}

func (s *server) upgrade(ctx context.Context, binary *os.File) error {
	if !s.upgrading.TryLock() {
		return dsec.E(dsec.Conflict, "upgrade hold", "", errors.New("it is being upgraded"))
	}
	defer s.upgrading.Unlock()
	ctx, cancel := context.WithTimeout(ctx, quiesceMost)
	defer cancel()
	defer s.resume()
	if err := s.quiesce(ctx); err != nil {
		return err
	}
	r := replacement{binary: binary, failed: make(chan error, 1)}
	select {
	case s.replace <- r:
		if err := <-r.failed; err != nil {
			return dsec.E(dsec.Unsupported, "upgrade hold", "", err)
		}
	case <-s.quit:
	}
	return dsec.E(dsec.Unavailable, "upgrade hold", "", errors.New("it ends"))
}

// become runs on the thread whose children forkers and sandboxes are: they
// would not survive if another one did it.
func (s *server) become(binary *os.File) error {
	var k baggage
	st := s.state(&k, binary)
	rc, err := s.lis.SyscallConn()
	if err == nil {
		err = rc.Control(func(fd uintptr) { st.Listener = int(fd) })
	}
	if err != nil {
		return err
	}
	k = append(k, st.Listener)
	b, err := st.encode()
	if err != nil {
		return err
	}
	m, err := linux.SealedFile("hold-state", b)
	if err != nil {
		return err
	}
	defer func() { _ = m.Close() }()
	path := fmt.Sprintf("/proc/self/fd/%d", st.Binary)
	s.log.Info("hold asks another program to go on", "sandboxes", len(st.Sandboxes), "state", len(b), "goroutines", runtime.NumGoroutine())
	if err := ask(path, m); err != nil {
		return err
	}
	k.keep(m)
	k.closeOnExec(0)
	defer k.closeOnExec(unix.FD_CLOEXEC)
	signal.Ignore(deafTo...) // until the new program catches them
	defer catchSignals()
	// The socket is for whoever reads a list of processes.
	return os.NewSyscallError("execve", syscall.Exec(path, []string{os.Args[0], roleResume, strconv.Itoa(fdOf(m)), s.socket}, os.Environ()))
}

func (k *baggage) closeOnExec(flag int) {
	for _, fd := range *k {
		_, _ = unix.FcntlInt(uintptr(fd), unix.F_SETFD, flag) // open, so it cannot go wrong
	}
}

// ask runs the new program beside us to see that it runs at all and reads our
// state: later there is no way back.
func ask(path string, state *os.File) error {
	ctx, cancel := context.WithTimeout(context.Background(), acceptMost)
	defer cancel()
	var said bytes.Buffer
	c := exec.CommandContext(ctx, path, roleAccept)
	c.Stdin, c.Stdout, c.Stderr = state, &said, &said
	c.WaitDelay = time.Second
	if err := c.Run(); err != nil {
		return fmt.Errorf("ask the new program: %w: %s", err, bytes.TrimSpace(said.Bytes()))
	}
	return nil
}

func runAccept() error {
	b, err := io.ReadAll(io.NewSectionReader(os.Stdin, 0, 1<<40))
	if err != nil {
		return err
	}
	if _, err := forkerImage(); err != nil {
		return err
	}
	_, err = decodeState(b)
	return err
}

// digestOf is the SHA-256 of a whole file.
func digestOf(f *os.File) (string, error) {
	h := sha256.New()
	if _, err := io.Copy(h, io.NewSectionReader(f, 0, 1<<40)); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
