package hold

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/process"
)

func TestExecReturnsOutputAndCode(t *testing.T) {
	x := newBed(t).box()
	r, out, errs := x.run(x.sh("echo out; echo err >&2; id -u; cat /proc/1/comm; hostname; exit 7"))
	if r.Status != process.Exited || r.ExitCode != 7 || out != "out\n0\ninit\nbox\n" || errs != "err\n" {
		t.Fatalf("%+v %q %q", r, out, errs)
	}
	if r.Stdout.Total != int64(len(out)) || r.Stderr.Total != 4 || r.Wall <= 0 || r.CPU <= 0 || r.Started.IsZero() {
		t.Fatalf("%+v", r)
	}
}

func TestExecRunsAsAnotherUserWithoutCapabilities(t *testing.T) {
	x := newBed(t).box()
	s := x.sh("id -u; id -g; id -G; grep -E 'Cap(Prm|Eff|Bnd|Amb)|NoNewPrivs|Seccomp:' /proc/self/status; ulimit -n; pwd; umask; cat /proc/self/oom_score_adj")
	s.UID, s.GID, s.Groups, s.Caps, s.NoNewPrivs, s.Cwd = 1000, 1001, []uint32{1001, 7}, Caps{Bounding: 1}, true, "/tmp"
	s.Rlimits = []Rlimit{{Resource: 7, Cur: 100, Max: 200}}
	s.Seccomp = []byte{6, 0, 0, 0, 0, 0, 0xff, 0x7f} // return ALLOW
	r, out, errs := x.run(s)
	want := "1000\n1001\n1001 7\nCapPrm:\t0000000000000000\nCapEff:\t0000000000000000\nCapBnd:\t0000000000000001\nCapAmb:\t0000000000000000\nNoNewPrivs:\t1\nSeccomp:\t2\n100\n/tmp\n0022\n500\n"
	if r.ExitCode != 0 || out != want {
		t.Fatalf("%+v\n%q\n%q %q", r, out, want, errs)
	}
}

func TestAmbientCapabilitiesReachTheUser(t *testing.T) {
	x := newBed(t).box()
	s := x.sh("grep CapEff /proc/self/status")
	s.UID, s.GID, s.Caps = 1000, 1000, Caps{Bounding: 1 << 10, Ambient: 1 << 10}
	if r, out, errs := x.run(s); r.ExitCode != 0 || out != "CapEff:\t0000000000000400\n" {
		t.Fatalf("%+v %q %q", r, out, errs)
	}
}

func TestExecNamesWhatIsWrong(t *testing.T) {
	b := newBed(t)
	x := b.box()
	for _, c := range []struct {
		spec  ExecSpec
		class dsec.Class
		text  string
	}{
		{x.spec("nosuch"), dsec.FileNotFound, `"nosuch"`},
		{x.spec("/etc/passwd"), dsec.PermissionDenied, `"/etc/passwd"`},
		{x.spec(""), dsec.Invalid, ""},
	} {
		_, err := b.c.Exec(ctx(t), c.spec)
		wantClass(t, err, c.class, c.text)
	}
	_, err := b.c.Process(ctx(t), x.id, "e1")
	wantClass(t, err, dsec.NotFound, "e1")
	left, err := os.ReadDir(x.spool)
	if err != nil || len(left) != 0 {
		t.Fatal(left, err)
	}
}

func TestB10_MissingWorkdirIsNamed(t *testing.T) {
	b := newBed(t)
	x := b.box()
	s := x.spec("pwd")
	s.Cwd = "/nope"
	_, err := b.c.Exec(ctx(t), s)
	wantClass(t, err, dsec.FileNotFound, "/nope")
}

func TestA1_TimeoutIsTyped(t *testing.T) {
	x := newBed(t).box()
	s := x.spec("sleep", "10")
	s.Spec.Timeout = 300 * time.Millisecond
	r, _, _ := x.run(s)
	if r.Status != process.TimedOut || r.ExitCode != 137 || r.Wall < s.Spec.Timeout || r.Wall > 3*time.Second {
		t.Fatalf("%+v", r)
	}
}

