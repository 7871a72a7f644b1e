package guest

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/opendsec/dsec"
)

// echo is a guest that gives back what a stream says behind its request, which
// is read no faster than it is taken.
type echo struct{}

func (echo) Greet() Hello { return Hello{Boot: "b", State: Fresh} }

func (echo) Handle(_ context.Context, s *Stream) {
	q, err := ReadRequest(s)
	if err != nil || WriteMessage(s, Answer{}) != nil {
		return
	}
	if q.Op == OpKill { // a short one
		_ = s.CloseWrite()
		return
	}
	if _, err := io.Copy(s, s); err == nil {
		_ = s.CloseWrite()
		<-s.Over()
	}
}

// line is a channel that stays when the host's end is closed, as a VMM has it.
type line struct {
	mu    sync.Mutex
	host  net.Conn
	guest net.Conn // what the guest speaks to
	far   net.Conn
	ended chan struct{}
}

func newLine(t *testing.T, v Server) *line {
	t.Helper()
	l := &line{ended: make(chan struct{})}
	l.guest, l.far = net.Pipe()
	go func() {
		defer close(l.ended)
		_ = Serve(context.Background(), l.guest, v) // ends with the channel
	}()
	go func() {
		buf := make([]byte, 64<<10)
		for {
			n, err := l.far.Read(buf)
			l.mu.Lock()
			h := l.host
			l.mu.Unlock()
			if h != nil {
				_, _ = h.Write(buf[:n]) // a host that is gone misses it
			}
			if err != nil {
				return
			}
		}
	}()
	t.Cleanup(func() {
		l.mu.Lock()
		if l.host != nil {
			_ = l.host.Close()
		}
		l.mu.Unlock()
		_ = l.far.Close()
		_ = l.guest.Close()
		<-l.ended
	})
	return l
}

// dial is a host's end; of what it says only so many bytes arrive, if not negative.
func (l *line) dial(most int) net.Conn {
	near, far := net.Pipe()
	l.mu.Lock()
	old := l.host
	l.host = far
	l.mu.Unlock()
	if old != nil {
		_ = old.Close()
	}
	go func() {
		defer far.Close() //nolint:errcheck // a pipe
		buf := make([]byte, 64<<10)
		for {
			n, err := far.Read(buf)
			if most >= 0 {
				n = min(n, most)
				most -= n
			}
			if _, werr := l.far.Write(buf[:n]); werr != nil || err != nil || most == 0 {
				return
			}
		}
	}()
	return near
}

