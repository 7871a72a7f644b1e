package inside

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/files"
)

// Setup is what a sandbox finds about itself.
type Setup struct {
	Files map[string]string // by path; what is empty is removed
	Dirs  []string          // that are made, with those above
}

// Ready is the line that PID 1 says when it is; a Refusal if it will not be.
const Ready = "ready"

// Refusal says why PID 1 gave up.
type Refusal struct {
	Class      dsec.Class
	Op, Object string
	Text       string
}

// initMain prepares the root, which is nobody's yet, and says so.
func initMain(s Setup) error {
	died := make(chan os.Signal, 1)
	signal.Notify(died, syscall.SIGCHLD)
	if err := s.apply(); err != nil {
		b, _ := json.Marshal(err) // of strings
		_, _ = os.Stdout.Write(append(b, '\n'))
		os.Exit(1)
	}
	_, _ = os.Stdout.WriteString(Ready + "\n")
	for _, fd := range []int{0, 1, 2} {
		_ = unix.Close(fd)
	}
	for range died {
		for {
			if pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil); pid <= 0 || err != nil {
				break
			}
		}
	}
	return nil
}

func (s Setup) apply() *Refusal {
	for path, text := range s.Files {
		if err := replace(path, text); err != nil {
			return refusal("write", path, err)
		}
	}
	for _, dir := range s.Dirs {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return refusal("make working directory", dir, err)
		}
		if st, err := os.Stat(dir); err != nil || !st.IsDir() {
			return refusal("make working directory", dir, unix.ENOTDIR)
		}
	}
	return nil
}

// replace puts a file in place of whatever is there, a link included.
func replace(path, text string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	err := os.Remove(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err != nil && text == "" { // where nothing is and nothing is to be said
		return nil
	}
	return os.WriteFile(path, []byte(text), 0o644)
}

func refusal(op, object string, err error) *Refusal {
	r := &Refusal{Class: dsec.Internal, Op: op, Object: object, Text: err.Error()}
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		r.Class = dsec.NoSpace
	case errors.Is(err, unix.EISDIR):
		r.Class = dsec.IsADirectory
	case errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP), errors.Is(err, unix.EEXIST), errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENAMETOOLONG):
		r.Class = dsec.NotADirectory
	}
	return r
}

// serviceIdle is how long a file service lives without a request.
const serviceIdle = time.Minute

// serveMain serves files as the user it runs as, on its stdin.
func serveMain() error {
	l := os.NewFile(lineFD, "line")
	c, err := net.FileConn(os.Stdin)
	if err != nil {
		say(l, wordFailed, int(unix.ENOTSOCK))
		return err
	}
	_ = os.Stdin.Close()
	unix.Umask(0) // modes are what was asked for
	local, err := files.NewLocal("/")
	if err != nil {
		say(l, wordFailed, int(unix.EIO))
		return err
	}
	say(l, wordStarted, 0)
	_ = l.Close()
	return files.Serve(context.Background(), c, local, serviceIdle)
}

// connectMain joins its stdin, a socket, and a port of the sandbox.
func connectMain(port uint16) error {
	l := os.NewFile(lineFD, "line")
	c, err := net.FileConn(os.Stdin)
	if err != nil {
		say(l, wordFailed, int(unix.ENOTSOCK))
		return err
	}
	_ = os.Stdin.Close()
	var to net.Conn
	for _, host := range []string{"127.0.0.1", "::1"} {
		var e error
		if to, e = net.Dial("tcp", net.JoinHostPort(host, strconv.Itoa(int(port)))); e == nil {
			break
		}
		if err == nil {
			err = e
		}
	}
	if to == nil {
		n := unix.ECONNREFUSED
		_ = errors.As(err, &n)
		say(l, wordFailed, int(n))
		return err
	}
	say(l, wordStarted, 0)
	_ = l.Close()
	var both sync.WaitGroup
	for a, b := range map[net.Conn]net.Conn{c: to, to: c} {
		both.Go(func() {
			_, _ = io.Copy(a, b)
			_ = a.(interface{ CloseWrite() error }).CloseWrite()
		})
	}
	both.Wait()
	return nil
}

// endMain ends every process but PID 1 and itself.
func endMain() error {
	l := os.NewFile(lineFD, "line")
	say(l, wordStarted, 0)
	for range 5000 {
		_ = unix.Kill(-1, unix.SIGKILL)
		all, err := parentsOf()
		if err == nil && len(all) <= 2 {
			say(l, wordExited, 0)
			return nil
		}
		time.Sleep(time.Millisecond)
	}
	say(l, wordExited, 1)
	return nil
}
