package tier

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/files"
)

// opener opens services that dial nothing until they are used.
type opener struct {
	mu   sync.Mutex
	made []*files.Redialing
	dial func(context.Context) (io.ReadWriteCloser, error)
}

func (o *opener) open(context.Context) (*files.Redialing, error) {
	fs := files.NewRedialing(o.dial)
	o.mu.Lock()
	defer o.mu.Unlock()
	o.made = append(o.made, fs)
	return fs, nil
}

func closed(t *testing.T, fs *files.Redialing) bool {
	t.Helper()
	_, err := fs.Stat(t.Context(), "/", true)
	if err == nil {
		t.Fatal("there is nobody to answer")
	}
	return dsec.ClassOf(err) == dsec.Unavailable
}

// TestServices are one for each user and session; the one of a session before is closed.
func TestServices(t *testing.T) {
	o := &opener{dial: func(context.Context) (io.ReadWriteCloser, error) {
		return nil, dsec.Errorf(dsec.NotFound, "dial", "", "nobody")
	}}
	var s Services
	get := func(user string, of any) *files.Redialing {
		fs, err := s.Get(t.Context(), user, of, o.open)
		if err != nil {
			t.Fatal(err)
		}
		return fs
	}
	one, two := new(int), new(int)
	first := get("a", one)
	if get("a", one) != first || get("b", one) == first {
		t.Error("a service is not that of its user")
	}
	next := get("a", two)
	if next == first || !closed(t, first) || closed(t, next) {
		t.Error("the service of the session before is there still")
	}
	if _, err := s.Get(t.Context(), "c", two, func(context.Context) (*files.Redialing, error) { return nil, errors.New("no") }); err == nil {
		t.Error("no error")
	}
	var wg sync.WaitGroup
	got := make([]*files.Redialing, 20)
	for i := range got {
		wg.Go(func() { got[i] = get("d", two) })
	}
	wg.Wait()
	for _, fs := range got {
		if fs != got[0] || closed(t, fs) {
			t.Fatal("calls at the same time got different services")
		}
	}
	s.Close()
	if !closed(t, next) || !s.Idle() || get("a", two) == next {
		t.Error("after Close one is there still")
	}
}

// TestServicesOfManyUsers are forgotten when they are idle, and not when they are used.
func TestServicesOfManyUsers(t *testing.T) {
	ours, theirs := net.Pipe()
	defer theirs.Close()
	o := &opener{dial: func(context.Context) (io.ReadWriteCloser, error) { return ours, nil }}
	var s Services
	busy, err := s.Get(t.Context(), "busy", nil, o.open)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = busy.Stat(ctx, "/", true) // until it is cancelled
	}()
	if _, err := theirs.Read(make([]byte, 1)); err != nil { // it has begun
		t.Fatal(err)
	}
	if s.Idle() {
		t.Error("one that is used is idle")
	}
	for i := range 10 * mostServices {
		if _, err := s.Get(t.Context(), fmt.Sprint(i), nil, o.open); err != nil {
			t.Fatal(err)
		}
		if n := len(s.all); n > mostServices {
			t.Fatalf("%d are kept", n)
		}
	}
	if again, err := s.Get(t.Context(), "busy", nil, o.open); err != nil || again != busy {
		t.Error("one that is used was forgotten", err)
	}
	cancel()
	s.Close()
	<-done
}