func TestA3_BackgroundDoesNotHoldTheResult(t *testing.T) {
	b := newBed(t)
	x := b.box()
	p := x.start(x.sh("(sleep 300 &) ; echo ok"))
	begin := time.Now()
	r, err := p.Wait(ctx(t))
	must(t, err)
	if took := time.Since(begin); took > time.Second || r.ExitCode != 0 {
		t.Fatal(took, r)
	}
	if _, data := follow(t, p, process.Stdout, 0); string(data) != "ok\n" {
		t.Fatalf("%q", data)
	}
	if _, out, _ := x.run(x.sh("ps | grep -c '[s]leep 300'")); out != "1\n" {
		t.Fatalf("the daemon did not live on: %q", out)
	}
	wantClass(t, p.Signal(ctx(t), 15), dsec.IllegalState, "")
	must(t, p.Kill(ctx(t))) // what it left behind
	poll(t, "daemon to end", func() bool {
		_, out, _ := x.run(x.sh("ps | grep -c '[s]leep 300'"))
		return out == "0\n"
	})
}

func TestA5_TimeoutKillsTree(t *testing.T) {
	x := newBed(t).box()
	s := x.sh("trap '' TERM; setsid sh -c 'trap \"\" TERM; while :; do :; done' & sh -c 'while :; do sleep 0.1; done' & while :; do :; done")
	s.Spec.Timeout = 500 * time.Millisecond
	if r, _, _ := x.run(s); r.Status != process.TimedOut {
		t.Fatalf("%+v", r)
	}
	poll(t, "tree to end", func() bool {
		b, err := os.ReadFile(x.group + "/cgroup.procs")
		return err == nil && bytes.Count(b, []byte("\n")) == 1 && os.IsNotExist(stat(x.group+"/exec-e1"))
	})
}

func stat(p string) error { _, err := os.Stat(p); return err }

func TestA6_ExitBySignal(t *testing.T) {
	x := newBed(t).box()
	s := x.sh("kill -TERM $$")
	s.Spec.Timeout = 30 * time.Second
	if r, _, _ := x.run(s); r.Status != process.Exited || r.ExitCode != 143 || r.Signal != 15 {
		t.Fatalf("%+v", r)
	}
}

func TestA8_SegfaultReturnsAtOnce(t *testing.T) {
	x := newBed(t).box()
	if r, _, _ := x.run(x.sh("kill -SEGV $$")); r.ExitCode != 139 || r.Wall > time.Second {
		t.Fatalf("%+v", r)
	}
}

func TestA10_DeadSandboxIsGone(t *testing.T) {
	b := newBed(t)
	x := b.box()
	must(t, b.c.KillSandbox(ctx(t), x.id))
	_, err := b.c.Exec(ctx(t), x.spec("true"))
	wantClass(t, err, dsec.SandboxGone, x.id)
}

func TestA11_PartialOutputIsKept(t *testing.T) {
	x := newBed(t).box()
	s := x.sh("echo A; sleep 9")
	s.Spec.Timeout = 300 * time.Millisecond
	if r, out, _ := x.run(s); r.Status != process.TimedOut || out != "A\n" {
		t.Fatalf("%+v %q", r, out)
	}
}

func TestA13_DetachAndReattach(t *testing.T) {
	x := newBed(t).box()
	p := x.start(x.sh("seq 1 1000; sleep 0.3; seq 1001 2000"))
	r, err := p.Follow(ctx(t), process.Stdout, 0)
	must(t, err)
	c, err := r.Next(ctx(t))
	must(t, err)
	seen := len(c.Data)
	must(t, r.Close())
	if _, err := p.Wait(ctx(t)); err != nil {
		t.Fatal(err)
	}
	_, all := follow(t, p, process.Stdout, 0)
	if lines := strings.Count(string(all), "\n"); lines != 2000 || !strings.HasPrefix(string(all), "1\n2\n") {
		t.Fatal(lines)
	}
	if first, rest := follow(t, p, process.Stdout, int64(seen)); first != int64(seen) || string(rest) != string(all[seen:]) {
		t.Fatal(first, seen)
	}
}

