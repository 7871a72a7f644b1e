package guesttest

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/guest"
	"github.com/opendsec/dsec/internal/cgroup"
)

func fields(s string) []string { return strings.Fields(s) }

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// chardev is the channel of a machine as a VMM has it: what the agent says while
// no host is there is lost, and a host that goes leaves half of what it said.
type chardev struct {
	agent net.Conn

	mu   sync.Mutex
	host net.Conn // nil while there is none
	gone chan struct{}
}

func newChardev(agent net.Conn) *chardev {
	c := &chardev{agent: agent, gone: make(chan struct{})}
	go c.run()
	return c
}

func (c *chardev) run() {
	defer close(c.gone)
	buf := make([]byte, 64<<10)
	for {
		n, err := c.agent.Read(buf)
		c.mu.Lock()
		host := c.host
		c.mu.Unlock()
		if host != nil && n > 0 {
			_, _ = host.Write(buf[:n]) // a host that is gone misses it
		}
		if err != nil {
			if host != nil {
				_ = host.Close()
			}
			return
		}
	}
}

// dial connects a host. The one before it is cut off.
func (c *chardev) dial() (net.Conn, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	var ends [2]net.Conn
	for i, fd := range pair {
		f := os.NewFile(uintptr(fd), "host")
		if ends[i], err = net.FileConn(f); err != nil {
			return nil, err
		}
		_ = f.Close()
	}
	c.mu.Lock()
	old := c.host
	c.host = ends[0]
	c.mu.Unlock()
	if old != nil {
		_ = old.Close()
	}
	go func() {
		buf := make([]byte, 64<<10)
		for {
			n, err := ends[0].Read(buf)
			if n > 0 {
				if _, werr := c.agent.Write(buf[:n]); werr != nil {
					err = werr
				}
			}
			if err != nil {
				_ = ends[0].Close()
				return
			}
		}
	}()
	return ends[1], nil
}

// hardware is a machine that runs an agent.
type hardware struct {
	dir     string
	disk    string
	group   *cgroup.Group
	cmd     *exec.Cmd
	channel *chardev
	dead    chan struct{}
	netns   string // its network namespace

	off    sync.Once
	offErr error
}

var testGroups struct {
	once sync.Once
	root *cgroup.Root
	err  error
}

func groups() (*cgroup.Root, error) {
	testGroups.once.Do(func() { testGroups.root, testGroups.err = cgroup.Open(fmt.Sprintf("dsecguest%d", os.Getpid())) })
	return testGroups.root, testGroups.err
}

// powerOn starts an agent on a disk.
func powerOn(name, dir, disk string, limits cgroup.Limits) (*hardware, error) {
	root, err := groups()
	if err != nil {
		return nil, err
	}
	h := &hardware{dir: dir, disk: disk, dead: make(chan struct{})}
	if h.group, err = root.Create(name, limits); err != nil {
		return nil, err
	}
	if err := h.start(); err != nil {
		return nil, errors.Join(err, h.group.Remove(context.Background()))
	}
	return h, nil
}

func (h *hardware) start() error {
	machine := filepath.Join(h.group.Paths().Unified, "vm")
	if err := os.Mkdir(machine, 0o755); err != nil {
		return err
	}
	at := filepath.Join(h.dir, "machine")
	if err := os.MkdirAll(at, 0o755); err != nil {
		return err
	}
	text, err := json.Marshal(stage{Group: machine, Dir: at, Agent: agentBinary, Base: baseDir, Disk: h.disk})
	if err != nil {
		return err
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	ours, theirs := os.NewFile(uintptr(pair[0]), "channel"), os.NewFile(uintptr(pair[1]), "channel")
	defer ours.Close()
	defer theirs.Close()
	conn, err := net.FileConn(ours)
	if err != nil {
		return err
	}
	log, err := os.OpenFile(filepath.Join(h.dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	h.cmd = exec.Command("/proc/self/exe")
	h.cmd.Env = []string{stageVariable + "=" + string(text)}
	// The second is one that nobody meant it to have.
	stray, err := os.Open(os.DevNull)
	if err != nil {
		return err
	}
	defer stray.Close()
	h.cmd.ExtraFiles = []*os.File{theirs, stray}
	h.cmd.Stderr = log
	h.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWNET}
	if err := h.cmd.Start(); err != nil {
		return err
	}
	h.channel = newChardev(conn)
	h.netns, _ = os.Readlink(fmt.Sprintf("/proc/%d/ns/net", h.cmd.Process.Pid)) // it is there until it is waited for
	go func() {
		_ = h.cmd.Wait() // how it ended does not matter
		_ = conn.Close()
		close(h.dead)
	}()
	return nil
}

// powerOff is what ends a machine: nothing is asked of it. It is done once: the
// next machine of the same name has the same control group.
func (h *hardware) powerOff() error {
	h.off.Do(func() { h.offErr = h.cut() })
	return h.offErr
}

func (h *hardware) cut() error {
	_ = h.cmd.Process.Kill() // gone already: as wanted
	<-h.dead
	<-h.channel.gone
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	return h.group.Remove(ctx)
}

func (h *hardware) log() string {
	b, _ := os.ReadFile(filepath.Join(h.dir, "log"))
	return string(b)
}

func (h *hardware) connect(ctx context.Context) (*guest.Client, error) {
	conn, err := h.channel.dial()
	if err != nil {
		return nil, err
	}
	return guest.Connect(ctx, conn, guest.Options{})
}

func seed() []byte {
	b := make([]byte, 32)
	_, _ = rand.Read(b) // never errs
	return b
}

// mountOf is the sandbox on a machine of ours.
func (h *hardware) mountOf() guest.Mount {
	p := h.group.Paths()
	within := func(path string) string { return strings.Replace(path, "/sys/fs/cgroup", "/controllers", 1) }
	m := guest.Mount{
		Mounts:  []guest.FileSystem{{FSType: "bind", Source: "/lower", Target: "base", Options: []string{"ro"}}, {FSType: "bind", Source: "/disk", Target: "disk"}},
		Overlay: guest.Overlay{Lowers: []string{"base"}, Upper: "disk/upper", Work: "disk/work"},
		Limits:  guest.Limits{Spool: 32 << 20, Account: guest.Account{OOM: within(p.OOM), Limit: within(p.Limit), Peak: within(p.Peak)}},
	}
	for _, t := range p.Tasks {
		m.Limits.Tasks = append(m.Limits.Tasks, within(t))
	}
	return m
}

// makeDisk mounts one of a size.
func makeDisk(dir string, size int64) (string, error) {
	at := filepath.Join(dir, "disk")
	if err := os.MkdirAll(at, 0o755); err != nil {
		return "", err
	}
	return at, unix.Mount("tmpfs", at, "tmpfs", 0, fmt.Sprintf("mode=0755,size=%d", size))
}
