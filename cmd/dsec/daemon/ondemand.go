package daemon

import (
	"context"
	"log/slog"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
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
func (a *agent) noteFailure(ctx context.Context, d layer.Digest, at time.Time, err error) bool {
	if !a.isOpen(ctx) {
		return false
	}
	slog.Warn("a read of a layer is an error", "layer", d, "err", err)
	a.node.LayerFailed(d, at, err)
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
