package hold

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

const plainUser = 61000

// script is a process that runs a script.
func script(name, text string) PlainSpec {
	return PlainSpec{Name: name, Path: busybox, Args: []string{"sh", "-c", text}, UID: plainUser, GID: plainUser + 1, OOMScoreAdj: 200}
}

// output is a pipe: what processes say, and what they get.
func output(t *testing.T) (*bufio.Reader, *os.File) {
	t.Helper()
	r, w, err := os.Pipe()
	must(t, err)
	t.Cleanup(func() { _ = r.Close(); _ = w.Close() })
	must(t, r.SetReadDeadline(time.Now().Add(30*time.Second)))
	return bufio.NewReader(r), w
}

func (b *bed) plain(s PlainSpec, out *os.File, files ...*os.File) *Plain {
	b.t.Helper()
	p, err := b.c.StartPlain(ctx(b.t), s, out, files...)
	must(b.t, err)
	b.t.Cleanup(p.Close)
	return p
}

// over waits for an end and acknowledges it.
func over(t *testing.T, p *Plain) PlainInfo {
	t.Helper()
	must(t, p.Wait(ctx(t)))
	must(t, p.Ack(ctx(t)))
	return p.Info()
}

func line(t *testing.T, r *bufio.Reader) string {
	t.Helper()
	s, err := r.ReadString('\n')
	must(t, err)
	return strings.TrimSpace(s)
}

func TestPlainProcessHasWhatItWasGivenAndNoMore(t *testing.T) {
	b := newBed(t)
	r, w := output(t)
	file := filepath.Join(b.dir, "given")
	must(t, os.WriteFile(file, []byte("content\n"), 0o600)) // of root: only the descriptor reads it
	given, err := os.Open(file)
	must(t, err)
	defer func() { _ = given.Close() }()
	group := filepath.Join(b.group, "plain")
	must(t, os.Mkdir(group, 0o755))
	s := script("one", `cat <&3; grep -E '^(Uid|Gid|Groups|Cap...|NoNewPrivs|SigIgn|SigBlk):' /proc/self/status; ls /proc/self/fd | tr '\n' ' '; echo
		cat /proc/self/oom_score_adj; grep 0:: /proc/self/cgroup; ulimit -c; ulimit -n; pwd; for n in net ipc uts mnt; do readlink /proc/self/ns/$n; done; echo wrong >&2; exit 7`)
	s.Groups, s.Cgroup = []uint32{plainUser + 2}, group
	p := b.plain(s, w, given)
	if pid := p.Info().PID; pid <= 0 || p.Info().Ended {
		t.Errorf("%+v", p.Info())
	}
	if i := over(t, p); i.Code != 7 || i.Signal != 0 || !i.Ended {
		t.Errorf("%+v", i)
	}
	must(t, w.Close())
	text, err := io.ReadAll(r)
	must(t, err)
	got := string(text)
	for _, want := range []string{"content\n", "Uid:\t61000\t61000\t61000\t61000\n", "Gid:\t61001\t61001\t61001\t61001\n", "Groups:\t61002 \n", "NoNewPrivs:\t1\n",
		"CapInh:\t0000000000000000\nCapPrm:\t0000000000000000\nCapEff:\t0000000000000000\nCapBnd:\t0000000000000000\nCapAmb:\t0000000000000000\n",
		"SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n", "\n0 1 2 3 4 \n200\n", "/plain\n0\n4096\n/\n", "wrong\n"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is not in\n%s", want, got)
		}
	}
	for _, ns := range []string{"net", "ipc", "uts", "mnt"} {
		ours, err := os.Readlink("/proc/self/ns/" + ns)
		must(t, err)
		if strings.Contains(got, ours) != (ns == "mnt") {
			t.Errorf("namespace %s: %s", ours, got)
		}
	}
	if list, err := b.c.Plains(ctx(t), ""); err != nil || len(list) != 0 {
		t.Errorf("acknowledged, and %v %v", list, err)
	}
}

