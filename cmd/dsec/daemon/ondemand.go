package daemon

import (
	"context"
	"log/slog"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/layer/ondemand/loader"
	"github.com/opendsec/dsec/layer/store"
)

// What the loader tells of layers comes while the agent is still opening, too:
// it waits until there is somebody to tell, or, if that fails, for the loader's
// client to be closed. When the agent is closing nobody takes note any more: the
// loader tells the next one.

func (a *agent) isOpen(ctx context.Context) bool {
	select {
	case <-a.opened:
	case <-ctx.Done():
		return false
	}
	select {
	case <-a.closing:
		return false
	default:
		return true
	}
}

// promote makes a layer plain files whose data have all come.
func (a *agent) promote(ctx context.Context, d layer.Digest) {
	if !a.isOpen(ctx) {
		return
	}
	if err := a.store.Promote(d); err != nil {
		slog.Error("complete layer", "layer", d, "err", err)
	}
}

// noteFailure writes down which sandboxes a failed read may reach, before it does.
// A mount that gets no new users from now on is one of which something may stay:
// first, because who came to it afterwards would not be blamed.
func (a *agent) noteFailure(ctx context.Context, t loader.Trouble) bool {
	if !a.isOpen(ctx) {
		return false
	}
	slog.Warn("a read of a layer is an error", "layer", t.Layer, "session", t.Session, "err", t.Err)
	if stays(t.Err) {
		a.mounts.Retire(t.Layer, t.Session)
	}
	return a.blame(ctx, t.Layer, t.At, t.Err)
}

// blame returns whether it is recorded that reads of a layer were errors since
// then, and for the next agent which mounts of it are retired.
func (a *agent) blame(ctx context.Context, d layer.Digest, at time.Time, why error) bool {
	err := a.node.LayerFailed(d, at, why)
	if err == nil {
		err = a.mounts.Note(ctx, d)
	}
	if err != nil && ctx.Err() == nil {
		slog.Error("record that reads of a layer are errors", "layer", d, "err", err)
	}
	return err == nil
}

// stays says of a failed read that a mount may be no good after it. If a store was
// away, full or closed, or gave what is not so, nothing of it is kept, and what is
// read again is asked for again.
func stays(err error) bool { return dsec.ClassOf(err) == dsec.Internal }

// noteShort has the layers trimmed. If that is waited for already, it is for this
// one too: for a full disk if either is.
func (a *agent) noteShort(_ context.Context, diskFull bool) {
	for {
		select {
		case a.shorts <- diskFull:
			return
		default:
		}
		select {
		case was := <-a.shorts:
			diskFull = diskFull || was
		default:
		}
	}
}

// handedOver is how long after an agent has opened a session may be told that was
// found dead when it was handed over.
const handedOver = time.Minute

// lostSince is when a mount may have been lost whose end was told of at that time.
// Of one that a new agent has found dead nobody knows: who was there while there
// was no agent may have ended because of it.
func lostSince(at, lastAlive, begun time.Time) time.Time {
	if !lastAlive.IsZero() && lastAlive.Before(at) && at.Before(begun.Add(handedOver)) {
		return lastAlive
	}
	return at
}

// noteEnd finds out whether a mount is still used whose data nobody can bring any
// more.
func (a *agent) noteEnd(ctx context.Context, e loader.Ended) bool {
	if !a.isOpen(ctx) {
		return false
	}
	if !a.mounts.Lost(e.Layer, e.Session) {
		return true
	}
	return a.lost(ctx, e.Layer, lostSince(e.At, a.node.LastAlive(), a.begun))
}

// blameLost is for mounts that the agent before this one knew to be lost, and
// could not record so.
func (a *agent) blameLost(ctx context.Context) {
	for _, d := range a.mounts.LostBefore() {
		a.lost(ctx, d, a.node.LastAlive())
	}
}

func (a *agent) lost(ctx context.Context, d layer.Digest, at time.Time) bool {
	err := dsec.Errorf(dsec.Unavailable, "read layer", string(d), "the connection by which its data came has ended")
	slog.Error("a mount of a layer is lost", "err", err)
	return a.blame(ctx, d, at, err)
}

// ahead is what others read first of a layer.
func (a *agent) ahead(ctx context.Context, d layer.Digest) []layer.Range {
	if !a.isOpen(ctx) {
		return nil
	}
	t, err := a.store.Trace(ctx, d)
	if err != nil {
		if dsec.ClassOf(err) != dsec.NotFound && ctx.Err() == nil {
			slog.Warn("read trace", "layer", d, "err", err)
		}
		return nil
	}
	return t.Ahead()
}

// traceWindow is how much of the life of a layer the loader notes.
const traceWindow = 2 * time.Minute

// record adds to the trace of a layer.
func (a *agent) record(ctx context.Context, d layer.Digest, ranges []layer.Range) {
	if !a.isOpen(ctx) {
		return
	}
	if err := a.store.RecordTrace(ctx, d, store.Recording{Window: traceWindow, Ranges: ranges, Ordered: true}); err != nil && ctx.Err() == nil {
		slog.Warn("record trace", "layer", d, "err", err)
	}
}
