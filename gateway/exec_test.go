package gateway_test

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/files"
	"github.com/opendsec/dsec/process"
)

func bufioReader(r io.Reader) *bufio.Reader { return bufio.NewReader(r) }

func TestRunCopiesBothStreams(t *testing.T) {
	e := start(t)
	c := e.local()
	sb := e.sandbox(c)
	var out, errs bytes.Buffer
	res, err := c.Run(t.Context(), sb.ID, sh("echo out; echo err >&2; exit 3"), &out, &errs)
	must(t, err)
	if out.String() != "out\n" || errs.String() != "err\n" || res.ExitCode != 3 || res.Status != process.Exited {
		t.Fatalf("%q %q %+v", out.String(), errs.String(), res)
	}
}

func TestExecFailureOfTheCommandIsTyped(t *testing.T) {
	e := start(t)
	c := e.local()
	sb := e.sandbox(c)
	_, err := c.Exec(t.Context(), sb.ID, process.Spec{Argv: []string{"/nope"}})
	wantClass(t, err, dsec.FileNotFound)
	_, err = c.Exec(t.Context(), sb.ID, process.Spec{})
	wantClass(t, err, dsec.Invalid)
	_, err = c.Exec(t.Context(), sb.ID, process.Spec{ID: "no spaces", Argv: []string{"true"}})
	wantClass(t, err, dsec.Invalid)
	_, err = c.Attach(sb.ID, "unknown").Wait(t.Context())
	wantClass(t, err, dsec.NotFound)
}

func TestSameKeyIsTheSameExec(t *testing.T) {
	e := start(t)
	c := e.local()
	sb := e.sandbox(c)
	s := sh("echo once")
	s.ID = "key.1"
	for range 3 {
		p, err := c.Exec(t.Context(), sb.ID, s)
		must(t, err)
		res, err := p.Wait(t.Context())
		if err != nil || res.Stdout.Total != 5 {
			t.Fatalf("%+v, %v", res, err)
		}
	}
	s.Argv = []string{"/bin/sh", "-c", "echo other"}
	_, err := c.Exec(t.Context(), sb.ID, s)
	wantClass(t, err, dsec.Conflict)
}

func TestStdinArrivesOnceWhateverIsRepeated(t *testing.T) {
	e := start(t)
	c := e.local()
	sb := e.sandbox(c)
	in := []byte{0xc3, 0x28, 0x00, 0xff, 1, 2}
	p, err := c.Exec(t.Context(), sb.ID, process.Spec{Argv: []string{"cat"}, Stdin: true})
	must(t, err)
	must(t, p.Write(t.Context(), in))
	again := c.Attach(sb.ID, p.ID) // a client that does not know that its write arrived
	must(t, again.Write(t.Context(), in))
	must(t, p.Feed(t.Context(), bytes.NewReader(bytes.Repeat([]byte("x"), 300_000))))
	res, err := p.Wait(t.Context())
	must(t, err)
	out, _, err := p.Kept(t.Context())
	must(t, err)
	if res.Stdout.Total != 300_006 || !bytes.HasPrefix(out.Head, in) {
		t.Fatalf("%+v %q", res, out.Head[:20])
	}
	must(t, p.Release(t.Context()))
}

func TestKillTellsWhetherItDidAnything(t *testing.T) {
	e := start(t)
	c := e.local()
	sb := e.sandbox(c)
	p, err := c.Exec(t.Context(), sb.ID, sh("sleep 100"))
	must(t, err)
	if killed, err := p.Kill(t.Context()); err != nil || !killed {
		t.Fatal(killed, err)
	}
	res, err := p.Wait(t.Context())
	if err != nil || res.Status != process.Killed {
		t.Fatal(res, err)
	}
	if killed, err := p.Kill(t.Context()); err != nil || killed {
		t.Fatal("a second kill", killed, err)
	}
	if err := p.Signal(t.Context(), 15); dsec.ClassOf(err) != dsec.IllegalState {
		t.Fatal(err)
	}
}

func TestA10_ExecInDeadSandboxIsGone(t *testing.T) {
	e := start(t)
	c := e.local()
	sb := e.sandbox(c)
	_, err := c.Stop(t.Context(), sb.ID, "")
	must(t, err)
	_, err = c.Exec(t.Context(), sb.ID, sh("true"))
	if cl := dsec.ClassOf(err); cl != dsec.SandboxGone && cl != dsec.IllegalState {
		t.Fatal(err)
	}
}