func TestPlainProcessJoinsTasks(t *testing.T) {
	b := newBed(t)
	tree := "/sys/fs/cgroup/pids"
	if _, err := os.Stat(tree + "/tasks"); err != nil {
		t.Skip("no v1 tree of pids here:", err)
	}
	group := filepath.Join(tree, filepath.Base(b.group))
	must(t, os.Mkdir(group, 0o755))
	t.Cleanup(func() { poll(t, "an empty group", func() bool { return os.Remove(group) == nil }) })
	r, w := output(t)
	s := script("tasks", "grep pids: /proc/self/cgroup")
	s.Tasks = []string{group + "/tasks"}
	over(t, b.plain(s, w))
	if got := line(t, r); !strings.HasSuffix(got, "/"+filepath.Base(group)) {
		t.Errorf("%q", got)
	}
	s.Name, s.Tasks = "nowhere", []string{group + "/nowhere"}
	_, err := b.c.StartPlain(ctx(t), s, w)
	wantClass(t, err, dsec.FileNotFound, "join control group")
}

func TestPlainProcessIsStartedOnce(t *testing.T) {
	b := newBed(t)
	r, w := output(t)
	s := script("once", "echo begun; exec sleep 1000")
	var group sync.WaitGroup
	pids := make([]int, 8)
	for i := range pids {
		group.Go(func() {
			p, err := b.c.StartPlain(ctx(t), s, w)
			if err != nil {
				t.Error(err)
				return
			}
			pids[i] = p.Info().PID
			p.Close()
		})
	}
	group.Wait()
	if slices.Min(pids) != slices.Max(pids) {
		t.Fatal(pids)
	}
	if got := line(t, r); got != "begun" {
		t.Errorf("%q", got)
	}
	other := s
	other.OOMScoreAdj++
	_, err := b.c.StartPlain(ctx(t), other, w)
	wantClass(t, err, dsec.Conflict, "another process")
	p, err := b.c.FindPlain(ctx(t), "once")
	must(t, err)
	defer p.Close()
	if p.Info().PID != pids[0] || p.Info().Spec.Args[2] != s.Args[2] {
		t.Errorf("%+v", p.Info())
	}
	must(t, b.c.AckPlain(ctx(t), "once")) // it runs: nothing happens
	must(t, b.c.KillPlain(ctx(t), "once"))
	must(t, p.Wait(ctx(t)))
	again, err := b.c.StartPlain(ctx(t), s, w) // until it is acknowledged it is that one
	must(t, err)
	defer again.Close()
	if i := again.Info(); !i.Ended || i.Signal != 9 || i.PID != pids[0] {
		t.Errorf("%+v", i)
	}
	must(t, b.c.KillPlain(ctx(t), "once"))
	must(t, p.Ack(ctx(t)))
	_, err = b.c.FindPlain(ctx(t), "once")
	wantClass(t, err, dsec.NotFound, "once")
	wantClass(t, b.c.KillPlain(ctx(t), "once"), dsec.NotFound, "once")
	next := b.plain(other, w)
	if next.Info().PID == pids[0] {
		t.Error("the same again")
	}
	next.Kill()
	if i := over(t, next); i.Signal != 9 || i.Code != 0 {
		t.Errorf("%+v", i)
	}
}

