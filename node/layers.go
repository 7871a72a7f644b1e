package node

import (
	"slices"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
)

// LayerFailed tells the sandboxes that use a layer that a read of it was an
// error, which one of them has seen.
func (n *Node) LayerFailed(d layer.Digest, err error) {
	for _, b := range n.all() {
		b.mu.Lock()
		if slices.Contains(b.rec.Digests, string(d)) && (b.rec.State == dsec.Running || b.rec.State == dsec.Paused) {
			b.emitLocked(dsec.Event{Type: dsec.EventLayerError, Detail: err.Error(),
				Fields: map[string]string{"layer": string(d), "class": string(dsec.ClassOf(err))}})
		}
		b.mu.Unlock()
	}
}
