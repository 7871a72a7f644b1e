package hold

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/process"
)

// crashRole makes the test binary a client that starts a command, follows its
// output and waits to be killed.
const crashRole = "crash-client"

func crashClient(args []string) {
	fail := func(err error) {
		if err != nil {
			fmt.Println("error", err)
			os.Exit(1)
		}
	}
	c, err := Dial(context.Background(), args[0])
	fail(err)
	var s ExecSpec
	fail(json.Unmarshal([]byte(args[1]), &s))
	p, err := c.Exec(context.Background(), s)
	fail(err)
	r, err := p.Follow(context.Background(), process.Stdout, 0)
	fail(err)
	pos := int64(0)
	for {
		chunk, err := r.Next(context.Background())
		fail(err)
		pos = chunk.Offset + int64(len(chunk.Data))
		fmt.Println(pos)
	}
}

func TestAgentIsKilledAndComesBack(t *testing.T) {
	b := newBed(t)
	x := b.box()
	must(t, b.c.Close())
	s := x.sh("seq 1 1000; sleep 0.7; seq 1001 2000; exit 5")
	arg, err := json.Marshal(s)
	must(t, err)
	agent := exec.Command("/proc/self/exe", crashRole, b.o.Socket, string(arg))
	out, err := agent.StdoutPipe()
	must(t, err)
	must(t, agent.Start())
	buf := make([]byte, 64)
	n, err := out.Read(buf)
	must(t, err)
	first := strings.SplitN(string(buf[:n]), "\n", 2)[0]
	pos, err := strconv.ParseInt(first, 10, 64)
	if err != nil {
		t.Fatal(first)
	}
	must(t, agent.Process.Kill())
	_ = agent.Wait()

	c, err := Ensure(ctx(t), b.o)
	must(t, err)
	b.c = c
	if !c.Info().Adopted {
		t.Fatal("another hold")
	}
	list, err := c.List(ctx(t))
	must(t, err)
	if len(list) != 1 || len(list[0].Execs) != 1 || list[0].Execs[0].Ended || list[0].Execs[0].Spec.Argv[2] != s.Spec.Argv[2] {
		t.Fatalf("%+v", list)
	}
	p, err := c.Process(ctx(t), x.id, s.Spec.ID)
	must(t, err)
	from, rest := follow(t, p, process.Stdout, pos)
	res, err := p.Wait(ctx(t))
	must(t, err)
	want := ""
	for i := 1; i <= 2000; i++ {
		want += strconv.Itoa(i) + "\n"
	}
	if from != pos || string(rest) != want[pos:] || res.ExitCode != 5 || res.Stdout.Total != int64(len(want)) {
		t.Fatalf("%d %d %d %+v", pos, from, len(rest), res)
	}
	if e := <-c.Events(); e.Exec != s.Spec.ID || e.Result.ExitCode != 5 {
		t.Fatalf("%+v", e)
	}
}

func TestDeadlineFiresWithoutAnAgent(t *testing.T) {
	b := newBed(t)
	x := b.box()
	s := x.sh("echo begun; sleep 100")
	s.Spec.Timeout = 200 * time.Millisecond
	x.start(s)
	must(t, b.c.Close())
	poll(t, "deadline", func() bool { return os.IsNotExist(stat(x.group + "/exec-" + s.Spec.ID)) })
	c, err := Dial(ctx(t), b.o.Socket)
	must(t, err)
	b.c = c
	p, err := c.Process(ctx(t), x.id, s.Spec.ID)
	must(t, err)
	if r, out, _ := finishCommand(t, p); r.Status != process.TimedOut || out != "begun\n" {
		t.Fatalf("%+v %q", r, out)
	}
}

func TestSecondClientIsRefusedWhileTheFirstLives(t *testing.T) {
	b := newBed(t)
	short, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	_, err := Dial(short, b.o.Socket)
	wantClass(t, err, dsec.Conflict, "live client")
}

func TestSandboxesDieWithTheHold(t *testing.T) {
	b := newBed(t)
	x := b.box()
	x.start(x.sh("seq 1 9999; setsid sleep 300 & sleep 300"))
	poll(t, "spool", func() bool { return stat(x.spool+"/e1.out") == nil })
	list, err := b.c.List(ctx(t))
	must(t, err)
	init, main := list[0].PID, list[0].Execs[0].PID
	must(t, unix.Kill(b.c.Info().PID, unix.SIGKILL))
	<-b.c.Done()
	_, err = b.c.List(ctx(t))
	wantClass(t, err, dsec.Unavailable, "")
	for _, pid := range []int{init, main} {
		poll(t, "process to end", func() bool { return ended(pid) })
	}
	poll(t, "groups to empty", func() bool {
		_ = os.Remove(x.group + "/exec-e1")
		return os.Remove(x.group) == nil
	})
	must(t, os.Mkdir(x.group, 0o755))
	_ = b.c.Close()
	c, err := Ensure(ctx(t), b.o)
	must(t, err)
	b.c = c
	if c.Info().Adopted {
		t.Fatal("the dead hold was adopted")
	}
	spool, err := os.Open(x.spool + "/e1.out")
	must(t, err)
	defer func() { _ = spool.Close() }()
	if head, _, _, err := process.OpenSpool(spool).Kept(); err != nil || !strings.HasPrefix(string(head), "1\n2\n") {
		t.Fatal(len(head), err)
	}
}