func TestA15_KillAndEndOfSandboxRace(t *testing.T) {
	b := newBed(t)
	x := b.box()
	p := x.start(x.spec("sleep", "300"))
	begin := time.Now()
	must(t, b.c.KillSandbox(ctx(t), x.id))
	r, err := p.Wait(ctx(t))
	must(t, err)
	if r.Status != process.Killed || time.Since(begin) > 2*time.Second {
		t.Fatalf("%+v", r)
	}
	must(t, b.c.KillSandbox(ctx(t), x.id))
	must(t, p.Kill(ctx(t)))
}

func TestA26_OrphansAreReaped(t *testing.T) {
	x := newBed(t).box()
	n := 1000
	if testing.Short() {
		n = 100
	}
	r, out, errs := x.run(x.sh(fmt.Sprintf("i=0; while [ $i -lt %d ]; do sh -c '(sleep 0 &)'; i=$((i+1)); done; sleep 0.3; ps -o stat | grep -c Z", n)))
	if out != "0\n" {
		t.Fatalf("%+v %q %q", r, out, errs)
	}
}

func TestB3_StdinIsAtItsEnd(t *testing.T) {
	x := newBed(t).box()
	if r, out, _ := x.run(x.sh("cat; echo done")); out != "done\n" || r.Wall > time.Second {
		t.Fatalf("%+v %q", r, out)
	}
}

func TestB5_StdinPassesBytes(t *testing.T) {
	x := newBed(t).box()
	s := x.spec("cat")
	s.Spec.Stdin = true
	p := x.start(s)
	in := "\xc3\x28\x00\xff\x01\x02 $HOME `id` '\"\\ \r\n"
	_, err := p.Write(ctx(t), []byte(in))
	must(t, err)
	must(t, p.CloseStdin(ctx(t)))
	if r, out, _ := finishCommand(t, p); out != in || r.ExitCode != 0 {
		t.Fatalf("%+v %q", r, out)
	}
}

func TestStdinBlocksWhileTheCommandDoesNotRead(t *testing.T) {
	x := newBed(t).box()
	s := x.sh("sleep 100")
	s.Spec.Stdin = true
	p := x.start(s)
	short, cancel := context.WithTimeout(ctx(t), 200*time.Millisecond)
	defer cancel()
	n, err := p.Write(short, make([]byte, 1<<20))
	wantClass(t, err, dsec.Timeout, "")
	if n <= 0 || n >= 1<<20 {
		t.Fatal(n)
	}
	must(t, p.Kill(ctx(t)))
	if r, _, _ := finishCommand(t, p); r.Status != process.Killed {
		t.Fatalf("%+v", r)
	}
}

func TestB6_LargeArguments(t *testing.T) {
	b := newBed(t)
	x := b.box()
	argv := []string{"printf", "%s"}
	for range 16 {
		argv = append(argv, strings.Repeat("x", 64<<10))
	}
	if r, out, errs := x.run(x.spec(argv...)); len(out) != 1<<20 {
		t.Fatalf("%+v %d %q", r, len(out), errs)
	}
	_, err := b.c.Exec(ctx(t), x.spec("echo", strings.Repeat("x", 200<<10)))
	wantClass(t, err, dsec.Invalid, "argument list too long")
	s := x.spec("printf", "%s", "\xff\xfe\x80")
	if _, out, _ := x.run(s); out != "\xff\xfe\x80" {
		t.Fatalf("%q", out)
	}
}

func TestB13_TerminalHasSizeAndResizes(t *testing.T) {
	x := newBed(t).box()
	s := x.sh("stty size; tty; read a; stty size; echo got $a")
	s.Spec.PTY = &process.Size{Rows: 30, Cols: 100}
	p := x.start(s)
	r, err := p.Follow(ctx(t), process.Stdout, 0)
	must(t, err)
	var text string
	for !strings.Contains(text, "/dev/pts/") {
		c, err := r.Next(ctx(t))
		must(t, err)
		text += string(c.Data)
	}
	must(t, r.Close())
	must(t, p.Resize(ctx(t), process.Size{Rows: 40, Cols: 120}))
	_, err = p.Write(ctx(t), []byte("hello\n"))
	must(t, err)
	res, out, _ := finishCommand(t, p)
	want := "30 100\r\n/dev/pts/0\r\nhello\r\n40 120\r\ngot hello\r\n"
	if res.ExitCode != 0 || out != want {
		t.Fatalf("%+v %q, want %q", res, out, want)
	}
}

