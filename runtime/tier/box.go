package tier

import (
	"context"
	"sync"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
)

// Phase is where a sandbox is as its runtime sees it; the states of package dsec are the node's.
type Phase int

// The phases.
const (
	Absent   Phase = iota // no record: being made, or removed
	Making                // created or started, not yet running
	Running               //
	Ended                 // ended by itself; Stop or Destroy acknowledges
	Stopped               // disk kept
	Removing              // Destroy is under way
)

// Box is what every tier keeps of a sandbox; the tier's own type embeds it. Its turn serialises
// the calls that change the sandbox. Mu guards the fields, those of the type that embeds it
// included, and is held for moments only.
type Box struct {
	ID   dsec.SandboxID
	turn chan struct{} // capacity 1

	Mu       sync.Mutex
	Phase    Phase
	Paused   bool
	Stopping bool // Stop is under way, so ends are no news
}

// Init makes it the box of a sandbox, once and before its use.
func (b *Box) Init(id dsec.SandboxID) {
	b.ID, b.turn = id, make(chan struct{}, 1)
}

func (b *Box) box() *Box { return b }

// Enter waits for the calls before this one.
func (b *Box) Enter(ctx context.Context, op string) error {
	select {
	case b.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return dsec.E(dsec.ClassOf(ctx.Err()), op, string(b.ID), context.Cause(ctx))
	}
}

// Leave ends the turn.
func (b *Box) Leave() { <-b.turn }

// SetPhase changes the phase.
func (b *Box) SetPhase(p Phase) {
	b.Mu.Lock()
	defer b.Mu.Unlock()
	b.Phase = p
}

// GetPhase is the phase of this moment.
func (b *Box) GetPhase() Phase {
	b.Mu.Lock()
	defer b.Mu.Unlock()
	return b.Phase
}

// IsPaused reports whether it stands still.
func (b *Box) IsPaused() bool {
	b.Mu.Lock()
	defer b.Mu.Unlock()
	return b.Paused
}

// Gone reports whether the sandbox is removed, or about to be.
func (b *Box) Gone() bool {
	p := b.GetPhase()
	return p == Removing || p == Absent
}

// ExplainFiles is Explain for a tier that serves the files of a sandbox in all its states: only
// one that is removed, or about to be, is gone.
func (b *Box) ExplainFiles(err error) error {
	if err == nil || !b.Gone() || dsec.ClassOf(err) != dsec.Unavailable && dsec.ClassOf(err) != dsec.NotFound {
		return err
	}
	return dsec.E(dsec.SandboxGone, "reach files of sandbox", string(b.ID), err)
}

// Explain says of an error when it is the sandbox that is gone: that it does not run, or is about
// to be stopped, or that what it runs in has ended, which lost tells.
func (b *Box) Explain(op string, err error, lost func() bool) error {
	class := dsec.ClassOf(err)
	if class != dsec.Unavailable && class != dsec.NotFound && class != dsec.SandboxGone {
		return err
	}
	b.Mu.Lock()
	p, stopping := b.Phase, b.Stopping
	b.Mu.Unlock()
	gone := p != Running && p != Making || stopping || lost()
	if gone && (class != dsec.NotFound || p == Removing || p == Absent) {
		return dsec.E(dsec.SandboxGone, op, string(b.ID), err)
	}
	return err
}

// IsDone reports whether a channel that is closed at the end of something is.
func IsDone(done <-chan struct{}) bool {
	select {
	case <-done:
		return true
	default:
		return false
	}
}

// AnnounceRemoval makes calls into a sandbox that runs or has ended fail from now on. The undo
// is for a removal that does not get its turn.
func (b *Box) AnnounceRemoval() (undo func()) {
	b.Mu.Lock()
	defer b.Mu.Unlock()
	was := b.Phase
	if was != Running && was != Ended {
		return func() {}
	}
	b.Phase = Removing
	return func() {
		b.Mu.Lock()
		defer b.Mu.Unlock()
		if b.Phase == Removing {
			b.Phase = was
		}
	}
}

// Status is what List says of it; false if there is nothing to say.
func (b *Box) Status() (runtime.Status, bool) {
	b.Mu.Lock()
	defer b.Mu.Unlock()
	return runtime.Status{ID: b.ID, Running: b.Phase == Running, Paused: b.Phase == Running && b.Paused}, b.Phase != Absent
}

// Command is a command of the sandbox.
func (b *Box) Command(p process.Process) *Command {
	return &Command{Process: p, Sandbox: b.ID, Gone: b.Gone}
}
