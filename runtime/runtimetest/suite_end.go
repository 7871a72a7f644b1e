package runtimetest

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
)

var endCases = []suiteCase{
	{"A10_a command in a dead sandbox is SandboxGone", testDeadExec},
	{"A15_destroy ends calls in flight", testDestroyInFlight},
	{"I1_the main process runs out of memory", testMainOOM},
	{"I1_oom=sandbox ends the sandbox", testOOMSandbox},
	{"I3_a command killed for memory exits 137", testExecOOM},
	{"the main process is the command main", testMainCommand},
	{"the end of the main process is the sandbox's", testMainEnd},
	{"stop asks the main process first", testStopGrace},
	{"an exit comes again until it is acknowledged", testExitAgain},
}

func testDeadExec(t *testing.T, e *Env) {
	id := e.create(t, nil)
	p := e.start(t, id, process.Spec{ID: "old", Argv: []string{"sleep", "300"}})
	if err := e.Runtime.Destroy(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	_, err := e.execer(t).Exec(t.Context(), id, process.Spec{Argv: []string{"true"}})
	wantClass(t, err, string(id), dsec.SandboxGone)
	_, err = e.execer(t).Process(t.Context(), id, "old")
	wantClass(t, err, "", dsec.SandboxGone)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	_, err = p.Wait(ctx)
	wantClass(t, err, string(id), dsec.SandboxGone)
}

func testDestroyInFlight(t *testing.T, e *Env) {
	id := e.create(t, nil)
	p := e.start(t, id, process.Spec{Argv: []string{"/bin/sh", "-c", "trap '' TERM; echo up; sleep 300"}, Stdin: true})
	eventually(t, "up", func() bool { return kept(t, p, process.Stdout) == "up\n" })
	r, err := p.Follow(t.Context(), process.Stdout, 3)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	ends := make(chan error, 2)
	go func() { _, err := p.Wait(t.Context()); ends <- err }()
	go func() {
		var err error
		for err == nil {
			var c process.Chunk
			if c, err = r.Next(t.Context()); c.EOF {
				err = dsec.E(dsec.SandboxGone, "end of file", "", nil) // a stream may end as well as break
			}
		}
		ends <- err
	}()
	began := time.Now()
	if err := e.Runtime.Destroy(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		select {
		case err := <-ends:
			wantClass(t, err, "", dsec.SandboxGone)
		case <-time.After(patience):
			t.Fatal("a call in flight hangs")
		}
	}
	if took := time.Since(began); took > 5*time.Second {
		t.Fatalf("took %v", took)
	}
	if err := e.Runtime.Destroy(t.Context(), id); err != nil {
		t.Fatalf("second destroy: %v", err)
	}
}

func (e *Env) hog() []string {
	if e.Hog != nil {
		return e.Hog
	}
	return []string{"tail", "/dev/zero"}
}

func (e *Env) small(s *dsec.Spec) { s.Limits.Memory = cmp.Or(e.Small, 32<<20) }

func testMainOOM(t *testing.T, e *Env) {
	id := e.create(t, func(s *dsec.Spec) { e.small(s); s.Command = e.hog() })
	x := ExitOf(t, e.Runtime, id)
	if x.Cause != dsec.CauseOOM || x.By != dsec.InducedBySelf || len(x.Evidence) == 0 {
		t.Fatalf("%+v", x)
	}
	if s, ok := e.status(t, id); !ok || s.Running {
		t.Fatalf("it was restarted, or is gone: %+v %v", s, ok)
	}
}

func testOOMSandbox(t *testing.T, e *Env) {
	id := e.create(t, func(s *dsec.Spec) { e.small(s); s.OOM = dsec.OOMSandbox })
	e.start(t, id, process.Spec{Argv: e.hog()})
	if x := ExitOf(t, e.Runtime, id); x.Cause != dsec.CauseOOM || len(x.Evidence) == 0 {
		t.Fatalf("%+v", x)
	}
}

func testExecOOM(t *testing.T, e *Env) {
	if r := e.request(t, func(s *dsec.Spec) { s.OOM = dsec.OOMExec }); r.Spec.Isolation != dsec.IsolationDefault {
		// One whose limit knows no commands says so instead of ending more than was agreed.
		e.destroyAtEnd(t, r.ID)
		_, err := e.Runtime.Create(t.Context(), r)
		wantClass(t, err, string(r.Spec.Isolation), dsec.Unsupported)
		return
	}
	id := e.create(t, e.small)
	p := e.start(t, id, process.Spec{Argv: e.hog()})
	if r := wait(t, p); r.ExitCode != 137 || !r.OOM || r.OOMLimit != cmp.Or(e.Small, 32<<20) || r.OOMPeak < 16<<20 || r.Status != process.Exited {
		t.Fatalf("%+v", r)
	}
	if _, out := e.sh(t, id, "echo lives"); out != "lives\n" {
		t.Fatal("the sandbox did not live on")
	}
	if s, err := e.Runtime.Stats(t.Context(), id); err != nil || s.OOMKills < 1 {
		t.Fatalf("%+v %v", s, err)
	}
}

func testMainCommand(t *testing.T, e *Env) {
	id := e.create(t, func(s *dsec.Spec) { s.Command = []string{"/bin/sh", "-c", "echo up; sleep 300"} })
	p, err := e.execer(t).Process(t.Context(), id, "main")
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "its output", func() bool { return kept(t, p, process.Stdout) == "up\n" })
	bad := e.request(t, func(s *dsec.Spec) { s.Command = []string{"/no/such/program"} })
	e.destroyAtEnd(t, bad.ID)
	_, err = e.Runtime.Create(t.Context(), bad)
	wantClass(t, err, "/no/such/program", dsec.FileNotFound)
	if s, ok := e.status(t, bad.ID); ok {
		t.Fatalf("left: %+v", s)
	}
}