func TestTerminalHangsUpWhatIsLeft(t *testing.T) {
	x := newBed(t).box()
	s := x.sh("trap 'exit 3' HUP; (sleep 300 &); sleep 0.1; exit 0")
	s.Spec.PTY = &process.Size{Rows: 24, Cols: 80}
	if r, _, _ := x.run(s); r.ExitCode != 0 {
		t.Fatalf("%+v", r)
	}
	poll(t, "exec cgroup to go", func() bool {
		_ = os.Remove(x.group + "/exec-e1")
		return os.IsNotExist(stat(x.group + "/exec-e1"))
	})
}

func TestC3_ExactBytes(t *testing.T) {
	x := newBed(t).box()
	if _, out, _ := x.run(x.spec("printf", `a\n\nb\n\n\nc\n`)); out != "a\n\nb\n\n\nc\n" {
		t.Fatalf("%q", out)
	}
}

func TestC5_FloodIsBounded(t *testing.T) {
	b := newBed(t)
	x := b.box()
	s := x.spec("yes")
	s.Spec.Timeout = time.Second
	p := x.start(s)
	r, err := p.Wait(ctx(t))
	must(t, err)
	head, tail, off, err := p.Kept(ctx(t), process.Stdout)
	must(t, err)
	if r.Status != process.TimedOut || !r.Stdout.Truncated || len(head) != 1<<20 || len(tail) != 1<<20 || off != r.Stdout.Total-1<<20 {
		t.Fatalf("%+v %d %d %d", r, len(head), len(tail), off)
	}
	if r.Stdout.Dropped != r.Stdout.Total-2<<20 {
		t.Fatalf("%+v", r.Stdout)
	}
	if st, err := os.Stat(x.spool + "/e1.out"); err != nil || st.Size() > 4096+2<<20 {
		t.Fatal(st, err)
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", b.c.Info().PID))
	must(t, err)
	var rss int
	for line := range strings.Lines(string(status)) {
		_, _ = fmt.Sscanf(line, "VmRSS: %d", &rss)
	}
	if rss == 0 || rss > 50<<10 {
		t.Fatalf("the hold has %d KiB", rss)
	}
	if err := stat(x.spool + "/e1.err"); !os.IsNotExist(err) {
		t.Fatal("a file for an empty stream", err)
	}
}

func TestC6_OutputLimit(t *testing.T) {
	x := newBed(t).box()
	s := x.spec("head", "-c", "11534336", "/dev/zero")
	s.Spec.OnLimit, s.Spec.Head, s.Spec.Tail = process.Kill, 5<<20, 5<<20
	if r, out, _ := x.run(s); r.Status != process.OutputLimit || len(out) != 10<<20 {
		t.Fatalf("%+v %d", r, len(out))
	}
	s = x.spec("head", "-c", "11534336", "/dev/zero")
	if r, out, _ := x.run(s); r.Status != process.Exited || r.ExitCode != 0 || !r.Stdout.Truncated || len(out) != 2<<20 || r.Stdout.Total != 11<<20 {
		t.Fatalf("%+v %d", r, len(out))
	}
}

func TestFollowerGetsEverything(t *testing.T) {
	x := newBed(t).box()
	s := x.spec("head", "-c", "67108864", "/dev/urandom")
	p := x.start(s)
	first, data := follow(t, p, process.Stdout, 0)
	r, err := p.Wait(ctx(t))
	must(t, err)
	if first != 0 || len(data) != 64<<20 || r.Stdout.Dropped != 0 || r.Stdout.Total != 64<<20 {
		t.Fatalf("%d %d %+v", first, len(data), r)
	}
	head, tail, off, err := p.Kept(ctx(t), process.Stdout)
	must(t, err)
	if !bytes.Equal(head, data[:1<<20]) || !bytes.Equal(tail, data[off:]) {
		t.Fatal("kept bytes differ from followed ones")
	}
}

func TestSlowFollowerSlowsTheCommand(t *testing.T) {
	x := newBed(t).box()
	p := x.start(x.spec("yes"))
	r, err := p.Follow(ctx(t), process.Stdout, 0)
	must(t, err)
	var pos int64
	for range 40 {
		c, err := r.Next(ctx(t))
		must(t, err)
		if c.Offset != pos {
			t.Fatalf("jumped from %d to %d", pos, c.Offset)
		}
		pos += int64(len(c.Data))
	}
	must(t, p.Kill(ctx(t)))
	if _, err := p.Wait(ctx(t)); err != nil {
		t.Fatal(err)
	}
	must(t, r.Close())
}

func TestSameIDIsTheSameCommand(t *testing.T) {
	b := newBed(t)
	x := b.box()
	s := x.sh("echo once; sleep 0.2")
	s.Spec.Env = map[string]string{"B": "2", "A": "1"}
	p, q := x.start(s), x.start(s)
	if _, err := q.Wait(ctx(t)); err != nil {
		t.Fatal(err)
	}
	other := s
	other.Spec.Argv = []string{"true"}
	_, err := b.c.Exec(ctx(t), other)
	wantClass(t, err, dsec.Conflict, s.Spec.ID)
	if _, out, _ := finishCommand(t, p); out != "once\n" {
		t.Fatalf("%q", out)
	}
	must(t, q.Release(ctx(t)))
}

func TestHeldClockStops(t *testing.T) {
	b := newBed(t)
	x := b.box()
	// Longer than its time, but not without what it is held; the rest is for a
	// machine that is busy.
	s := x.sh("sleep 2.5; echo end")
	s.Spec.Timeout = 2 * time.Second
	p := x.start(s)
	must(t, b.c.HoldClock(ctx(t), x.id, true))
	timer := time.NewTimer(1600 * time.Millisecond)
	<-timer.C
	must(t, b.c.HoldClock(ctx(t), x.id, false))
	r, out, _ := finishCommand(t, p)
	if r.Status != process.Exited || out != "end\n" || r.Held < 1500*time.Millisecond || r.Held > r.Wall {
		t.Fatalf("%+v %q", r, out)
	}
}

func TestStoreKeepsDescriptors(t *testing.T) {
	b := newBed(t)
	f, err := os.CreateTemp(b.dir, "kept")
	must(t, err)
	_, err = f.WriteString("hello")
	must(t, err)
	must(t, b.c.Put(ctx(t), "layer/a", f))
	must(t, b.c.Put(ctx(t), "layer/b", f))
	must(t, f.Close())
	names, err := b.c.Names(ctx(t), "layer/")
	if err != nil || fmt.Sprint(names) != "[layer/a layer/b]" {
		t.Fatal(names, err)
	}
	g, err := b.c.Get(ctx(t), "layer/a")
	must(t, err)
	buf := make([]byte, 5)
	_, err = g.ReadAt(buf, 0)
	must(t, err)
	must(t, g.Close())
	must(t, b.c.Drop(ctx(t), "layer/a"))
	must(t, b.c.Drop(ctx(t), "layer/a"))
	_, err = b.c.Get(ctx(t), "layer/a")
	wantClass(t, err, dsec.NotFound, "layer/a")
	if string(buf) != "hello" {
		t.Fatalf("%q", buf)
	}
}

// TestACloseThatWaitsHoldsUpNobody: the end of a mount waits for reads that are being
// made, and those may wait for a loader that gets what it needs from here. Here it is
// a connection that waits for its peer.
func TestACloseThatWaitsHoldsUpNobody(t *testing.T) {
	b := newBed(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer l.Close()
	ours, err := net.Dial("tcp", l.Addr().String())
	must(t, err)
	peer, err := l.Accept()
	must(t, err)
	defer peer.Close()
	must(t, ours.(*net.TCPConn).SetLinger(600))
	must(t, ours.SetWriteDeadline(time.Now().Add(time.Second)))
	for err == nil { // until the buffers are full
		_, err = ours.Write(make([]byte, 64<<10))
	}
	f, err := ours.(*net.TCPConn).File()
	must(t, err)
	must(t, b.c.Put(ctx(t), "waits", f))
	must(t, b.c.Put(ctx(t), "other", f))
	must(t, b.c.Drop(ctx(t), "other")) // not the last one
	must(t, f.Close())
	must(t, ours.Close())
	short, cancel := context.WithTimeout(ctx(t), 300*time.Millisecond)
	defer cancel()
	wantClass(t, b.c.Drop(short, "waits"), dsec.Timeout, "")
	if names, err := b.c.Names(ctx(t), ""); err != nil || len(names) != 0 {
		t.Fatal(names, err)
	}
	must(t, b.c.Close())
	if b.c, err = Dial(ctx(t), b.o.Socket); err != nil {
		t.Fatalf("the next client: %v", err)
	}
}

func TestEventsAreKeptUntilAcknowledged(t *testing.T) {
	b := newBed(t)
	x := b.box()
	p := x.start(x.sh("exit 3"))
	e := <-b.c.Events()
	if e.Type != ExecExited || e.Exec != p.Spec().ID || e.Result.ExitCode != 3 {
		t.Fatalf("%+v", e)
	}
	must(t, b.c.Close())
	c, err := Dial(ctx(t), b.o.Socket)
	must(t, err)
	b.c = c
	if again := <-c.Events(); again.Exec != e.Exec {
		t.Fatalf("%+v", again)
	}
	must(t, c.Ack(ctx(t), e))
	must(t, c.SignalInit(ctx(t), x.id, syscall.SIGKILL))
	if e = <-c.Events(); e.Type != SandboxExited || e.Sandbox != x.id || e.Asked || e.Signal != 9 {
		t.Fatalf("%+v", e)
	}
}

func TestFileHelperIsInsideAndUnseen(t *testing.T) {
	needRoot(t)
	helper, err := os.Open(program(t, "helper"))
	must(t, err)
	defer func() { _ = helper.Close() }()
	b := newBed(t, func(o *Options) { o.Binary = helper })
	x := b.box()
	group := b.group + "/files"
	must(t, os.Mkdir(group, 0o755))
	f, err := b.c.StartFiles(ctx(t), FilesSpec{Sandbox: x.id, UID: 1000, GID: 1000, Cgroup: group})
	must(t, err)
	conn, err := net.FileConn(f)
	must(t, err)
	must(t, f.Close())
	_, err = conn.Write([]byte("hi"))
	must(t, err)
	buf := make([]byte, 100)
	n, err := conn.Read(buf)
	must(t, err)
	if string(buf[:n]) != "1000 hi" {
		t.Fatalf("%q", buf[:n])
	}
	if _, out, _ := x.run(x.sh("ls -d /proc/[0-9]*")); out != "/proc/1\n/proc/2\n" && !strings.HasPrefix(out, "/proc/1\n/proc/") || strings.Count(out, "\n") > 3 {
		t.Fatalf("processes seen: %q", out)
	}
	must(t, conn.Close())
	poll(t, "helper to end", func() bool {
		p, err := os.ReadFile(group + "/cgroup.procs")
		return err == nil && len(p) == 0
	})
}

func TestOpenInReadsTheSandboxsFiles(t *testing.T) {
	b := newBed(t)
	x := b.box()
	f, err := b.c.OpenIn(ctx(t), x.id, "/etc/passwd")
	must(t, err)
	data := make([]byte, 100)
	n, _ := f.Read(data)
	must(t, f.Close())
	if !strings.HasPrefix(string(data[:n]), "root:x:0:0") {
		t.Fatalf("%q", data[:n])
	}
	x.run(x.sh("mkfifo /etc/fifo; ln -s /proc/1/status /etc/out; ln -s ../../../../etc/passwd /etc/in"))
	for _, p := range []string{"/etc/fifo", "/etc/out", "/etc"} {
		_, err = b.c.OpenIn(ctx(t), x.id, p)
		wantClass(t, err, dsec.Invalid, p)
	}
	_, err = b.c.OpenIn(ctx(t), x.id, "/etc/nope")
	wantClass(t, err, dsec.FileNotFound, "nope")
	f, err = b.c.OpenIn(ctx(t), x.id, "/etc/in")
	must(t, err)
	must(t, f.Close())
}
