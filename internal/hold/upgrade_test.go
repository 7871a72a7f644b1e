package hold

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/process"
)

// Programs to upgrade to are this one with a byte behind it, which says what
// else is different.
const (
	markPlain  = 'A'
	markOther  = 'B'
	markNative = 'N' // its forkers speak another format
	markDies   = 'X' // it accepts the state and cannot be run afterwards
)

// beMarked makes this program what the byte behind it says.
func beMarked() {
	if len(os.Args) < 2 || !strings.HasPrefix(os.Args[1], "hold-") {
		return
	}
	f, err := os.Open("/proc/self/exe")
	if err != nil {
		return
	}
	defer func() { _ = f.Close() }()
	b := make([]byte, 1)
	if end, err := f.Seek(-1, io.SeekEnd); err != nil || end == 0 {
		return
	}
	_, _ = f.Read(b)
	switch {
	case b[0] == markNative:
		nativeFormat = 99
	case b[0] == markDies && os.Args[1] == roleAccept:
		_ = f.Chmod(0)
	}
}

var self = sync.OnceValues(func() ([]byte, error) { return os.ReadFile("/proc/self/exe") })

// marked is this program, made different by its last byte.
func marked(t *testing.T, mark byte) *os.File {
	t.Helper()
	b, err := self()
	must(t, err)
	f, err := linux.SealedFile("dsec-hold", append(b[:len(b):len(b)], mark))
	must(t, err)
	t.Cleanup(func() { _ = f.Close() })
	return f
}

// ensure comes back as another agent that carries another hold.
func (b *bed) ensure(binary *os.File) Info {
	b.t.Helper()
	_ = b.c.Close()
	b.o.Binary = binary
	c, err := Ensure(ctx(b.t), b.o)
	must(b.t, err)
	b.c = c
	return c.Info()
}

func (b *bed) upgrade(mark byte) Info {
	b.t.Helper()
	i := b.ensure(marked(b.t, mark))
	if !i.Upgraded || !i.Adopted || i.Stale != nil {
		b.t.Fatalf("%+v", i)
	}
	return i
}

func (b *bed) find(x *box, id string) process.Process {
	b.t.Helper()
	p, err := b.c.Process(ctx(b.t), x.id, id)
	must(b.t, err)
	return p
}

func TestUpgradeKeepsTheProcessAndWhatItKeeps(t *testing.T) {
	b := newBed(t)
	x := b.box()
	s := x.sh("read a; echo $a")
	s.Spec.Stdin = true
	p := x.start(s)
	kept, err := os.Open(b.dir)
	must(t, err)
	must(t, b.c.Put(ctx(t), "dir", kept))
	must(t, kept.Close())
	was, before := b.c.Info(), listing(b)
	now := b.upgrade(markPlain)
	if now.PID != was.PID || !now.Started.Equal(was.Started) || now.Digest == was.Digest || len(now.Digest) != 64 {
		t.Fatalf("%+v, was %+v", now, was)
	}
	if after := listing(b); after != before {
		t.Fatalf("%s\nwas %s", after, before)
	}
	got, err := b.c.Get(ctx(t), "dir")
	must(t, err)
	defer func() { _ = got.Close() }()
	if names, err := got.Readdirnames(-1); err != nil || len(names) == 0 {
		t.Fatal(names, err)
	}
	p = b.find(x, p.Spec().ID)
	_, err = p.Write(ctx(t), []byte("hello\n"))
	must(t, err)
	if r, out, _ := finishCommand(t, p); r.ExitCode != 0 || out != "hello\n" {
		t.Fatalf("%+v %q", r, out)
	}
	if i := b.ensure(b.o.Binary); i.Upgraded || !i.Adopted || i.Digest != now.Digest {
		t.Fatalf("the same program again: %+v", i)
	}
	_, err = Ensure(ctx(t), Options{Socket: filepath.Join(b.dir, "other")})
	wantClass(t, err, dsec.Invalid, "no binary")
}

func listing(b *bed) string {
	b.t.Helper()
	l, err := b.c.List(ctx(b.t))
	must(b.t, err)
	s, err := json.Marshal(l)
	must(b.t, err)
	return string(s)
}

