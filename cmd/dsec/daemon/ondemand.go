package daemon

import (
	"log/slog"

	"github.com/opendsec/dsec/layer"
)

// promote makes a layer plain files whose data have all come.
func (a *agent) promote(d layer.Digest) {
	<-a.opened
	if err := a.store.Promote(d); err != nil {
		slog.Error("complete layer", "layer", d, "err", err)
	}
}

// noteFailure says which sandboxes a failed read may have reached.
func (a *agent) noteFailure(d layer.Digest, err error) {
	<-a.opened
	slog.Warn("a read of a layer was an error", "layer", d, "err", err)
	a.node.LayerFailed(d, err)
}
