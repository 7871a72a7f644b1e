package loader

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/layer"
)

// TestFrameHasTheFormatOfVersion2.
func TestFrameHasTheFormatOfVersion2(t *testing.T) {
	d := layer.Digest("sha256:" + strings.Repeat("0a", 32))
	f := frame{V: version, Op: opTrouble, Session: "ondemand/0a/7", Digest: d, Number: 3, Generation: 1<<64 - 1, At: time.Date(2026, 11, 30, 4, 5, 6, 7, time.UTC),
		Error: troubleOf(dsec.Errorf(dsec.Corrupt, "read layer", string(d), "content has another digest"))}
	got, err := json.Marshal(f)
	must(t, err)
	want, err := os.ReadFile("testdata/trouble-v2.json")
	must(t, err)
	if string(got) != strings.TrimSpace(string(want)) {
		t.Errorf("%s", got)
	}
	var back frame
	must(t, back.decode(got))
	if back.Generation != f.Generation || !back.At.Equal(f.At) || back.Session != f.Session {
		t.Errorf("%+v", back)
	}
}

// TestTextOfErrorsIsCut, where it is sent and where it is read.
func TestTextOfErrorsIsCut(t *testing.T) {
	long := strings.Repeat("ä", maxText)
	if x := troubleOf(errors.New(long)); len(x.Text) > maxText || !utf8.ValidString(x.Text) {
		t.Errorf("%d bytes", len(x.Text))
	}
	f := frame{Op: opTrouble, Error: &trouble{Class: "of tomorrow", Text: long}}
	if err := f.err(); len(err.Error()) > maxText+100 || dsec.ClassOf(err) != dsec.Internal {
		t.Errorf("%d bytes, %s", len(err.Error()), dsec.ClassOf(err))
	}
}

// connected are two ends.
func connected(t *testing.T) (a, b *conn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	must(t, err)
	end := func(fd int) *conn {
		f := os.NewFile(uintptr(fd), "pair")
		defer f.Close()
		c, err := net.FileConn(f)
		must(t, err)
		t.Cleanup(func() { _ = c.Close() })
		return &conn{c: c.(*net.UnixConn)}
	}
	return end(fds[0]), end(fds[1])
}

// TestAnAnswerThatIsTooLargeIsAnError for who waits for it.
func TestAnAnswerThatIsTooLargeIsAnError(t *testing.T) {
	a, b := connected(t)
	must(t, a.answer(frame{ID: 7, Op: opHello, Session: strings.Repeat("x", maxFrame)}))
	f, err := b.recv(make([]byte, maxFrame))
	if err != nil || f.ID != 7 || dsec.ClassOf(f.err()) != dsec.Internal {
		t.Errorf("%+v, %v", f, err)
	}
}

// TestListsOfAnyLengthAreAnswered: they do not fit into a message.
func TestListsOfAnyLengthAreAnswered(t *testing.T) {
	s := NewServer(Options{})
	defer s.stop(nil)
	const layers = 3000
	for i := range layers {
		d := layer.DigestOf([]byte{byte(i), byte(i >> 8)})
		s.layers[d] = &served{digest: d, sessions: map[string]bool{prefix + d.Hex() + "/1": false}}
	}
	for _, o := range []op{opHello, opStatus} {
		a, b := connected(t)
		s.handle(a, frame{ID: 1, Op: o})
		f, err := b.recv(make([]byte, maxFrame))
		must(t, err)
		if o == opHello {
			names, err := listOf[string](&f)
			if err != nil || len(names) != layers {
				t.Errorf("%d names, %v", len(names), err)
			}
		} else if all, err := listOf[Status](&f); err != nil || len(all) != layers {
			t.Errorf("%d layers, %v", len(all), err)
		}
	}
}

// TestWhoTakesNothingIsGivenUp: also of many who write, none waits for longer
// than the first.
func TestWhoTakesNothingIsGivenUp(t *testing.T) {
	a, _ := connected(t)
	a.within = 20 * time.Millisecond
	for {
		if err := a.send(frame{Op: opShort}); err != nil {
			if !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("send: %v", err)
			}
			break
		}
	}
	if err := a.send(frame{Op: opShort}); !errors.Is(err, net.ErrClosed) {
		t.Errorf("another: %v", err)
	}
}

// TestAnotherVersionEndsTheLoader, having said why; its successor serves.
func TestAnotherVersionEndsTheLoader(t *testing.T) {
	w := newWorld(t, FUSE)
	must(t, w.client.Close())
	l, err := net.FileListener(w.lis)
	must(t, err)
	ended := make(chan error, 1)
	go func() { ended <- NewServer(Options{Blobs: w.blobs}).Run(l.(*net.UnixListener)) }()
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: w.socket, Net: "unixpacket"})
	must(t, err)
	defer c.Close()
	_, err = c.Write([]byte(`{"v":1,"id":1,"op":"hello"}`))
	must(t, err)
	f, err := (&conn{c: c}).recv(make([]byte, maxFrame))
	if err != nil || dsec.ClassOf(f.err()) != dsec.Unsupported {
		t.Errorf("answered %+v, %v", f, err)
	}
	if err := <-ended; dsec.ClassOf(err) != dsec.Unsupported {
		t.Errorf("ended with %v", err)
	}
	must(t, l.Close())
	w.client, err = Open(t.Context(), w.config)
	must(t, err)
	defer w.serve()()
	w.eventually("the next one answers", w.answers)
}