func TestUpgradeKeepsCommandsInEveryStage(t *testing.T) {
	b := newBed(t)
	x := b.box()
	x.run(x.sh("setsid sh -c 'sleep 1; seq 1 100000; echo alive >/tmp/orphan' & exit 0")) // released, its pipe is still read
	stdin := x.sh("cat; exit 4")
	stdin.Spec.Stdin = true
	p := x.start(stdin)
	_, err := p.Write(ctx(t), []byte("before "))
	must(t, err)
	pty := x.sh("stty size; read a; stty size; echo got $a")
	pty.Spec.PTY = &process.Size{Rows: 30, Cols: 100}
	x.start(pty)
	daemon := x.start(x.sh("echo said; setsid sh -c 'sleep 1; seq 1 100000; echo alive >/tmp/daemon' & exit 5"))
	big := x.start(x.sh("seq 1 50000"))
	waited(t)(daemon.Wait(ctx(t)))
	waited(t)(big.Wait(ctx(t)))
	b.upgrade(markPlain)
	b.upgrade(markOther)
	seen := map[string]int{}
	for range 2 {
		e := <-b.c.Events()
		seen[e.Exec] = e.Result.ExitCode
	}
	if seen[daemon.Spec().ID] != 5 || seen[big.Spec().ID] != 0 || len(seen) != 2 {
		t.Fatal("ends that nobody had acknowledged:", seen)
	}
	if _, out, _ := finishCommand(t, b.find(x, daemon.Spec().ID)); out != "said\n" {
		t.Fatalf("%q", out)
	}
	if r, out, _ := finishCommand(t, b.find(x, big.Spec().ID)); !strings.HasSuffix(out, "\n50000\n") || r.Stdout.Total != int64(len(out)) {
		t.Fatalf("%+v %d", r, len(out))
	}
	p = b.find(x, stdin.Spec.ID)
	_, err = p.Write(ctx(t), []byte("after"))
	must(t, err)
	must(t, p.CloseStdin(ctx(t)))
	if r, out, _ := finishCommand(t, p); r.ExitCode != 4 || out != "before after" {
		t.Fatalf("%+v %q", r, out)
	}
	p = b.find(x, pty.Spec.ID)
	must(t, p.Resize(ctx(t), process.Size{Rows: 40, Cols: 120}))
	_, err = p.Write(ctx(t), []byte("hello\n"))
	must(t, err)
	if r, out, _ := finishCommand(t, p); r.ExitCode != 0 || out != "30 100\r\nhello\r\n40 120\r\ngot hello\r\n" {
		t.Fatalf("%+v %q", r, out)
	}
	for _, name := range []string{"/tmp/orphan", "/tmp/daemon"} {
		poll(t, name, func() bool {
			f, err := b.c.OpenIn(ctx(t), x.id, name)
			if err == nil {
				_ = f.Close()
			}
			return err == nil
		})
	}
	if r, out, _ := x.run(x.spec("grep", "SigIgn", "/proc/self/status")); r.Signal != 0 || out != "SigIgn:\t0000000000000000\n" {
		t.Fatalf("%+v %q", r, out)
	}
}

func waited(t *testing.T) func(process.Result, error) {
	return func(_ process.Result, err error) { t.Helper(); must(t, err) }
}

func TestDeadlinePassesDuringAnUpgrade(t *testing.T) {
	b := newBed(t)
	x := b.box()
	bin := marked(t, markPlain)
	s := x.spec("sleep", "100")
	s.Spec.Timeout = 150 * time.Millisecond
	x.start(s)
	held := x.spec("sleep", "100")
	held.Sandbox, held.Spool = b.box().id, x.spool
	held.Spec.ID, held.Spec.Timeout = "held", 150*time.Millisecond
	must(t, b.c.HoldClock(ctx(t), held.Sandbox, true))
	x.start(held)
	if i := b.ensure(bin); !i.Upgraded {
		t.Fatalf("%+v", i)
	}
	if r, _, _ := finishCommand(t, b.find(x, s.Spec.ID)); r.Status != process.TimedOut || r.Wall < s.Spec.Timeout || r.Wall > 5*time.Second {
		t.Fatalf("%+v", r)
	}
	must(t, b.c.HoldClock(ctx(t), held.Sandbox, false))
	p, err := b.c.Process(ctx(t), held.Sandbox, "held")
	must(t, err)
	if r, _, _ := finishCommand(t, p); r.Status != process.TimedOut || r.Held == 0 || r.Wall < r.Held+held.Spec.Timeout {
		t.Fatalf("%+v", r)
	}
}

func TestClockThatRanOutMeanwhileFires(t *testing.T) {
	old := newClock(time.Second, func() { t.Error("the old one fired") })
	old.start(false)
	old.pause()
	fired := make(chan struct{}, 1)
	c := newClock(time.Second, func() { fired <- struct{}{} })
	c.restore(old.state(), 2*time.Second)
	select {
	case <-fired:
		t.Fatal("fired before it was resumed")
	default:
	}
	c.resume()
	<-fired
	c.stop()
}

