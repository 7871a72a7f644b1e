package files

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// sample has every field set.
func sample() *call {
	when := time.Unix(1700000000, 5).UTC()
	return &call{op: callWrite, flag: true, append: true, depth: 3, mode: ptr(uint32(0o644)), uid: ptr(uint32(1000)), gid: ptr(uint32(0)),
		mtime: &when, offset: -1, length: 1 << 40, limit: time.Minute, path: "/a b/\xff", to: "digest", globs: []string{"**/*.xml", "x"}}
}

func sampleInfo() Info {
	return Info{Path: "/p", Kind: Symlink, Size: 7, Mode: 0o4755, UID: 1, GID: 2, Owner: "o", Group: "g", MTime: time.Unix(-5, 9).UTC(), Target: "t", Links: 3}
}

// golden are the frames of the format's example, in order.
func golden() []byte {
	i := sampleInfo()
	var item encoder
	item.change(Change{Path: "/d/x", Op: OpRemove})
	var b []byte
	for _, f := range [][]byte{
		newFrame(frameHello, 0, wireMagic),
		newFrame(frameRequest, 1, sample().encode()),
		newFrame(frameCredit, 1, []byte{0, 8, 0, 0}),
		newFrame(frameData, 1, []byte("content")),
		newFrame(frameEnd, 1, []byte{0}),
		newFrame(frameResponse, 1, (&response{info: &i}).encode()),
		newFrame(frameResponse, 2, (&response{err: dsec.Errorf(dsec.NoSpace, opWrite, `"/f"`, "no space left on device")}).encode()),
		newFrame(frameData, 3, item.b),
		newFrame(frameCancel, 3, nil),
		newFrame(frameGoAway, 3, nil),
	} {
		b = append(b, f...)
	}
	return b
}

func TestTheWireFormatIsTheGoldenOne(t *testing.T) {
	want, err := os.ReadFile("testdata/wire.golden")
	must(t, err)
	if got := hex.Dump(golden()); got != string(want) {
		t.Errorf("the format changed; a new one needs a new version byte\n%s", got)
	}
}

func TestMessagesSurviveTheWire(t *testing.T) {
	c, err := decodeCall(sample().encode())
	if err != nil || !reflect.DeepEqual(c, sample()) {
		t.Errorf("call became %+v, %v", c, err)
	}
	i := sampleInfo()
	r, err := decodeResponse((&response{info: &i}).encode())
	if err != nil || !reflect.DeepEqual(*r.info, i) {
		t.Errorf("info became %+v, %v", r.info, err)
	}
	for _, class := range dsec.Classes {
		in := dsec.Errorf(class, "op", "object", "cause")
		r, err = decodeResponse((&response{err: in}).encode())
		if err != nil || dsec.ClassOf(r.err) != class || r.err.Error() != in.Error() {
			t.Errorf("error became %v, %v", r.err, err)
		}
	}
	var e encoder
	e.bool(true)
	for _, s := range []string{"no such class", "op\x1b[2J", "obj\n", "cau\xffse"} {
		e.str(s)
	}
	r, err = decodeResponse(e.b)
	if err != nil || dsec.ClassOf(r.err) != dsec.Internal || r.err.Error() != "op?[2J obj?: cau?se" {
		t.Errorf("hostile error became %q, %v", r.err, err)
	}
}

func FuzzDecode(f *testing.F) {
	f.Add(golden())
	f.Add(sample().encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		for r := newFrameReader(bytes.NewReader(b)); ; {
			if _, err := r.next(); err != nil {
				break
			}
		}
		if c, err := decodeCall(b); err == nil {
			if again, err := decodeCall(c.encode()); err != nil || !reflect.DeepEqual(c, again) {
				t.Errorf("%+v became %+v, %v", c, again, err)
			}
		}
		_, _ = decodeResponse(b)
		_ = items(bytes.NewReader(b), func(d *decoder) error { d.info(); return nil })
		_ = items(bytes.NewReader(b), func(d *decoder) error { d.change(); return nil })
	})
}

// FuzzServe gives a server arbitrary bytes.
func FuzzServe(f *testing.F) {
	f.Add(golden())
	f.Fuzz(func(t *testing.T, b []byte) {
		root := t.TempDir()
		l := local(t, root)
		conn := &script{Reader: io.MultiReader(bytes.NewReader(newFrame(frameHello, 0, wireMagic)), bytes.NewReader(b))}
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		_ = Serve(ctx, conn, l, 0)
		if ctx.Err() != nil {
			t.Error("did not end")
		}
	})
}