func testMainEnd(t *testing.T, e *Env) {
	id := e.create(t, func(s *dsec.Spec) { s.Command = []string{"/bin/sh", "-c", "echo x > /root/ran; sleep .3; exit 5"} })
	x := ExitOf(t, e.Runtime, id)
	if x.Cause != dsec.CauseCompleted || !strings.Contains(strings.Join(x.Evidence, " "), "5") {
		t.Fatalf("%+v", x)
	}
	_, err := e.execer(t).Exec(t.Context(), id, process.Spec{Argv: []string{"true"}})
	wantClass(t, err, "", dsec.IllegalState, dsec.SandboxGone)
	if err := e.Runtime.Stop(t.Context(), id, 0); err != nil {
		t.Fatal(err)
	}
	f, ok := e.Runtime.(runtime.Filer)
	if !ok {
		return
	}
	fs, err := f.Files(t.Context(), id, "root")
	if errors.Is(err, dsec.Unsupported.Err()) { // where only the sandbox itself can read its disk
		wantClass(t, err, string(e.Runtime.Tier()), dsec.Unsupported)
		return
	}
	if err != nil {
		t.Fatalf("files of a stopped sandbox: %v", err)
	}
	var b bytes.Buffer
	if _, err := fs.Read(t.Context(), "/root/ran", 0, -1, &b); err != nil || b.String() != "x\n" {
		t.Fatalf("artifact: %q %v", b.String(), err)
	}
}