func (l *line) connect(t *testing.T) *Client {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	c, err := Connect(ctx, l.dial(-1), Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func TestHelloBeginsASession(t *testing.T) {
	c := newLine(t, echo{}).connect(t)
	if h := c.Hello(); h.Boot != "b" || h.State != Fresh || h.Version != Version {
		t.Fatalf("%+v", h)
	}
	for range 3000 {
		if _, err := c.call(t.Context(), Request{Op: OpKill}); err != nil {
			t.Fatal(err)
		}
	}
	c.mux.mu.Lock()
	defer c.mux.mu.Unlock()
	if len(c.mux.streams) > 2 || c.mux.unread != 0 {
		t.Fatalf("%d streams and %d bytes are kept", len(c.mux.streams), c.mux.unread)
	}
}

// A guest that takes its time is greeted again, unless it is to be greeted once.
func TestGuestIsGreetedOnce(t *testing.T) {
	for _, once := range []bool{false, true} {
		host, far := net.Pipe()
		ctx, cancel := context.WithTimeout(t.Context(), 5*helloAgain)
		gone := make(chan error, 1)
		go func() {
			_, err := Connect(ctx, host, Options{Once: once})
			gone <- err
		}()
		said, _ := io.ReadAll(far) // until it gives up
		if err := <-gone; !errors.Is(err, dsec.Timeout.Err()) {
			t.Error(err)
		}
		cancel()
		if n := bytes.Count(said, magic); once && n != 1 || !once && n < 2 {
			t.Errorf("once %v: greeted %d times", once, n)
		}
	}
}

// trip sends n random bytes and compares what comes back.
func trip(ctx context.Context, c *Client, n int64) error {
	s, _, err := c.begin(ctx, bulkWindow, Request{Op: OpFollow})
	if err != nil {
		return err
	}
	defer s.Close() //nolint:errcheck // it never errs
	sent, got := sha256.New(), sha256.New()
	failed := make(chan error, 1)
	go func() {
		_, err := io.Copy(s, io.TeeReader(io.LimitReader(rand.Reader, n), sent))
		if err == nil {
			err = s.CloseWrite()
		}
		failed <- err
	}()
	m, err := io.Copy(got, s)
	if err = errors.Join(err, <-failed); err != nil {
		return err
	}
	if m != n || !bytes.Equal(sent.Sum(nil), got.Sum(nil)) {
		return errors.New("other bytes came back")
	}
	return nil
}

func TestHundredMegabytesThroughEightStreams(t *testing.T) {
	c := newLine(t, echo{}).connect(t)
	var wg sync.WaitGroup
	began := time.Now()
	for range 8 {
		wg.Go(func() {
			if err := trip(t.Context(), c, 100<<20/8); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	t.Logf("100 MiB in each direction in %v", time.Since(began))
}

// Streams that nobody reads fill up and hold no other one back.
func TestSlowReaderHoldsNobodyBack(t *testing.T) {
	c := newLine(t, echo{}).connect(t)
	for range 20 {
		s, _, err := c.begin(t.Context(), bulkWindow, Request{Op: OpFollow})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()            //nolint:errcheck // it never errs
		go io.Copy(s, rand.Reader) //nolint:errcheck // until the stream is closed
		full := func() bool {
			c.mux.mu.Lock()
			defer c.mux.mu.Unlock()
			return s.inLeft == 0
		}
		for deadline := time.Now().Add(10 * time.Second); !full(); time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatal("the window never filled")
			}
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := trip(ctx, c, 4<<20); err != nil {
		t.Fatal(err)
	}
	c.mux.mu.Lock()
	defer c.mux.mu.Unlock()
	const answer = 4 + len("{}") // of each window, that was read
	if want := 20 * (bulkWindow - answer); c.mux.unread != want {
		t.Errorf("%d bytes are kept, want %d", c.mux.unread, want)
	}
}

// A host is cut off after each number of bytes that it says; the next one is
// served as if there had been none.
func TestNewHostAfterAnyByteOfTheOld(t *testing.T) {
	l := newLine(t, echo{})
	ends := []int{}
	for i := maxPacket; i < maxPacket+700; i++ { // hello, open, the request and data
		ends = append(ends, i)
	}
	ends = append(ends, 1, 39, 40, 41, maxPacket-1)
	for _, most := range ends {
		conn := l.dial(most)
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		if c, err := Connect(ctx, conn, Options{}); err == nil {
			_ = trip(ctx, c, 100<<10) // it breaks off
			_ = c.Close()
		}
		cancel()
		next := l.connect(t)
		if err := trip(t.Context(), next, 1000); err != nil {
			t.Fatalf("after %d bytes: %v", most, err)
		}
		_ = next.Close()
	}
}

// The same the other way: what a new host hears first is the rest of a packet.
func TestRestOfAPacketIsSkipped(t *testing.T) {
	var packets bytes.Buffer
	w := newWire(&packets)
	body := bytes.Repeat([]byte("0123456789"), 100)
	if err := w.send(packet{kind: kindData, session: 7, number: 1, stream: 1}, func(b []byte) int { return copy(b, body) }); err != nil {
		t.Fatal(err)
	}
	one := bytes.Clone(packets.Bytes())
	if err := w.hello(9, []byte(`{"version":1}`)); err != nil {
		t.Fatal(err)
	}
	all := packets.Bytes()
	for cut := range len(one) + 1 {
		sc := newScanner(bytes.NewReader(all[cut:]))
		p, err := sc.next()
		if cut == 0 {
			if err != nil || !bytes.Equal(p.payload, body) {
				t.Fatalf("whole packet: %v", err)
			}
			p, err = sc.next()
		}
		if err != nil || p.kind != kindHello || p.session != 9 || string(p.payload) != `{"version":1}` {
			t.Fatalf("cut at %d: %+v %v", cut, p, err)
		}
	}
}

// What a payload says is never on the wire, so the rest of a packet cannot hold
// another one.
func TestNoPayloadIsAPacket(t *testing.T) {
	var inner, outer bytes.Buffer
	if err := newWire(&inner).send(packet{kind: kindOpen, session: 1, number: 1, stream: 9}, number(talkWindow)); err != nil {
		t.Fatal(err)
	}
	w := newWire(&outer)
	for range 2000 {
		outer.Reset()
		if err := w.send(packet{kind: kindData, session: 1, number: 1, stream: 1}, func(b []byte) int { return copy(b, inner.Bytes()) }); err != nil {
			t.Fatal(err)
		}
		if p, err := newScanner(bytes.NewReader(outer.Bytes()[1:])).next(); err == nil {
			t.Fatalf("found %+v", p)
		}
	}
}

func TestDeadChannelEndsEveryCall(t *testing.T) {
	l := newLine(t, echo{})
	c := l.connect(t)
	errs := make(chan error, 50)
	for range cap(errs) {
		s, _, err := c.begin(t.Context(), talkWindow, Request{Op: OpFollow})
		if err != nil {
			t.Fatal(err)
		}
		go func() { _, err := s.Read(make([]byte, 1)); errs <- err }()
	}
	l.mu.Lock()
	_ = l.host.Close()
	l.mu.Unlock()
	for range cap(errs) {
		if err := <-errs; err == nil {
			t.Fatal("read from a dead channel")
		}
	}
	if _, err := c.call(t.Context(), Request{Op: OpKill}); !errors.Is(err, dsec.Unavailable.Err()) {
		t.Fatal(err)
	}
	select {
	case <-c.Done():
	case <-time.After(5 * time.Second):
		t.Fatal("not done")
	}
}

func TestCancelledCallLeavesNothing(t *testing.T) {
	c := newLine(t, echo{}).connect(t)
	for i := range 200 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i)*20*time.Microsecond)
		_, err := c.call(ctx, Request{Op: OpKill})
		cancel()
		if err != nil && !errors.Is(err, dsec.Timeout.Err()) {
			t.Fatal(err)
		}
	}
	if err := trip(t.Context(), c, 1<<20); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(5 * time.Second); ; time.Sleep(time.Millisecond) {
		c.mux.mu.Lock()
		n, unread := len(c.mux.streams), c.mux.unread
		c.mux.mu.Unlock()
		if n == 0 && unread == 0 && len(c.slots) == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d streams, %d bytes, %d slots", n, unread, len(c.slots))
		}
	}
}

// deaf answers and then reads nothing.
type deaf struct{ echo }

func (deaf) Handle(_ context.Context, s *Stream) {
	if _, err := ReadRequest(s); err == nil && WriteMessage(s, Answer{}) == nil {
		<-s.Over()
	}
}

// A stream whose last Write never gets through is forgotten all the same.
func TestClosedInTheMiddleOfAWrite(t *testing.T) {
	c := newLine(t, deaf{}).connect(t)
	for range 50 {
		s, _, err := c.begin(t.Context(), talkWindow, Request{Op: OpFollow})
		if err != nil {
			t.Fatal(err)
		}
		written := make(chan error, 1)
		go func() { _, err := s.Write(make([]byte, 4*hostWindow)); written <- err }()
		for full := false; !full; time.Sleep(time.Millisecond) {
			c.mux.mu.Lock()
			full = s.credit == 0
			c.mux.mu.Unlock()
		}
		if err := s.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		_ = s.Close()
		if err := <-written; !errors.Is(err, errClosed) {
			t.Fatal(err)
		}
	}
	for deadline := time.Now().Add(5 * time.Second); ; time.Sleep(time.Millisecond) {
		c.mux.mu.Lock()
		n := len(c.mux.streams)
		c.mux.mu.Unlock()
		if n == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d streams are kept", n)
		}
	}
}

