package crew

import (
	"sync/atomic"
	"testing"
)

func TestNobodyJoinsAfterCloseAndWaitWaitsForTheRest(t *testing.T) {
	var c Crew
	var ran atomic.Int32
	hold := make(chan struct{})
	for range 100 {
		if !c.Go(func() { <-hold; ran.Add(1) }) {
			t.Fatal("too late before Close")
		}
	}
	if !c.Join() {
		t.Fatal("too late before Close")
	}
	c.Close()
	c.Close() // again is nothing new
	if c.Join() || c.Go(func() { t.Error("ran after Close") }) {
		t.Error("joined after Close")
	}
	close(hold)
	c.Leave()
	c.Wait()
	if ran.Load() != 100 {
		t.Errorf("%d of 100 had ended when Wait returned", ran.Load())
	}
}

func TestJoiningRacesWithClosing(t *testing.T) {
	for range 200 {
		var c Crew
		var at atomic.Int32
		start := make(chan struct{})
		go func() {
			<-start
			c.Go(func() { at.Add(1) })
		}()
		close(start)
		c.Close()
		c.Wait()
	}
}
