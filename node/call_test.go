package node

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec"
)

// TestResultsOfCallsAreRememberedWithinBounds is about the memory alone.
func TestResultsOfCallsAreRememberedWithinBounds(t *testing.T) {
	var m callMemory
	now := time.Now()
	k, first := m.join("a", "h")
	if !first {
		t.Fatal("not the first")
	}
	again, first := m.join("a", "h")
	if first || again != k {
		t.Fatal("a second call")
	}
	k.res.Stdout = make([]byte, callBytes/2)
	m.end(k, now)
	m.leave(k)
	m.leave(k)
	if again, first = m.join("a", "h"); first || again != k {
		t.Error("forgotten")
	}
	m.leave(again)
	b, _ := m.join("b", "h")
	b.res.Stdout = make([]byte, callBytes/2)
	m.end(b, now) // both together are too much
	if _, first = m.join("a", "h"); !first {
		t.Error("the oldest is not forgotten")
	}
	c, _ := m.join("c", "h")
	m.end(c, now.Add(callsFor+time.Second))
	if _, first = m.join("b", "h"); !first {
		t.Error("an old one is not forgotten")
	}
	if m.bytes != callFrame || len(m.order) != 1 {
		t.Errorf("%d bytes in %d results", m.bytes, len(m.order))
	}
}

func TestFailuresThatMayPassAreNotRemembered(t *testing.T) {
	for class, kept := range map[dsec.Class]bool{dsec.Unavailable: false, dsec.Canceled: false, dsec.ResourceExhausted: false, dsec.Internal: false, dsec.NotFound: true, dsec.Invalid: true} {
		var m callMemory
		k, _ := m.join("a", "h")
		k.err = dsec.E(class, "call", "", nil)
		m.end(k, time.Now())
		m.leave(k)
		if _, first := m.join("a", "h"); first == kept {
			t.Errorf("%s: made again: %v", class, first)
		}
	}
}

// TestACallEndsWithItsLastCaller and the id begins anew.
func TestACallEndsWithItsLastCaller(t *testing.T) {
	var m callMemory
	ctx, cancel := context.WithCancel(context.Background())
	k, _ := m.join("a", "h")
	m.begin(k, cancel)
	m.join("a", "h")
	m.leave(k)
	if ctx.Err() != nil {
		t.Fatal("ended while somebody waits")
	}
	m.leave(k)
	if !errors.Is(ctx.Err(), context.Canceled) {
		t.Error("it goes on for nobody")
	}
	if _, first := m.join("a", "h"); !first {
		t.Error("a cancelled call is joined")
	}
	m.end(k, time.Now()) // must not touch the new one
	var wg sync.WaitGroup
	for range 8 { // races
		wg.Go(func() {
			k, first := m.join("r", "h")
			if first {
				m.end(k, time.Now())
			}
			<-k.done
			m.leave(k)
		})
	}
	wg.Wait()
}