func TestSandboxEndsUnderAStream(t *testing.T) {
	e := start(t)
	c := e.local()
	sb := e.sandbox(c)
	s, err := c.OpenSession(t.Context(), nil, nil)
	must(t, err)
	defer s.Close()
	r, err := s.Exec(t.Context(), sb.ID, sh("sleep 100"), client.ModeStream, nil)
	must(t, err)
	_, err = c.Delete(t.Context(), sb.ID)
	must(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	end, err := r.Wait(ctx)
	if err == nil && end.Status == process.Exited || dsec.ClassOf(err) == dsec.Timeout {
		t.Fatalf("%+v, %v", end, err)
	}
}

func TestSessionModes(t *testing.T) {
	e := start(t)
	c := e.local()
	sb := e.sandbox(c)
	s, err := c.OpenSession(t.Context(), nil, nil)
	must(t, err)
	defer s.Close()
	script := sh("seq 1 1000; echo bad >&2; exit 4")
	exit, err := s.Exec(t.Context(), sb.ID, script, client.ModeExit, nil)
	must(t, err)
	kept, err := s.Exec(t.Context(), sb.ID, script, client.ModeKept, nil)
	must(t, err)
	var got bytes.Buffer
	stream, err := s.Exec(t.Context(), sb.ID, script, client.ModeStream, func(ch client.Chunk) error {
		if ch.Stream == process.Stdout {
			got.Write(ch.Data)
		}
		return nil
	})
	must(t, err)
	for _, r := range []*client.Running{exit, kept, stream} {
		end, err := r.Wait(t.Context())
		if err != nil || end.ExitCode != 4 {
			t.Fatalf("%+v, %v", end, err)
		}
		if r == kept && (!bytes.HasPrefix(end.KeptStdout.Head, []byte("1\n2\n")) || string(end.KeptStderr.Head) != "bad\n") {
			t.Fatalf("%+v", end)
		}
	}
	if lines := strings.Count(got.String(), "\n"); lines != 1000 {
		t.Fatalf("%d lines", lines)
	}
}

// A reader that stops reading one exec slows that one only, and is not sent
// more than its window.
func TestSlowReaderSlowsItsOwnExecOnly(t *testing.T) {
	e := start(t)
	c := e.local()
	sb := e.sandbox(c)
	s, err := c.OpenSession(t.Context(), nil, nil)
	must(t, err)
	defer s.Close()
	blocked, release := make(chan struct{}), make(chan struct{})
	var once sync.Once
	var n atomic.Int64
	slow, err := s.Exec(t.Context(), sb.ID, sh("head -c 3000000 /dev/zero"), client.ModeStream, func(ch client.Chunk) error {
		once.Do(func() { close(blocked) })
		<-release
		n.Add(int64(len(ch.Data)))
		return nil
	})
	must(t, err)
	<-blocked
	quick, err := s.Exec(t.Context(), sb.ID, sh("head -c 3000000 /dev/zero"), client.ModeStream, nil)
	must(t, err)
	if end, err := quick.Wait(t.Context()); err != nil || end.Stdout.Total != 3_000_000 {
		t.Fatalf("%+v, %v", end, err)
	}
	select {
	case <-slow.Done():
		t.Fatal("the slow one is done")
	default:
	}
	close(release)
	if _, err := slow.Wait(t.Context()); err != nil || n.Load() != 3_000_000 {
		t.Fatalf("%d bytes, %v", n.Load(), err)
	}
}

// Who starts a command in a session gets all of its output, however fast it
// writes.
func TestStreamedOutputIsComplete(t *testing.T) {
	e := start(t)
	c := e.local()
	sb := e.sandbox(c)
	s, err := c.OpenSession(t.Context(), nil, nil)
	must(t, err)
	defer s.Close()
	var n atomic.Int64
	r, err := s.Exec(t.Context(), sb.ID, sh("head -c 30000000 /dev/zero"), client.ModeStream, func(ch client.Chunk) error {
		n.Add(int64(len(ch.Data)))
		return nil
	})
	must(t, err)
	end, err := r.Wait(t.Context())
	if err != nil || n.Load() != 30_000_000 || end.Stdout.Dropped != 0 {
		t.Fatalf("%d bytes, %+v, %v", n.Load(), end, err)
	}
}

// Bytes that are gone before they were read show as a jump, and do not use up
// the window.
func TestGapIsAJumpNotAHang(t *testing.T) {
	e := start(t)
	c := e.local()
	sb := e.sandbox(c)
	p, err := c.Exec(t.Context(), sb.ID, sh("head -c 9000000 /dev/zero"))
	must(t, err)
	end, err := p.Wait(t.Context())
	must(t, err)
	s, err := c.OpenSession(t.Context(), nil, nil)
	must(t, err)
	defer s.Close()
	var n, jumped, at int64
	spec := sh("head -c 9000000 /dev/zero")
	spec.ID = p.ID // the same command again: it has ended
	r, err := s.Exec(t.Context(), sb.ID, spec, client.ModeStream, func(ch client.Chunk) error {
		if ch.Stream == process.Stdout {
			jumped += ch.Offset - at
			n += int64(len(ch.Data))
			at = ch.Offset + int64(len(ch.Data))
		}
		return nil
	})
	must(t, err)
	_, err = r.Wait(t.Context())
	if err != nil || n != 2<<20 || n+jumped != 9_000_000 || end.Stdout.Dropped != jumped {
		t.Fatalf("%d bytes, jumped %d, %+v, %v", n, jumped, end, err)
	}
}

func TestA13_ReattachFromOffsets(t *testing.T) {
	e := start(t)
	c := e.local()
	sb := e.sandbox(c)
	p, err := c.Exec(t.Context(), sb.ID, sh("seq 1 1000; sleep 0.3; seq 1001 2000"))
	must(t, err)
	stop := fmt.Errorf("enough")
	var at client.Offsets
	var got bytes.Buffer
	_, err = p.Follow(t.Context(), at, func(ch client.Chunk) error {
		if ch.Stream == process.Stdout {
			got.Write(ch.Data)
			at.Stdout += int64(len(ch.Data))
		}
		return stop
	})
	if err != stop {
		t.Fatal(err)
	}
	_, err = p.Wait(t.Context())
	must(t, err)
	_, err = c.Attach(sb.ID, p.ID).Follow(t.Context(), at, func(ch client.Chunk) error {
		if ch.Stream == process.Stdout {
			got.Write(ch.Data)
		}
		return nil
	})
	must(t, err)
	if lines := strings.Count(got.String(), "\n"); lines != 2000 {
		t.Fatalf("%d lines", lines)
	}
}

// The agent goes away in the middle of an exec and comes back: what is waited
// for goes on from its offsets.
func TestAgentRestartUnderStreams(t *testing.T) {
	e := start(t)
	c, err := client.New(client.Config{URL: "unix://" + e.socket, Retries: 8})
	must(t, err)
	sb := e.sandbox(c)
	s, err := c.OpenSession(t.Context(), nil, nil)
	must(t, err)
	defer s.Close()
	var got bytes.Buffer
	first := make(chan struct{})
	var once sync.Once
	r, err := s.Exec(t.Context(), sb.ID, sh("seq 1 1000; sleep 2; seq 1001 2000"), client.ModeStream, func(ch client.Chunk) error {
		if ch.Stream == process.Stdout {
			got.Write(ch.Data)
			once.Do(func() { close(first) })
		}
		return nil
	})
	must(t, err)
	<-first
	must(t, e.api.Close())
	e.startNode()
	if end, err := r.Wait(t.Context()); err != nil || end.ExitCode != 0 {
		t.Fatalf("%+v, %v", end, err)
	}
	if lines := strings.Count(got.String(), "\n"); lines != 2000 {
		t.Fatalf("%d lines", lines)
	}
}

func TestA20_BrokenTransportIsAnError(t *testing.T) {
	e := start(t)
	c, err := client.New(client.Config{URL: "unix://" + e.socket, Retries: -1})
	must(t, err)
	sb := e.sandbox(c)
	p, err := c.Exec(t.Context(), sb.ID, sh("echo A; sleep 100"))
	must(t, err)
	s, err := c.OpenSession(t.Context(), nil, nil)
	must(t, err)
	defer s.Close()
	r, err := s.Exec(t.Context(), sb.ID, sh("echo A; sleep 100"), client.ModeStream, nil)
	must(t, err)
	_, err = p.Follow(t.Context(), client.Offsets{}, func(ch client.Chunk) error {
		if ch.Stream == process.Stdout && len(ch.Data) > 0 {
			go func() { _ = e.api.Close() }()
		}
		return nil
	})
	wantClass(t, err, dsec.Unavailable)
	_, err = r.Wait(t.Context())
	wantClass(t, err, dsec.Unavailable)
}

func TestA18_ClientThatLeavesCostsNothing(t *testing.T) {
	e := start(t)
	c := e.local()
	sb := e.sandbox(c)
	t.Cleanup(func() { _ = e.node.rt.Destroy(context.Background(), sb.ID) }) // what says yes never ends
	for range 4 {
		p, err := c.Exec(t.Context(), sb.ID, sh("yes"))
		must(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		_, _ = p.Follow(ctx, client.Offsets{}, func(ch client.Chunk) error {
			if ch.Offset > 1<<20 {
				cancel()
			}
			return nil
		})
	}
	before := runtime.NumGoroutine()
	eventually(t, "no goroutine follows for a client that left", func() bool {
		return runtime.NumGoroutine() <= before+2
	})
	var out bytes.Buffer
	_, err := c.Run(t.Context(), sb.ID, sh("echo usable"), &out, nil)
	if err != nil || out.String() != "usable\n" {
		t.Fatal(out.String(), err)
	}
}

// A client that opens an event stream and stops reading its socket is cut off
// by the write deadline; until then it holds a bounded amount.
func TestClientThatReadsNothingHoldsNothingUp(t *testing.T) {
	e := start(t)
	c := e.local()
	sb := e.sandbox(c)
	t.Cleanup(func() { _ = e.node.rt.Destroy(context.Background(), sb.ID) }) // what says yes never ends
	p, err := c.Exec(t.Context(), sb.ID, sh("yes"))
	must(t, err)
	conn, err := net.Dial("unix", e.socket)
	must(t, err)
	defer conn.Close()
	body := fmt.Sprintf(`{"sandbox":%q,"exec":%q}`, sb.ID, p.ID)
	frame := append([]byte{0, 0, 0, 0, byte(len(body))}, body...)
	fmt.Fprintf(conn, "POST /dsec.v1.Commands/Output HTTP/1.1\r\nHost: dsec\r\nContent-Type: application/connect+json\r\nContent-Length: %d\r\n\r\n%s", len(frame), frame)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	res, err := c.Run(t.Context(), sb.ID, sh("seq 1 100000"), io.Discard, nil)
	if err != nil || res.ExitCode != 0 {
		t.Fatal(res, err)
	}
	runtime.ReadMemStats(&after)
	if grew := int64(after.HeapInuse) - int64(before.HeapInuse); grew > 64<<20 {
		t.Fatalf("heap grew by %d bytes", grew)
	}
	_, err = p.Kill(t.Context())
	must(t, err)
}

// Counting connections on a listener of our own, in front of the socket.
func countingProxy(t *testing.T, target string) (addr string, most *atomic.Int64) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	t.Cleanup(func() { _ = l.Close() })
	most = &atomic.Int64{}
	var open atomic.Int64
	go func() {
		for {
			a, err := l.Accept()
			if err != nil {
				return
			}
			if n := open.Add(1); n > most.Load() {
				most.Store(n)
			}
			go func() {
				defer open.Add(-1)
				b, err := net.Dial("unix", target)
				if err != nil {
					_ = a.Close()
					return
				}
				go func() { _, _ = io.Copy(b, a); _ = b.Close() }()
				_, _ = io.Copy(a, b)
				_ = a.Close()
			}()
		}
	}()
	return l.Addr().String(), most
}

func TestTwoThousandExecsNeedAHandfulOfConnections(t *testing.T) {
	e := start(t)
	addr, most := countingProxy(t, e.socket)
	c, err := client.New(client.Config{URL: "http://" + addr, HTTP: &http.Client{Transport: &http.Transport{
		MaxConnsPerHost: 16, MaxIdleConnsPerHost: 16}}})
	must(t, err)
	const boxes, each = 20, 100
	ids := make([]dsec.SandboxID, boxes)
	for i := range ids {
		ids[i] = e.sandbox(e.local()).ID
	}
	s, err := c.OpenSession(t.Context(), nil, nil)
	must(t, err)
	defer s.Close()
	var wg sync.WaitGroup
	var bad atomic.Int64
	var live atomic.Int64
	all := make(chan struct{}) // closed when every exec runs
	for i := range boxes * each {
		wg.Add(1)
		go func() {
			defer wg.Done()
			var out bytes.Buffer
			r, err := s.Exec(t.Context(), ids[i%boxes], process.Spec{Argv: []string{"cat"}, Stdin: true}, client.ModeStream,
				func(ch client.Chunk) error { out.Write(ch.Data); return nil })
			if live.Add(1) == boxes*each {
				close(all)
			}
			if err != nil {
				t.Error(err)
				return
			}
			<-all
			want := fmt.Sprintf("exec %d", i)
			if err := r.Feed(t.Context(), strings.NewReader(want)); err != nil {
				t.Error(err)
				return
			}
			end, err := r.Wait(t.Context())
			if err != nil || end.ExitCode != 0 || out.String() != want {
				bad.Add(1)
				t.Errorf("exec %d: %q %+v %v", i, out.String(), end, err)
			}
		}()
	}
	wg.Wait()
	if n := most.Load(); n > 20 || bad.Load() > 0 {
		t.Fatalf("%d connections, %d wrong", n, bad.Load())
	}
	t.Logf("%d execs at once over %d connections", boxes*each, most.Load())
}

// freezer stands between client and gateway; once frozen it passes nothing on
// and closes nothing, like a firewall that drops packets.
func freezer(t *testing.T, target string) (addr string, freeze func()) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	t.Cleanup(func() { _ = l.Close() })
	frozen := make(chan struct{})
	pass := func(dst, src net.Conn) {
		buf := make([]byte, 32<<10)
		for {
			n, err := src.Read(buf)
			if err != nil {
				return
			}
			select {
			case <-frozen:
				return
			default:
				_, _ = dst.Write(buf[:n])
			}
		}
	}
	go func() {
		for {
			a, err := l.Accept()
			if err != nil {
				return
			}
			t.Cleanup(func() { _ = a.Close() })
			b, err := net.Dial("unix", target)
			if err != nil {
				return
			}
			t.Cleanup(func() { _ = b.Close() })
			go pass(a, b)
			go pass(b, a)
		}
	}()
	return l.Addr().String(), func() { close(frozen) }
}