// script is a connection that says what it is told and forgets answers.
type script struct{ io.Reader }

func (script) Write(p []byte) (int, error) { return len(p), nil }
func (script) Close() error                { return nil }

// hostile answers a client's requests with frames of its own making.
func hostile(t *testing.T, frames ...[]byte) *Client {
	a, b := socketPair(t, unix.SOCK_STREAM)
	go func() {
		defer b.Close()
		r := newFrameReader(b)
		for n := 0; n < 2; n++ { // hello, request
			if _, err := r.next(); err != nil {
				return
			}
		}
		for _, f := range frames {
			if _, err := b.Write(f); err != nil {
				return
			}
		}
		_, _ = io.Copy(io.Discard, b)
	}()
	c := NewClient(a)
	t.Cleanup(func() { c.Close() })
	return c
}

func TestAHostileServerIsCutOff(t *testing.T) {
	hello := newFrame(frameHello, 0, wireMagic)
	big := make([]byte, frameHeader)
	putHeader(big, frameData, 1)
	copy(big, []byte{0xff, 0xff, 0xff, 0xff})
	flood := [][]byte{hello}
	for range window/maxPayload + 1 {
		flood = append(flood, newFrame(frameData, 1, zeros[:]))
	}
	for name, frames := range map[string][][]byte{
		"no hello":       {newFrame(frameData, 1, nil)},
		"other version":  {newFrame(frameHello, 0, []byte("DSFS\x02"))},
		"huge frame":     {hello, big},
		"unknown id":     {hello, newFrame(frameData, 9, nil)},
		"unknown type":   {hello, newFrame(99, 1, nil)},
		"bad response":   {hello, newFrame(frameResponse, 1, []byte{7})},
		"response twice": {hello, newFrame(frameResponse, 1, []byte{0, 0}), newFrame(frameResponse, 1, []byte{0, 0})},
		"no credit":      flood,
		"too much":       {hello, newFrame(frameData, 1, append([]byte{0xff, 0, 0, 0}, zeros[:100]...))},
		"no list":        {hello, newFrame(frameData, 1, []byte{0, 0, 0, 1, 9})},
	} {
		t.Run(name, func(t *testing.T) {
			c := hostile(t, frames...)
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			_, err := c.List(ctx, "/", 1)
			if name == "no credit" {
				_, err = c.Read(ctx, "/", 0, -1, io.Discard)
			}
			if name == "response twice" {
				<-c.Done()
				return
			}
			if err == nil || ctx.Err() != nil {
				t.Errorf("list ended with %v", err)
			}
		})
	}
}

func TestASilentServerDoesNotHoldACall(t *testing.T) {
	c := hostile(t)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := c.Write(ctx, "/f", noise(10<<20), WriteOptions{})
	wantClass(t, err, dsec.Timeout, "write file", "/f")
	_, err = c.Stat(ctx, "/f", true)
	wantClass(t, err, dsec.Timeout)
}

// stuck is a file service that never answers, until its context ends.
type stuck struct {
	FS
	begun chan struct{}
	ended chan struct{}
}

func (s stuck) Stat(ctx context.Context, _ string, _ bool) (Info, error) {
	close(s.begun)
	<-ctx.Done()
	close(s.ended)
	return Info{}, ctx.Err()
}

func TestCancellationAndDeadlineReachTheServer(t *testing.T) {
	for _, how := range []string{"cancel", "deadline", "close"} {
		t.Run(how, func(t *testing.T) {
			s := stuck{begun: make(chan struct{}), ended: make(chan struct{})}
			c := connected(t, s, unix.SOCK_STREAM)
			ctx, cancel := context.WithCancel(t.Context())
			if how == "deadline" {
				ctx, cancel = context.WithTimeout(t.Context(), 20*time.Millisecond)
			}
			defer cancel()
			go func() {
				<-s.begun
				switch how {
				case "cancel":
					cancel()
				case "close":
					c.Close()
				}
			}()
			_, err := c.Stat(ctx, "/", true)
			wantClass(t, err, map[string]dsec.Class{"cancel": dsec.Canceled, "deadline": dsec.Timeout, "close": dsec.Unavailable}[how])
			<-s.ended
		})
	}
}