func TestEndOfPlainProcessIsToldUntilAcknowledged(t *testing.T) {
	b := newBed(t)
	_, w := output(t)
	in, hold, err := os.Pipe() // ends when we close it
	must(t, err)
	p := b.plain(script("later", "read a <&3; exit 5"), w, in)
	must(t, in.Close())
	pid := p.Info().PID
	must(t, b.c.Close())
	must(t, hold.Close())
	poll(t, "it to end", func() bool { return ended(pid) })
	for range 2 { // two clients that did not acknowledge it
		c, err := Dial(ctx(t), b.o.Socket)
		must(t, err)
		b.c = c
		p, err := c.FindPlain(ctx(t), "later")
		must(t, err)
		must(t, p.Wait(ctx(t)))
		if i := p.Info(); i.Code != 5 || i.Signal != 0 {
			t.Fatalf("%+v", i)
		}
		p.Close()
		if list, err := c.Plains(ctx(t), "lat"); err != nil || len(list) != 1 || !list[0].Ended || list[0].Code != 5 {
			t.Fatalf("%+v %v", list, err)
		}
		must(t, c.Close())
	}
	var f frame
	poll(t, "hello", func() bool {
		c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: b.o.Socket, Net: "unixpacket"})
		must(t, err)
		defer func() { _ = c.Close() }()
		raw := newWire(c)
		must(t, raw.send(frame{op: opHello, id: 1}))
		if f, err = raw.recv(); err == nil && f.flags&flagError == 0 {
			f, err = raw.recv()
		}
		return err == nil && f.flags&flagError == 0
	})
	var e Event
	must(t, json.Unmarshal(f.body, &e))
	if f.op != opEvent || e.Type != PlainExited || e.Plain != "later" || e.Code != 5 {
		t.Fatalf("%+v %s", f, f.body)
	}
	b.c, err = Dial(ctx(t), b.o.Socket)
	must(t, err)
	must(t, b.c.AckPlain(ctx(t), "later"))
	if list, err := b.c.Plains(ctx(t), ""); err != nil || len(list) != 0 {
		t.Fatalf("%+v %v", list, err)
	}
}

func TestUpgradeKeepsPlainProcesses(t *testing.T) {
	b := newBed(t)
	r, w := output(t)
	in, feed, err := os.Pipe()
	must(t, err)
	p := b.plain(script("lives", "echo up; read a <&3; echo $a; exit 3"), w, in)
	must(t, in.Close())
	ended := b.plain(script("ended", "exit 4"), w)
	must(t, ended.Wait(ctx(t)))
	must(t, ended.Wait(ctx(t)))
	if got := line(t, r); got != "up" {
		t.Fatalf("%q", got)
	}
	pid := p.Info().PID
	b.upgrade(markPlain)
	b.upgrade(markOther)
	p, err = b.c.FindPlain(ctx(t), "lives")
	must(t, err)
	defer p.Close()
	if p.Info().PID != pid || p.Info().Ended {
		t.Fatalf("%+v", p.Info())
	}
	if _, err := feed.WriteString("hello\n"); err != nil {
		t.Fatal(err)
	}
	must(t, feed.Close())
	if i := over(t, p); i.Code != 3 || line(t, r) != "hello" {
		t.Errorf("%+v", i)
	}
	q, err := b.c.FindPlain(ctx(t), "ended")
	must(t, err)
	defer q.Close()
	if i := over(t, q); i.Code != 4 {
		t.Errorf("%+v", i)
	}
	over(t, b.plain(script("new", "true"), w))    // the new program starts them too
	b.plain(script("rest", "exec sleep 1000"), w) // ended with the hold
}

// The end of one that had the name before is not that of the next.
func TestLateEndOfAnEarlierPlainProcess(t *testing.T) {
	p := &Plain{done: make(chan struct{})}
	p.end(Event{PID: 1, Code: 1})
	p.answered(PlainInfo{PID: 2}, nil)
	p.end(Event{PID: 1, Code: 1})
	if p.Info().Ended {
		t.Error("it has ended")
	}
	p.end(Event{PID: 2, Code: 2})
	if i := p.Info(); !i.Ended || i.Code != 2 {
		t.Errorf("%+v", i)
	}
	q := &Plain{done: make(chan struct{})}
	q.end(Event{PID: 2, Signal: 9})
	q.answered(PlainInfo{PID: 2}, nil)
	if i := q.Info(); !i.Ended || i.Signal != 9 {
		t.Errorf("%+v", i)
	}
}

