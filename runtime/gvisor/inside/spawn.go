package inside

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/linux"
)

// lineFD is the descriptor of the socket that a program inside has to the one that had
// it started.
const lineFD = 3

// Words on that socket. From inside: started, failed (and an errno), exited (and a code),
// killed (and a signal). To it: a signal.
const (
	wordStarted = 's'
	wordFailed  = 'f'
	wordExited  = 'e'
	wordKilled  = 'k'
)

// startLimit is how long runsc may take to have something started.
const startLimit = 40 * time.Second

// ociProcess is the process.json of runsc exec.
type ociProcess struct {
	Terminal        bool     `json:"terminal,omitempty"`
	User            ociUser  `json:"user"`
	Args            []string `json:"args"`
	Env             []string `json:"env"`
	Cwd             string   `json:"cwd"`
	Capabilities    ociCaps  `json:"capabilities"`
	NoNewPrivileges bool     `json:"noNewPrivileges,omitempty"`
}

type ociUser struct {
	UID            uint32   `json:"uid"`
	GID            uint32   `json:"gid"`
	AdditionalGids []uint32 `json:"additionalGids,omitempty"`
}

type ociCaps struct {
	Bounding  []string `json:"bounding"`
	Effective []string `json:"effective"`
	Permitted []string `json:"permitted"`
}

// Capabilities of one of ours, in the words of a bundle.
func (w Who) Capabilities() (bounding, permitted []string) {
	return capNames(w.Bounding), capNames(w.Permitted)
}

func (w Who) process(argv []string) ociProcess {
	b, p := w.Capabilities()
	return ociProcess{User: ociUser{w.UID, w.GID, w.Groups}, Args: argv, Cwd: "/", Env: []string{"GOMAXPROCS=2", "GOTRACEBACK=none"},
		Capabilities: ociCaps{Bounding: b, Effective: p, Permitted: p}}
}

// line is the host's end of the socket to a program inside.
type line struct{ c *net.UnixConn }

// trySpawn has a program of ours started inside, with a socket to it and with stdio, or
// with that of this process where that is a terminal. When it returns, runsc is no more.
func (r Runsc) trySpawn(p ociProcess, stdio [3]*os.File) (line, error) {
	turn, err := r.turn()
	if err != nil {
		return line{}, err
	}
	defer turn.Close()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return line{}, err
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "line"), os.NewFile(uintptr(fds[1]), "line")
	defer theirs.Close()
	c, err := net.FileConn(ours)
	_ = ours.Close()
	if err != nil {
		return line{}, err
	}
	l := line{c.(*net.UnixConn)}
	if err := r.start(p, l, theirs, stdio); err != nil {
		_ = l.c.Close()
		return line{}, err
	}
	return l, nil
}

// spawn is trySpawn for one that may meet a pause: it waits until that is over, as what runs inside does. It tries again
// only what runsc has refused, which is in its words, or on a terminal.
func (r Runsc) spawn(p ociProcess, stdio [3]*os.File) (line, error) {
	for {
		for still() {
			time.Sleep(20 * time.Millisecond)
		}
		l, err := r.trySpawn(p, stdio)
		if err == nil || !errors.Is(err, io.EOF) || !strings.Contains(err.Error(), "in state paused") && !(p.Terminal && still()) {
			return l, err
		}
	}
}

func still() bool {
	_, err := os.Stat(stillFile)
	return err == nil
}

func (r Runsc) start(p ociProcess, l line, theirs *os.File, stdio [3]*os.File) error {
	b, err := json.Marshal(p)
	if err != nil {
		return err
	}
	spec, err := linux.SealedFile("process", b)
	if err != nil {
		return err
	}
	defer spec.Close()
	self, err := os.Open("/proc/self/exe")
	if err != nil {
		return err
	}
	defer self.Close()
	args := append(append([]string{}, r.Flags...), "exec", "--process", "/proc/self/fd/5", "--pass-fd", fmt.Sprintf("%d:%d", lineFD, lineFD), "--exec-fd", "4")
	cmd := exec.Command(r.Path)
	cmd.ExtraFiles = []*os.File{theirs, self, spec}
	cmd.Env = []string{"PATH=/bin"}
	var said bytes.Buffer
	if p.Terminal {
		cmd.Stdin, cmd.Stdout, cmd.Stderr = stdio[0], stdio[1], stdio[2]
	} else {
		for i, f := range stdio {
			args = append(args, "--pass-fd", fmt.Sprintf("%d:%d", 6+i, i))
			cmd.ExtraFiles = append(cmd.ExtraFiles, f)
		}
		cmd.Stderr = &said
	}
	cmd.Args = append(append([]string{"runsc"}, args...), r.Name)
	if err := cmd.Start(); err != nil {
		return err
	}
	// The last copy of their end outside of the sandbox is runsc's.
	_ = theirs.Close()
	err = l.started()
	_ = cmd.Process.Kill() // it would only wait for the end
	_ = cmd.Wait()
	if text := strings.TrimSpace(said.String()); err != nil && text != "" {
		err = fmt.Errorf("%w: %s", err, text)
	}
	return err
}

// turns is how many runscs there are at a time beside the sandbox: each takes memory
// that is the sandbox's.
const turns = 2

// turn waits for one; closing the file ends it.
func (r Runsc) turn() (*os.File, error) {
	f, err := os.OpenFile(fmt.Sprintf("%s/turn%d", StateDir, os.Getpid()%turns), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		if err = unix.Flock(int(f.Fd()), unix.LOCK_EX); !errors.Is(err, unix.EINTR) {
			return f, err
		}
	}
}

// started waits for the first word.
func (l line) started() error {
	var word byte
	var n int
	err := os.ErrDeadlineExceeded
	for waited := true; waited && errors.Is(err, os.ErrDeadlineExceeded); {
		if err := l.c.SetReadDeadline(time.Now().Add(startLimit)); err != nil {
			return err
		}
		word, n, err = l.read()
		waited = still() // a pause is no delay of its own
	}
	switch {
	case err != nil:
		return fmt.Errorf("start inside: %w", err)
	case word == wordFailed:
		return unix.Errno(n)
	case word != wordStarted:
		return errors.New("start inside: a word that is none")
	}
	return l.c.SetReadDeadline(time.Time{})
}

func (l line) read() (word byte, n int, err error) {
	var b [2]byte
	for got := 0; got < len(b); {
		k, err := l.c.Read(b[got:])
		if err != nil {
			return 0, 0, err
		}
		got += k
	}
	return b[0], int(b[1]), nil
}

// say writes a word on the socket of a program inside.
func say(f *os.File, word byte, n int) { _, _ = f.Write([]byte{word, byte(n)}) }

var capText = strings.Fields(`CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE
	NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE
	SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM
	BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE`)

func capNames(bits uint64) []string {
	out := []string{}
	for i, name := range capText {
		if bits&(1<<i) != 0 {
			out = append(out, "CAP_"+name)
		}
	}
	return out
}