// A guest that speaks no version of ours, or does not answer, is an error.
func TestGuestThatIsNone(t *testing.T) {
	near, far := net.Pipe()
	go io.Copy(io.Discard, far) //nolint:errcheck // until it is closed
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := Connect(ctx, near, Options{}); !errors.Is(err, dsec.Timeout.Err()) {
		t.Fatal(err)
	}
	_ = far.Close()
	near, far = net.Pipe()
	go func() {
		p, err := newScanner(far).next()
		if err == nil {
			_ = newWire(far).hello(p.session, []byte(`{"version":2}`))
		}
		_, _ = io.Copy(io.Discard, far)
	}()
	if _, err := Connect(t.Context(), near, Options{}); !errors.Is(err, dsec.Unsupported.Err()) {
		t.Fatal(err)
	}
}

// hostile answers a host with packets that a test makes.
func hostile(t *testing.T, say func(w *wire, session uint64)) *Client {
	t.Helper()
	near, far := net.Pipe()
	go func() {
		p, err := newScanner(far).next()
		if err != nil {
			return
		}
		session := p.session
		go io.Copy(io.Discard, far) //nolint:errcheck // until it is closed
		w := newWire(far)
		if w.hello(session, []byte(`{"version":1}`)) == nil {
			say(w, session)
		}
	}()
	c, err := Connect(t.Context(), near, Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close(); _ = far.Close() })
	return c
}