func testStopGrace(t *testing.T, e *Env) {
	id := e.create(t, func(s *dsec.Spec) { s.Command = []string{"sleep", "300"} })
	began := time.Now()
	if err := e.Runtime.Stop(t.Context(), id, 10*time.Second); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took > 8*time.Second {
		t.Fatalf("stop of a main process that obeys took %v", took)
	}
	stubborn := e.create(t, func(s *dsec.Spec) { s.Command = []string{"/bin/sh", "-c", "trap '' TERM; while :; do sleep 300; done"} })
	began = time.Now()
	if err := e.Runtime.Stop(t.Context(), stubborn, 500*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took > 8*time.Second {
		t.Fatalf("stop of one that does not took %v", took)
	}
	select {
	case x := <-e.Runtime.Exits():
		if x.ID == id || x.ID == stubborn {
			t.Fatalf("an asked stop is no exit: %+v", x)
		}
	case <-time.After(50 * time.Millisecond):
	}
}

func testExitAgain(t *testing.T, e *Env) {
	if e.Reopen == nil {
		t.Skip("the environment cannot reopen")
	}
	id := e.create(t, func(s *dsec.Spec) { s.Command = []string{"/bin/sh", "-c", "exit 0"} })
	ExitOf(t, e.Runtime, id)
	e.Runtime = e.Reopen(t)
	if x := ExitOf(t, e.Runtime, id); x.Cause != dsec.CauseCompleted {
		t.Fatalf("%+v", x)
	}
	if err := e.Runtime.Stop(t.Context(), id, 0); err != nil {
		t.Fatal(err)
	}
	e.Runtime = e.Reopen(t)
	select {
	case x := <-e.Runtime.Exits():
		if x.ID == id {
			t.Fatalf("came again after it was acknowledged: %+v", x)
		}
	case <-time.After(100 * time.Millisecond):
	}
}

var insideCases = []suiteCase{
	{"files", testFiles},
	{"D15_errors of reads and writes have their types", testFileErrors},
	{"pause stops the clocks", testPause},
	{"a port", testDial},
	{"a packed disk holds what changed, at any moment", testPack},
	{"stats are sane", testStats},
	{"D13_the disk limit holds", testDiskLimit},
}

func testStats(t *testing.T, e *Env) {
	id := e.create(t, nil)
	p := e.start(t, id, process.Spec{Argv: []string{"/bin/sh", "-c", "head -c 1000000 /dev/zero > /root/f; sleep 300"}})
	eventually(t, "the file is written", func() bool { _, out := e.sh(t, id, "cat /root/f | wc -c"); return strings.TrimSpace(out) == "1000000" })
	s, err := e.Runtime.Stats(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	if s.CPU <= 0 || s.Memory <= 0 || s.MemoryPeak < s.Memory/2 || s.MemoryLimit != 128<<20 || s.Pids < 2 || s.PidsLimit != 128 ||
		s.DiskLimit != 64<<20 || s.Disk < 0 || s.OOMKills != 0 {
		t.Fatalf("%+v", s)
	}
	eventually(t, "the disk use shows", func() bool {
		s, err := e.Runtime.Stats(t.Context(), id)
		return err == nil && s.Disk >= 900_000
	})
	if err := p.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func testDiskLimit(t *testing.T, e *Env) {
	id := e.create(t, func(s *dsec.Spec) { s.Limits.Disk = 16 << 20 })
	if r, _ := e.sh(t, id, "head -c 40000000 /dev/zero > /root/big"); r.ExitCode == 0 {
		t.Fatalf("40 MB fit into 16 MiB: %+v", r)
	}
	if s, err := e.Runtime.Stats(t.Context(), id); err != nil || s.Disk > 17<<20 {
		t.Fatalf("%+v %v", s, err)
	}
	if r, out := e.sh(t, id, "rm /root/big && echo ok > /root/small && cat /root/small"); out != "ok\n" {
		t.Fatalf("it did not live on: %+v %q", r, out)
	}
}

func testPause(t *testing.T, e *Env) {
	pauser, resumer := ability[runtime.Pauser](t, e), ability[runtime.Resumer](t, e)
	id := e.create(t, nil)
	p := e.start(t, id, process.Spec{Timeout: 1500 * time.Millisecond, Argv: []string{"/bin/sh", "-c", "echo a; sleep .7; echo b"}})
	eventually(t, "it runs", func() bool { return kept(t, p, process.Stdout) == "a\n" })
	for range 2 {
		if err := pauser.Pause(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
	if s, _ := e.status(t, id); !s.Paused || !s.Running {
		t.Fatalf("paused: %+v", s)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second) // longer than the command's own timeout
	_, err := p.Wait(ctx)
	cancel()
	wantClass(t, err, "", dsec.Timeout)
	for range 2 {
		if err := resumer.Resume(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
	r := wait(t, p)
	if out := kept(t, p, process.Stdout); r.Status != process.Exited || out != "a\nb\n" || r.Held < time.Second {
		t.Fatalf("%+v %q", r, out)
	}
	if err := e.Runtime.Stop(t.Context(), id, 0); err != nil {
		t.Fatal(err)
	}
	wantClass(t, pauser.Pause(t.Context(), id), "", dsec.IllegalState, dsec.SandboxGone)
	paused := e.create(t, nil)
	if err := pauser.Pause(t.Context(), paused); err != nil {
		t.Fatal(err)
	}
	if err := e.Runtime.Stop(t.Context(), paused, 0); err != nil {
		t.Fatalf("stop of a paused one: %v", err)
	}
}

func testDial(t *testing.T, e *Env) {
	d := ability[runtime.Dialer](t, e)
	id := e.create(t, nil)
	_, err := d.Dial(t.Context(), id, 7)
	wantClass(t, err, "", dsec.Unavailable)
	argv := []string{"nc", "-l", "-p", "8080", "-e", "cat"}
	if e.Listen != nil {
		argv = e.Listen("8080")
	}
	e.start(t, id, process.Spec{Argv: argv})
	var c io.ReadWriteCloser
	eventually(t, "it listens", func() bool { c, err = d.Dial(t.Context(), id, 8080); return err == nil })
	defer c.Close()
	go fmt.Fprint(c, "hello\n") //nolint:errcheck // the read below shows it
	b := make([]byte, 6)
	if _, err := io.ReadFull(c, b); err != nil || string(b) != "hello\n" {
		t.Fatalf("%q %v", b, err)
	}
	_, err = d.Dial(t.Context(), id, 80)
	wantClass(t, err, "", dsec.Unavailable)
}