func TestPlainProcessesDieWithTheHold(t *testing.T) {
	b := newBed(t)
	_, w := output(t)
	before := b.plain(script("before", "exec sleep 1000"), w).Info().PID
	b.upgrade(markPlain)
	p := b.plain(script("orphan", "exec sleep 1000"), w)
	pid := p.Info().PID
	must(t, unix.Kill(b.c.Info().PID, unix.SIGKILL))
	err := p.Wait(ctx(t))
	wantClass(t, err, dsec.Unavailable, "the hold is gone")
	poll(t, "processes to end", func() bool { return ended(pid) && ended(before) })
	_ = b.c.Close()
	c, err := Ensure(ctx(t), b.o)
	must(t, err)
	b.c = c
	_, err = c.FindPlain(ctx(t), "orphan")
	wantClass(t, err, dsec.NotFound, "orphan")
}

func TestGarbageAboutPlainProcessesIsRefused(t *testing.T) {
	b := newBed(t)
	_, w := output(t)
	for text, change := range map[string]func(*PlainSpec){
		"valid name":    func(s *PlainSpec) { s.Name = "../x" },
		"absolute path": func(s *PlainSpec) { s.Path = "sh" },
		"NUL":           func(s *PlainSpec) { s.Args = []string{"a\x00b"} },
		"at most 1024":  func(s *PlainSpec) { s.Args = make([]string, 1025) },
		"98305 bytes":   func(s *PlainSpec) { s.Path, s.Args = "/", []string{strings.Repeat("x", 96<<10-1)} },
		"never root":    func(s *PlainSpec) { s.UID = 0 },
		"group 0":       func(s *PlainSpec) { s.GID = 0 },
		"groups [0]":    func(s *PlainSpec) { s.Groups = []uint32{0} },
		"control group": func(s *PlainSpec) { s.Cgroup = "x" },
		"oom_score_adj": func(s *PlainSpec) { s.OOMScoreAdj = 2000 },
	} {
		s := script("garbage", "true")
		change(&s)
		_, err := b.c.StartPlain(ctx(t), s, w)
		wantClass(t, err, dsec.Invalid, text)
	}
	none := script("none", "")
	none.Path = "/nothing/there"
	_, err := b.c.StartPlain(ctx(t), none, w)
	wantClass(t, err, dsec.FileNotFound, "/nothing/there")
	none.Path = b.o.Log
	_, err = b.c.StartPlain(ctx(t), none, w)
	wantClass(t, err, dsec.PermissionDenied, "log")
	none.Path, none.Cgroup = busybox, "/nothing/there"
	_, err = b.c.StartPlain(ctx(t), none, w)
	wantClass(t, err, dsec.Internal, "no such file")
	wantClass(t, b.c.call(ctx(t), opPlain, toWirePlain(script("files", "true")), nil, nil), dsec.Invalid, "descriptors")
	wantClass(t, b.c.call(ctx(t), opPlain, toWirePlain(script("files", "true")), slices.Repeat([]*os.File{w}, 50), nil), dsec.Invalid, "descriptors")
	wantClass(t, b.c.call(ctx(t), opPlain, "text", []*os.File{w}, nil), dsec.Invalid, "read request")
	wantClass(t, b.c.call(ctx(t), opPlains, []int{1}, nil, nil), dsec.Invalid, "read request")
	wantClass(t, b.c.call(ctx(t), opEnd, wireName{}, nil, nil), dsec.Unsupported, "unknown to this hold")
	must(t, b.c.AckPlain(ctx(t), "nobody"))
	if list, err := b.c.Plains(ctx(t), ""); err != nil || len(list) != 0 {
		t.Fatalf("%+v %v", list, err)
	}
}