// TestALoaderOfAnotherVersionIsAskedAgain, and not as fast as can be.
func TestALoaderOfAnotherVersionIsAskedAgain(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: socket, Net: "unixpacket"})
	must(t, err)
	shelf := linux.NewKeeper()
	defer shelf.Close()
	cl, err := Open(t.Context(), Config{Socket: socket, Keeper: shelf})
	must(t, err)
	defer func() { must(t, errors.Join(cl.Close(), l.Close())) }()
	for range 3 {
		c, err := l.AcceptUnix()
		must(t, err)
		_, err = c.Write([]byte(`{"v":1,"id":1,"op":"hello","names":[]}`))
		must(t, err)
		if _, err := c.Read(make([]byte, maxFrame)); err == nil { // its hello; then it hangs up
			_, err = c.Read(make([]byte, maxFrame))
			if err == nil {
				t.Error("it goes on")
			}
		}
		_ = c.Close()
	}
}

// TestASessionIsKeptUntilItsEndIsTaken: and only then is its trace passed on.
func TestASessionIsKeptUntilItsEndIsTaken(t *testing.T) {
	w := newWorld(t, FUSE)
	must(t, w.client.Close())
	var asked atomic.Int64
	var last Ended
	kept := func() int {
		names, err := w.shelf.Names(context.Background(), prefix+w.layer.Digest.Hex())
		must(t, err)
		return len(names)
	}
	w.config.Ended = func(_ context.Context, e Ended) bool {
		if kept() == 0 {
			t.Error("it was dropped before")
		}
		last = e
		return asked.Add(1) > 1
	}
	w.config.Read = func(context.Context, layer.Digest, []layer.Range) {
		if asked.Load() < 2 {
			t.Error("the trace was passed on before")
		}
	}
	var err error
	w.client, err = Open(t.Context(), w.config)
	must(t, err)
	defer w.serve()()
	w.eventually("the loader answers", w.answers)
	before := time.Now()
	d, err := w.client.Device(t.Context(), w.layer)
	must(t, err)
	for _, name := range []string{"", groupName, "other/" + d.Session} { // what is none of its sessions
		w.client.told(frame{Op: opEnded, Digest: w.layer.Digest, Session: name})
	}
	w.client.told(frame{Op: opEnded})
	if asked.Load() > 0 {
		t.Error("asked about what is no session")
	}
	must(t, w.client.Fetch(t.Context(), w.layer.Digest, []layer.Range{{Off: 0, Len: 1}}))
	must(t, d.Mount.Close())
	w.eventually("it is dropped", func() bool { return kept() == 0 })
	if last.Layer != w.layer.Digest || last.Session != d.Session || last.At.Before(before) || asked.Load() != 2 {
		t.Errorf("asked %d times, last of %+v", asked.Load(), last)
	}
}

// TestNoLoaderIsMissedByWhoEndsEverything: it is a warning for all others.
func TestNoLoaderIsMissedByWhoEndsEverything(t *testing.T) {
	for _, ending := range []bool{false, true} {
		shelf, said := linux.NewKeeper(), &lines{}
		cl, err := Open(t.Context(), Config{Socket: filepath.Join(t.TempDir(), "none"), Keeper: shelf, Ending: ending, Log: slog.New(slog.NewTextHandler(said, &slog.HandlerOptions{Level: slog.LevelDebug}))})
		must(t, err)
		said.await()
		must(t, cl.Close())
		shelf.Close()
		if got := said.text(); !strings.Contains(got, "connection to the loader") || strings.Contains(got, "WARN") == ending {
			t.Errorf("ending %v: %s", ending, got)
		}
	}
}

// TestAnAgentThatHangsUpIsNoTrouble: it does when it ends.
func TestAnAgentThatHangsUpIsNoTrouble(t *testing.T) {
	socket, said := filepath.Join(t.TempDir(), "s"), &lines{}
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: socket, Net: "unixpacket"})
	must(t, err)
	done := make(chan error, 1)
	go func() { done <- NewServer(Options{Log: slog.New(slog.NewTextHandler(said, nil))}).Run(l) }()
	agent, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: socket, Net: "unixpacket"})
	must(t, err)
	must(t, agent.Close())
	said.await()
	must(t, errors.Join(l.Close(), <-done))
	if got := said.text(); strings.Contains(got, "WARN") || !strings.Contains(got, "the agent hung up") {
		t.Error(got)
	}
}

// lines are what was logged.
type lines struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) text() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// await returns when there is a line, or far too late.
func (l *lines) await() {
	for end := time.Now().Add(20 * time.Second); l.text() == "" && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
}