func TestHostileGuestEndsTheSession(t *testing.T) {
	data := func(n int) func([]byte) int { return func(b []byte) int { clear(b[:n]); return n } }
	for name, say := range map[string]func(w *wire, session uint64){
		"opens a stream": func(w *wire, s uint64) {
			_ = w.send(packet{kind: kindOpen, session: s, number: 1, stream: 1}, number(talkWindow))
		},
		"an unknown stream": func(w *wire, s uint64) {
			_ = w.send(packet{kind: kindData, session: s, number: 1, stream: 99}, data(1))
		},
		"an unknown kind": func(w *wire, s uint64) { _ = w.send(packet{kind: 77, session: s, number: 1, stream: 1}, data(1)) },
		"a gap":           func(w *wire, s uint64) { _ = w.send(packet{kind: kindData, session: s, number: 2, stream: 1}, data(1)) },
		"more than its credit": func(w *wire, s uint64) {
			for i := range uint32(100) {
				if w.send(packet{kind: kindData, session: s, number: i + 1, stream: 1}, data(maxPayload)) != nil {
					return
				}
			}
		},
		"endless credit": func(w *wire, s uint64) {
			for i := range uint32(100) {
				if w.send(packet{kind: kindCredit, session: s, number: i + 1, stream: 1}, number(0xffffffff)) != nil {
					return
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			go_ := make(chan struct{})
			c := hostile(t, func(w *wire, s uint64) { <-go_; say(w, s) })
			s, err := c.open(t.Context(), talkWindow, Request{Op: OpWait})
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close() //nolint:errcheck // it never errs
			close(go_)
			select {
			case <-c.Done():
			case <-time.After(5 * time.Second):
				t.Fatal("it goes on")
			}
		})
	}
}

// A guest that fills every window makes the host keep no more than it says.
func TestHostKeepsNoMoreThanItSays(t *testing.T) {
	begun := make(chan struct{})
	c := hostile(t, func(w *wire, session uint64) {
		<-begun
		n := uint32(0)
		for id := uint32(1); id <= 600; id++ {
			for range bulkWindow / 512 {
				n++
				if w.send(packet{kind: kindData, session: session, number: n, stream: id}, func(b []byte) int { return 512 }) != nil {
					return
				}
			}
		}
	})
	for range 600 {
		if _, err := c.open(t.Context(), bulkWindow, Request{Op: OpWait}); err != nil {
			t.Fatal(err)
		}
	}
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	close(begun)
	select {
	case <-c.Done():
	case <-time.After(30 * time.Second):
		t.Fatal("it goes on")
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	if got := int64(after.HeapAlloc) - int64(before.HeapAlloc); got > 2*maxUnread {
		t.Errorf("%d MiB are kept", got>>20)
	}
	if err := c.mux.cause(); !errors.Is(err, errTooMuch) {
		t.Error(err)
	}
}

func TestTextsOfTheGuestAreBounded(t *testing.T) {
	f := Fault{Class: "made up", Op: strings.Repeat("x", 1<<20), Object: "a\nb\x1b[2J", Text: "\xff"}
	err := f.Err()
	if dsec.ClassOf(err) != dsec.Internal || len(err.Error()) > 3*maxText || strings.ContainsAny(err.Error(), "\n\x1b") || !utf8.ValidString(err.Error()) {
		t.Fatalf("%d bytes of class %s", len(err.Error()), dsec.ClassOf(err))
	}
}

func FuzzScanner(f *testing.F) {
	var b bytes.Buffer
	if err := newWire(&b).send(packet{kind: kindData, session: 1, number: 1, stream: 1}, func(b []byte) int { return copy(b, "hello") }); err != nil {
		f.Fatal(err)
	}
	f.Add(b.Bytes())
	f.Add(append([]byte("\xd5Gp1\xd5Gp"), b.Bytes()...))
	f.Fuzz(func(t *testing.T, b []byte) {
		sc := newScanner(bytes.NewReader(b))
		total := 0
		for {
			p, err := sc.next()
			if err != nil {
				return
			}
			if total += headerSize + len(p.payload); total > len(b) || len(p.payload) > maxPayload {
				t.Fatalf("%d bytes of packets in %d", total, len(b))
			}
		}
	})
}

// packetsOf makes packets of a fuzzer's bytes: those that a checksum refuses are
// no test of what is behind it.
func packetsOf(w *wire, session uint64, b []byte) error {
	for n := uint32(1); len(b) > 4; n++ {
		size := min(int(b[3]), len(b)-4)
		body := b[4 : 4+size]
		p := packet{kind: kind(b[0] % 8), flags: b[1] & 1, session: session, number: n, stream: uint32(b[2] % 8)}
		if err := w.send(p, func(to []byte) int { return copy(to, body) }); err != nil {
			return err
		}
		b = b[4+size:]
	}
	return nil
}

// FuzzGuestBytes is whatever a guest may say to a host in the middle of calls.
func FuzzGuestBytes(f *testing.F) {
	answer := []byte(`{"result":{"Status":"exited"}}`)
	f.Add(append([]byte{3, 1, 1, byte(4 + len(answer))}, append(binary.LittleEndian.AppendUint32(nil, uint32(len(answer))), answer...)...))
	f.Add([]byte{4, 0, 1, 4, 1, 0, 0, 0, 5, 0, 1, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		near, far := net.Pipe()
		defer far.Close() //nolint:errcheck // a pipe
		begun := make(chan struct{})
		go func() {
			p, err := newScanner(far).next()
			if err != nil {
				return
			}
			go io.Copy(io.Discard, far) //nolint:errcheck // until it is closed
			w := newWire(far)
			if w.hello(p.session, []byte(`{"version":1}`)) == nil {
				<-begun
				_ = packetsOf(w, p.session, b)
				_ = far.Close()
			}
		}()
		c, err := Connect(t.Context(), near, Options{})
		if err != nil {
			t.Fatal(err)
		}
		p := &command{c: c}
		var calls sync.WaitGroup
		calls.Go(func() { _, _ = p.Wait(t.Context()) })
		calls.Go(func() { _, _, _, _ = p.Kept(t.Context(), 1) })
		calls.Go(func() { _, _ = c.Process(t.Context(), "x") })
		calls.Go(func() { _, _ = p.Write(t.Context(), []byte("x")) })
		calls.Go(func() {
			r, err := p.Follow(t.Context(), 1, 0)
			for at := int64(0); err == nil; {
				c, nerr := r.Next(t.Context())
				if nerr == nil && c.Offset < at {
					t.Errorf("chunk at %d after %d", c.Offset, at)
				}
				if at, err = c.Offset+int64(len(c.Data)), nerr; c.EOF {
					break
				}
			}
			if r != nil {
				_ = r.Close()
			}
		})
		close(begun)
		calls.Wait()
		_ = c.Close()
	})
}

// FuzzHostBytes is whatever a broken host may say to a guest.
func FuzzHostBytes(f *testing.F) {
	f.Add([]byte{2, 0, 1, 4, 0, 0x40, 0, 0, 3, 1, 1, 2, 1, 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		near, far := net.Pipe()
		ended := make(chan struct{})
		go func() { defer close(ended); _ = Serve(context.Background(), far, echo{}) }()
		go io.Copy(io.Discard, near) //nolint:errcheck // until it is closed
		w := newWire(near)
		if err := w.hello(5, []byte(`{"versions":[1]}`)); err != nil {
			t.Fatal(err)
		}
		_ = packetsOf(w, 5, b)
		_, _ = near.Write(b)
		_ = near.Close()
		_ = far.Close()
		<-ended
	})
}

func FuzzFrame(f *testing.F) {
	f.Add([]byte("\x02\x00\x00\x00{}"))
	f.Fuzz(func(t *testing.T, b []byte) {
		var a Answer
		_ = readMessage(bytes.NewReader(b), maxAnswer, &a)
		if a.Spec != nil {
			s := a.Spec.Process()
			_ = s.Validate()
		}
		_ = a.Error.Err()
		_, _ = ReadRequest(bytes.NewReader(b))
	})
}