// What is started and ended leaves nothing, also if nobody waits for the start.
func TestNothingIsLeftOfPlainProcesses(t *testing.T) {
	b := newBed(t)
	_, w := output(t)
	fds := func() int {
		d, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", b.c.Info().PID))
		must(t, err)
		return len(d)
	}
	cycle := func(i int) {
		over(t, b.plain(script(fmt.Sprint("a", i), "exit 0"), w, w, w))
		bad := script("bad", "")
		bad.Path = "/nothing"
		_, err := b.c.StartPlain(ctx(t), bad, w)
		wantClass(t, err, dsec.FileNotFound, "")
		short, cancel := context.WithTimeout(context.Background(), time.Duration(i)*time.Millisecond)
		defer cancel()
		if p, err := b.c.StartPlain(short, script(fmt.Sprint("c", i), "exec sleep 1000"), w); err == nil {
			p.Kill()
			over(t, p)
			p.Close()
		} else {
			wantClass(t, err, dsec.Timeout, "")
		}
	}
	cycle(0)
	idle := func() bool {
		list, err := b.c.Plains(ctx(t), "")
		must(t, err)
		return len(list) == 0
	}
	poll(t, "cancelled starts to be undone", idle)
	before := fds()
	for i := range 12 {
		cycle(4 * i)
	}
	poll(t, "cancelled starts to be undone", idle)
	poll(t, "descriptors to be closed", func() bool { return fds() <= before })
	children, err := exec.Command("pgrep", "-P", fmt.Sprint(b.c.Info().PID)).Output()
	if err != nil || bytes.Count(children, []byte("\n")) != b.o.Forkers {
		t.Errorf("children: %s %v", children, err)
	}
}

// A client that dies while it starts one leaves none that nobody knows: it is undone, or listed.
func TestPlainProcessesOfAClientThatDied(t *testing.T) {
	b := newBed(t)
	_, w := output(t)
	for i := range 6 {
		conn := b.c.w.c
		time.AfterFunc(time.Duration(i*5)*time.Millisecond, func() { _ = conn.Close() }) // at some moment of the start
		_, err := b.c.StartPlain(ctx(t), script(fmt.Sprint("p", i), "exec sleep 1000"), w)
		_ = b.c.Close()
		t.Logf("%d: %v", i, err)
		c, err := Dial(ctx(t), b.o.Socket)
		must(t, err)
		b.c = c
	}
	list, err := b.c.Plains(ctx(t), "")
	must(t, err)
	children, _ := exec.Command("pgrep", "-P", fmt.Sprint(b.c.Info().PID), "-U", fmt.Sprint(plainUser)).Output()
	if bytes.Count(children, []byte("\n")) != len(list) {
		t.Errorf("%d are known, and there are %q", len(list), children)
	}
}

// Nothing inside a sandbox sees a plain process, or reaches it.
func TestPlainProcessIsOutOfReachOfSandboxes(t *testing.T) {
	b := newBed(t)
	x := b.box()
	_, w := output(t)
	p := b.plain(script("vm", "exec sleep 1000"), w)
	_, out, _ := x.run(x.sh(fmt.Sprintf(`kill -9 %d && echo killed; for p in /proc/[0-9]*; do cat $p/cmdline | tr '\0' ' '; echo; done | grep 'slee[p]'; ls /proc/self/fd /proc/1/fd | tr '\n' ' '`, p.Info().PID)))
	if strings.Contains(out, "killed") || strings.Contains(out, "sleep") || strings.Contains(out, " 4 ") {
		t.Errorf("%q", out)
	}
	if ended(p.Info().PID) {
		t.Error("it has ended")
	}
}

// There are no more than the limit, and each that goes makes room.
func TestTooManyPlainProcessesAreRefused(t *testing.T) {
	s := &server{plains: map[string]*plain{}}
	for i := range maxPlain {
		s.plains[fmt.Sprint("x", i)] = newPlain(s, wirePlain{})
	}
	_, w := output(t)
	_, _, err := s.startPlain(t.Context(), toWirePlain(script("more", "true")), &frame{files: []*os.File{w}})
	wantClass(t, err, dsec.ResourceExhausted, "as many as may be")
}