func TestKilledForkerIsReplaced(t *testing.T) {
	self, err := os.Executable()
	must(t, err)
	b := newBed(t, func(o *Options) { // what who starts us ignores is not ignored inside
		o.Command = []string{"/bin/sh", "-c", `trap "" HUP USR1 USR2; exec "$0" "$@"`, self}
	})
	x := b.box()
	procs, err := os.ReadFile(b.o.Cgroup + "/cgroup.procs")
	must(t, err)
	for _, p := range strings.Fields(string(procs)) {
		if pid, _ := strconv.Atoi(p); pid != b.c.Info().PID {
			must(t, unix.Kill(pid, unix.SIGKILL))
		}
	}
	poll(t, "new forkers", func() bool {
		now, err := os.ReadFile(b.o.Cgroup + "/cgroup.procs")
		return err == nil && len(strings.Fields(string(now))) == 3 && string(now) != string(procs)
	})
	for range 4 {
		if _, out, _ := x.run(x.spec("grep", "SigIgn", "/proc/self/status")); out != "SigIgn:\t0000000000000000\n" {
			t.Fatalf("%q", out)
		}
	}
}

func TestA16_CancelledStartsLeaveNothing(t *testing.T) {
	b := newBed(t)
	x := b.box()
	n := 1000
	if testing.Short() {
		n = 100
	}
	var wg sync.WaitGroup
	work := make(chan int)
	for range 4 {
		wg.Go(func() {
			for i := range work {
				c, cancel := context.WithTimeout(context.Background(), time.Duration(i%40)*100*time.Microsecond)
				p, err := b.c.Exec(c, x.spec("sleep", "1000"))
				cancel()
				switch {
				case err == nil:
					if err := p.Kill(context.Background()); err != nil {
						t.Error(err)
					}
					if _, err := p.Wait(context.Background()); err != nil {
						t.Error(err)
					}
					if err := p.Release(context.Background()); err != nil {
						t.Error(err)
					}
				case dsec.ClassOf(err) != dsec.Timeout:
					t.Error(err)
				}
			}
		})
	}
	for i := range n {
		work <- i
	}
	close(work)
	wg.Wait()
	poll(t, "cancelled starts to be undone", func() bool {
		list, err := b.c.List(ctx(t))
		must(t, err)
		return len(list[0].Execs) == 0
	})
	left, err := filepath.Glob(x.group + "/exec-*")
	if err != nil || len(left) != 0 {
		t.Fatal(left, err)
	}
	if files, err := os.ReadDir(x.spool); err != nil || len(files) != 0 {
		t.Fatal(files, err)
	}
}

// TestNothingIsLeft makes and removes many sandboxes with commands in flight
// and compares what the hold has open.
func TestNothingIsLeft(t *testing.T) {
	b := newBed(t)
	count := func() (fds, mounts int) {
		d, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", b.c.Info().PID))
		must(t, err)
		m, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", b.c.Info().PID))
		must(t, err)
		return len(d), strings.Count(string(m), "\n")
	}
	cycle := func() {
		x := b.box()
		x.run(x.sh("echo hi"))
		x.start(x.sh("sleep 1000 & setsid sleep 1000 & wait"))
		s := x.sh("cat")
		s.Spec.PTY = &process.Size{Rows: 1, Cols: 1}
		x.start(s)
		must(t, b.c.RemoveSandbox(ctx(t), x.id))
		must(t, b.c.RemoveSandbox(ctx(t), x.id))
		must(t, os.Remove(x.group))
		if files, err := os.ReadDir(x.spool); err != nil || len(files) != 0 {
			t.Fatal(files, err)
		}
	}
	cycle()
	fds, mounts := count()
	n := 50
	if testing.Short() {
		n = 10
	}
	for range n {
		cycle()
	}
	poll(t, "descriptors to be closed", func() bool {
		f, m := count()
		return f <= fds && m <= mounts
	})
	idle := 5
	for range idle {
		b.box()
	}
	poll(t, "idle sandboxes to hold at most 4 descriptors", func() bool {
		f, _ := count()
		return f <= fds+4*idle
	})
}

// TestTooManyCommandsAreRefused: the hold must not run out of descriptors for
// the commands of others.
func TestTooManyCommandsAreRefused(t *testing.T) {
	self, err := os.Executable()
	must(t, err)
	b := newBed(t, func(o *Options) { // with so few, the least that is allowed is 64
		o.Command = []string{"/bin/sh", "-c", `ulimit -n 600; exec "$0" "$@"`, self}
	})
	x := b.box()
	var procs []process.Process
	for range 64 {
		procs = append(procs, x.start(x.spec("sleep", "60")))
	}
	_, err = b.c.Exec(ctx(t), x.spec("sleep", "60"))
	wantClass(t, err, "resource_exhausted", "64 commands run")
	must(t, procs[0].Kill(ctx(t)))
	_, err = procs[0].Wait(ctx(t))
	must(t, err)
	poll(t, "room for one more", func() bool {
		p, err := b.c.Exec(ctx(t), x.spec("true"))
		if err != nil {
			return false
		}
		finishCommand(t, p)
		return true
	})
}
