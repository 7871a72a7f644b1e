package gvisor

import (
	"testing"
	"time"

	"github.com/opendsec/dsec/process"
)

// A command that maps memory and starts programs without a pause of its own outlives one hundred pauses.
func TestPausesHurtNoCommand(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	id := w.create(t)
	p, err := w.r.Exec(t.Context(), id, process.Spec{Argv: []string{"/bin/sh", "-c",
		"while ! test -e /tmp/enough; do /bin/true && (exit 7); test $? = 7 || exit 1; done; echo whole"}})
	must(t, err)
	for range 100 {
		must(t, w.r.Pause(t.Context(), id))
		must(t, w.r.Resume(t.Context(), id))
		select {
		case <-time.After(5 * time.Millisecond): // so that it is met somewhere else
		case <-t.Context().Done():
		}
	}
	w.want(t, id, "touch /tmp/enough", "")
	r, err := p.Wait(t.Context())
	must(t, err)
	why, _, _, _ := p.Kept(t.Context(), process.Stderr)
	if out, _, _, err := p.Kept(t.Context(), process.Stdout); err != nil || string(out) != "whole\n" || r.ExitCode != 0 {
		t.Errorf("%+v, %q, %q, %v", r, out, why, err)
	}
}

// What is paused does nothing, also under an agent that has not paused it, and goes on when it is told to.
func TestPausedDoesNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	id := w.create(t)
	p, err := w.r.Exec(t.Context(), id, process.Spec{ID: "counter", Argv: []string{"/bin/sh", "-c", "while true; do echo; done"}})
	must(t, err)
	total := func() int64 {
		t.Helper()
		head, tail, skipped, err := p.Kept(t.Context(), process.Stdout)
		must(t, err)
		return int64(len(head)+len(tail)) + skipped
	}
	eventually(t, "it counts", func() bool { return total() > 0 })
	must(t, w.r.Pause(t.Context(), id))
	stands := func(when string) {
		t.Helper()
		var was int64
		eventually(t, "what it had said is read "+when, func() bool { was = total(); time.Sleep(100 * time.Millisecond); return total() == was })
		time.Sleep(300 * time.Millisecond)
		if now := total(); now != was {
			t.Errorf("%s it has said %d more", when, now-was)
		}
	}
	stands("paused")
	w.close(t)
	w.open(t)
	p, err = w.r.Process(t.Context(), id, "counter")
	must(t, err)
	list, err := w.r.List(t.Context())
	if err != nil || len(list) != 1 || !list[0].Paused || !list[0].Running {
		t.Fatalf("%+v, %v", list, err)
	}
	stands("with another agent")
	was := total()
	must(t, w.r.Resume(t.Context(), id))
	eventually(t, "it goes on", func() bool { return total() > was })
}