func TestShellIsEnteredAfterAnUpgrade(t *testing.T) {
	b := newBed(t)
	x, _ := b.spawn(nil)
	b.upgrade(markPlain)
	must(t, b.c.Enter(ctx(t), EnterSpec{ID: x.id, As: "renamed", Root: root(t, testBase), Hostname: "later"}))
	x.id = "renamed"
	b.upgrade(markOther)
	if _, out, _ := x.run(x.sh("hostname; ls /dev/null /sys/known; cat /proc/1/comm")); out != "later\n/dev/null\n/sys/known\ninit\n" {
		t.Fatalf("%q", out)
	}
}

// TestOtherNativeFormat: forkers and PID 1s of another time are not asked for
// what they would not understand.
func TestOtherNativeFormat(t *testing.T) {
	b := newBed(t)
	x := b.box()
	shell, _ := b.spawn(nil)
	p := x.start(x.spec("sleep", "100"))
	forkers := func() string {
		procs, err := os.ReadFile(b.o.Cgroup + "/cgroup.procs")
		must(t, err)
		return string(procs)
	}
	before := forkers()
	b.upgrade(markOther)
	if now := forkers(); now != before {
		t.Fatalf("forkers were replaced for nothing: %q, %q", before, now)
	}
	b.upgrade(markNative)
	poll(t, "new forkers", func() bool {
		now := strings.Fields(forkers())
		return len(now) == 3 && now[2] != strings.Fields(before)[2]
	})
	if e := <-b.c.Events(); e.Type != SandboxExited || e.Sandbox != shell.id {
		t.Fatalf("%+v, want the end of the shell", e)
	}
	if _, out, _ := x.run(x.sh("echo new")); out != "new\n" {
		t.Fatalf("%q", out)
	}
	must(t, b.find(x, p.Spec().ID).Kill(ctx(t)))
}

func TestFileHelperOutlivesAnUpgrade(t *testing.T) {
	needRoot(t)
	helper := program(t, "helper")
	b := newBed(t, func(o *Options) { o.Command = []string{helper} })
	x := b.box()
	group := filepath.Join(b.group, "files")
	must(t, os.Mkdir(group, 0o755))
	f, err := b.c.StartFiles(ctx(t), FilesSpec{Sandbox: x.id, UID: 1000, GID: 1000, Cgroup: group})
	must(t, err)
	defer func() { _ = f.Close() }()
	image, err := os.ReadFile(helper)
	must(t, err)
	bin, err := linux.SealedFile("dsec-hold", append(image, markPlain))
	must(t, err)
	defer func() { _ = bin.Close() }()
	if i := b.ensure(bin); !i.Upgraded {
		t.Fatalf("%+v", i)
	}
	again, err := b.c.StartFiles(ctx(t), FilesSpec{Sandbox: x.id, UID: 1001, GID: 1001, Cgroup: group})
	must(t, err)
	defer func() { _ = again.Close() }()
	for uid, c := range map[int]*os.File{1000: f, 1001: again} {
		_, err = c.Write([]byte("hi"))
		must(t, err)
		buf := make([]byte, 100)
		n, err := c.Read(buf)
		if err != nil || string(buf[:n]) != fmt.Sprintf("%d hi", uid) {
			t.Fatalf("%q %v", buf[:n], err)
		}
	}
	must(t, b.c.KillSandbox(ctx(t), x.id))
	poll(t, "helpers to end with the sandbox", func() bool { return os.Remove(group) == nil })
}

func TestSandboxesDieWithAnUpgradedHold(t *testing.T) {
	b := newBed(t)
	x := b.box()
	x.start(x.sh("setsid sleep 300 & sleep 300"))
	b.upgrade(markPlain)
	l, err := b.c.List(ctx(t))
	must(t, err)
	must(t, unix.Kill(b.c.Info().PID, unix.SIGKILL))
	for _, pid := range []int{l[0].PID, l[0].Execs[0].PID} {
		poll(t, "process to end", func() bool { return ended(pid) })
	}
	poll(t, "groups to empty", func() bool {
		_ = os.Remove(x.group + "/exec-e1")
		return os.Remove(x.group) == nil
	})
	if i := b.ensure(b.o.Binary); i.Adopted || i.Upgraded {
		t.Fatalf("%+v", i)
	}
}