func TestManyCallsShareAConnection(t *testing.T) {
	for _, kind := range []int{unix.SOCK_STREAM, unix.SOCK_SEQPACKET} {
		t.Run(fmt.Sprint(kind), func(t *testing.T) {
			c := connected(t, local(t, newRoot(t)), kind)
			var wg sync.WaitGroup
			for n := range 2 * maxStreams {
				wg.Go(func() {
					path := fmt.Sprintf("/%d", n)
					size := int64(n * 5000)
					if _, err := c.Write(t.Context(), path, noise(size), WriteOptions{}); err != nil {
						t.Error(err)
					}
					if got, err := c.Read(t.Context(), path, 0, -1, io.Discard); got != size || err != nil {
						t.Errorf("read %d of %d, %v", got, size, err)
					}
				})
			}
			wg.Wait()
		})
	}
}

func TestASlowReaderHoldsOnlyItself(t *testing.T) {
	root := newRoot(t)
	s := service{local(t, root), root}
	put(t, s, "/big", strings.Repeat("x", 8<<20))
	c := connected(t, s.fs, unix.SOCK_STREAM)
	r, w := io.Pipe()
	done := make(chan error, 1)
	go func() {
		_, err := c.Read(t.Context(), "/big", 0, -1, w)
		w.CloseWithError(err)
		done <- err
	}()
	if _, err := io.ReadFull(r, make([]byte, 10)); err != nil { // it runs, and now waits for us
		t.Fatal(err)
	}
	for range 20 {
		if _, err := c.Read(t.Context(), "/big", 0, 1<<20, io.Discard); err != nil {
			t.Fatal(err)
		}
	}
	n, _ := io.Copy(io.Discard, r)
	if err := <-done; err != nil || n != 8<<20-10 {
		t.Errorf("%d bytes, %v", n, err)
	}
}

func TestAWriterThatFailsEndsTheRead(t *testing.T) {
	root := newRoot(t)
	s := service{local(t, root), root}
	put(t, s, "/big", strings.Repeat("x", 8<<20))
	c := connected(t, s.fs, unix.SOCK_STREAM)
	r, w := io.Pipe()
	r.CloseWithError(errors.New("client hung up"))
	_, err := c.Read(t.Context(), "/big", 0, -1, w)
	wantClass(t, err, dsec.Canceled, "client hung up")
	if _, err := c.Stat(t.Context(), "/big", true); err != nil {
		t.Error(err)
	}
}

func TestIdleServersLeaveAndCallsRedial(t *testing.T) {
	root := newRoot(t)
	l := local(t, root)
	var serving sync.WaitGroup
	dials := 0
	r := NewRedialing(func(context.Context) (io.ReadWriteCloser, error) {
		dials++
		a, b := socketPair(t, unix.SOCK_STREAM)
		serving.Go(func() {
			if err := Serve(context.Background(), b, l, 20*time.Millisecond); err != nil {
				t.Error(err)
			}
		})
		return a, nil
	})
	for n := range 60 {
		text := fmt.Sprint(n)
		if _, err := r.Write(t.Context(), "/f", strings.NewReader(text), WriteOptions{}); err != nil {
			t.Fatal(err)
		}
		var b bytes.Buffer
		if _, err := r.Read(t.Context(), "/f", 0, -1, &b); err != nil || b.String() != text {
			t.Fatalf("%q, %v", b.String(), err)
		}
		if n%3 == 0 {
			serving.Wait() // it went by itself
			if !r.Idle() {
				t.Error("not idle after the server left")
			}
		}
	}
	if dials < 20 {
		t.Errorf("dialed %d times", dials)
	}
	must(t, r.Close())
	serving.Wait()
	_, err := r.Stat(t.Context(), "/f", true)
	wantClass(t, err, dsec.Unavailable)
}

func TestALostServerIsUnavailable(t *testing.T) {
	a, b := socketPair(t, unix.SOCK_STREAM)
	c := NewClient(a)
	defer c.Close()
	b.Close()
	_, err := c.Stat(t.Context(), "/", true)
	wantClass(t, err, dsec.Unavailable, "stat", "connection to the file service ended")
	<-c.Done()
}