func TestA21_DroppedPacketsAreAnErrorNotAHang(t *testing.T) {
	e := start(t)
	addr, freeze := freezer(t, e.socket)
	c, err := client.New(client.Config{URL: "http://" + addr, Key: e.newKey("default"), Retries: -1, Silence: time.Second})
	must(t, err)
	sb := e.sandbox(c)
	p, err := c.Exec(t.Context(), sb.ID, sh("echo A; sleep 100"))
	must(t, err)
	s, err := c.OpenSession(t.Context(), nil, nil)
	must(t, err)
	defer s.Close()
	r, err := s.Exec(t.Context(), sb.ID, sh("echo A; sleep 100"), client.ModeStream, nil)
	must(t, err)
	begun := time.Now()
	_, err = p.Follow(t.Context(), client.Offsets{}, func(ch client.Chunk) error {
		if ch.Stream == process.Stdout && len(ch.Data) > 0 {
			freeze()
		}
		return nil
	})
	wantClass(t, err, dsec.Unavailable)
	_, err = r.Wait(t.Context())
	wantClass(t, err, dsec.Unavailable)
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	_, err = c.Get(ctx, sb.ID)
	wantClass(t, err, dsec.Timeout)
	_, err = c.Files(sb.ID, "").Read(t.Context(), "/etc/passwd", 0, -1, io.Discard)
	wantClass(t, err, dsec.Unavailable)
	if took := time.Since(begun); took > 10*time.Second {
		t.Fatalf("took %v", took)
	}
}

// A repeated call, as after a lost answer, does nothing twice.
func TestRepeatedCallsAreDoneOnce(t *testing.T) {
	e := start(t)
	c := e.local()
	sb := e.sandbox(c)
	key := e.newKey("default")
	move := map[string]any{"sandbox": sb.ID, "from": "/tmp/a", "to": "/tmp/b", "call_id": "m1"}
	_, err := c.Files(sb.ID, "").Write(t.Context(), "/tmp/a", strings.NewReader("x"), files.WriteOptions{})
	must(t, err)
	for range 2 {
		if status, got := e.post(key, "Files/Move", move); status != http.StatusOK {
			t.Fatal(status, got)
		}
	}
	move["to"] = "/tmp/c"
	if status, got := e.post(key, "Files/Move", move); status != http.StatusConflict {
		t.Fatal(status, got)
	}
	p, err := c.Exec(t.Context(), sb.ID, sh("sleep 100"))
	must(t, err)
	for range 2 {
		_, got := e.post(key, "Commands/Kill", map[string]any{"sandbox": sb.ID, "exec": p.ID, "call_id": "k1"})
		if got["killed"] != true {
			t.Fatal(got)
		}
	}
}