// TestFailedUpgradeChangesNothing: a program that does not run, one that does
// not take the state, and one that the kernel refuses at the last moment.
func TestFailedUpgradeChangesNothing(t *testing.T) {
	b := newBed(t)
	x := b.box()
	counting := x.start(x.sh("i=0; while [ $i -lt 3000 ]; do i=$((i+1)); echo $i; done"))
	was := b.c.Info()
	garbage, err := linux.SealedFile("garbage", []byte("not a program"))
	must(t, err)
	defer func() { _ = garbage.Close() }()
	no, err := os.Open("/bin/false")
	must(t, err)
	defer func() { _ = no.Close() }()
	for _, c := range []struct {
		f    *os.File
		text [2]string // of the first and the second try
	}{{garbage, [2]string{"exec format error", "exec format error"}}, {no, [2]string{"exit status 1", "exit status 1"}},
		{marked(t, markDies), [2]string{"execve: permission denied", "ask the new program"}}} {
		for _, text := range c.text {
			i := b.ensure(c.f)
			if i.Upgraded || !i.Adopted || i.Stale == nil || i.Digest != was.Digest || i.PID != was.PID {
				t.Fatalf("%+v", i)
			}
			if dsec.ClassOf(i.Stale) != dsec.Unsupported || !strings.Contains(i.Stale.Error(), text) {
				t.Fatalf("%v, want %s", i.Stale, text)
			}
			if _, out, _ := x.run(x.sh("echo on")); out != "on\n" {
				t.Fatalf("%q", out)
			}
		}
	}
	r, out, _ := finishCommand(t, b.find(x, counting.Spec().ID))
	want := ""
	for i := 1; i <= 3000; i++ {
		want += fmt.Sprintln(i)
	}
	if out != want || r.Stdout.Total != int64(len(want)) {
		t.Fatalf("%d bytes, want %d", len(out), len(want))
	}
	b.upgrade(markPlain)
}

// TestForeignClientMayOnlyUpgrade speaks as an agent of another time would.
func TestForeignClientMayOnlyUpgrade(t *testing.T) {
	b := newBed(t)
	x := b.box()
	waited(t)(x.start(x.spec("true")).Wait(ctx(t))) // an end that it must not be told
	_ = b.c.Close()
	for _, o := range []op{opList, opUpgrade} {
		c, reply, version := foreign(t, b.o.Socket)
		var h wireHello
		must(t, json.Unmarshal(reply, &h))
		if h.Protocol != protocolVersion || version != protocolVersion || h.Digest == "" {
			t.Fatalf("%+v %d", h, version)
		}
		var files []int
		if o == opUpgrade {
			files = []int{fdOf(marked(t, markPlain))}
		}
		send(t, c, o, files)
		if reply, _, _ := receive(t, c); len(reply) != 0 {
			t.Fatalf("%d: %q", o, reply)
		}
		_ = c.Close()
	}
	c, err := Dial(ctx(t), b.o.Socket)
	must(t, err)
	b.c = c
	want, err := digestOf(marked(t, markPlain))
	must(t, err)
	if i := c.Info(); i.Digest != want {
		t.Fatalf("%+v, want %s", i, want)
	}
}

// foreign greets the hold, once it has no other client.
func foreign(t *testing.T, socket string) (c *net.UnixConn, reply []byte, version int) {
	t.Helper()
	poll(t, "hello", func() bool {
		var err error
		c, err = net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: socket, Net: "unixpacket"})
		must(t, err)
		send(t, c, opHello, nil)
		var bad bool
		if reply, version, bad = receive(t, c); bad {
			_ = c.Close()
		}
		return !bad
	})
	return c, reply, version
}

// send sends a frame of another version.
func send(t *testing.T, c *net.UnixConn, o op, fds []int) {
	t.Helper()
	b := make([]byte, frameHeader+2)
	copy(b, []byte{0x44, 0x48, 200, 0, byte(o)})
	b[12], b[16] = 2, 1
	copy(b[frameHeader:], "{}")
	_, _, err := c.WriteMsgUnix(b, unix.UnixRights(fds...), nil)
	must(t, err)
}

// receive returns the body and the version of a frame, and whether it is an
// error; nothing if the hold hung up.
func receive(t *testing.T, c *net.UnixConn) ([]byte, int, bool) {
	t.Helper()
	b := make([]byte, 64<<10)
	n, err := c.Read(b)
	if err != nil || n == 0 {
		return nil, 0, false
	}
	if !bytes.Equal(b[:2], []byte{0x44, 0x48}) || n < frameHeader {
		t.Fatalf("%q", b[:n])
	}
	return b[frameHeader:n], int(b[2]), b[8]&flagError != 0
}
