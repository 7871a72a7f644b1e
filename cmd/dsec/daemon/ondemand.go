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
// client to be closed.

func (a *agent) isOpen(ctx context.Context) bool {
	select {
	case <-a.opened:
		return true
	case <-ctx.Done():
		return false
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
func (a *agent) noteFailure(ctx context.Context, t loader.Trouble) bool {
	if !a.isOpen(ctx) {
		return false
	}
	d := t.Layer
	slog.Warn("a read of a layer is an error", "layer", d, "err", t.Err)
	if !passes(t.Err) {
		if err := a.mounts.Retire(ctx, d); err != nil && ctx.Err() == nil {
			slog.Error("retire mount of layer", "layer", d, "err", err)
		}
	}
	a.node.LayerFailed(d, t.At, t.Err)
	return true
}

// passes says of a failed read that nothing of it stays: a store was away, full
// or closed, and what is read again is asked for again. Whatever else it was, who
// comes after it gets a mount of its own.
func passes(err error) bool {
	switch dsec.ClassOf(err) {
	case dsec.Unavailable, dsec.Timeout, dsec.Canceled, dsec.PermissionDenied, dsec.Unauthenticated, dsec.NotFound, dsec.NoSpace, dsec.ResourceExhausted:
		return true
	}
	return false
}

// noteShort has the layers trimmed. If that is waited for already, it is for this
// one too.
func (a *agent) noteShort(_ context.Context, diskFull bool) {
	select {
	case a.shorts <- diskFull:
	default:
	}
}

// noteEnd finds out whether a mount is still used whose data nobody can bring any
// more.
func (a *agent) noteEnd(ctx context.Context, e loader.Ended) bool {
	if !a.isOpen(ctx) {
		return false
	}
	d := e.Layer
	lost, err := a.mounts.Lost(ctx, d, e.Session)
	if err != nil && ctx.Err() == nil {
		slog.Error("retire mount of layer", "layer", d, "err", err)
	}
	if lost {
		err := dsec.Errorf(dsec.Unavailable, "read layer", string(d), "the connection by which its data came has ended")
		slog.Error("a mount of a layer is lost", "err", err)
		a.node.LayerFailed(d, e.At, err)
	}
	return true
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
