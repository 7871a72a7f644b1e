package node

import (
	"fmt"
	"sync"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
)

// tellEvery is how often a creation that waits for an image says how far it is,
// unless something else happens.
const tellEvery = 2 * time.Second

// tellImage returns what makes events of the progress of images that a creation
// waits for. The text is also read: dsec create looks for "image REF: ".
func (b *box) tellImage() func(dsec.LayerRef, layer.Progress) {
	var mu sync.Mutex
	last := map[dsec.LayerRef]layer.Progress{}
	said := map[dsec.LayerRef]time.Time{}
	return func(ref dsec.LayerRef, p layer.Progress) {
		mu.Lock()
		defer mu.Unlock()
		old, before := last[ref]
		if before && old.Phase == p.Phase && old.Queue == p.Queue && time.Since(said[ref]) < tellEvery {
			return
		}
		last[ref], said[ref] = p, time.Now()
		b.emit(dsec.Event{Type: dsec.EventNote, Detail: "image " + string(ref) + ": " + progressText(p)})
	}
}

func progressText(p layer.Progress) string {
	switch {
	case p.Queue > 0:
		return fmt.Sprintf("queued, %d before it", p.Queue-1)
	case p.Total > 0 && p.Left > 0:
		return fmt.Sprintf("%s, %d of %d bytes, about %s left", p.Phase, p.Done, p.Total, p.Left.Round(time.Second))
	case p.Total > 0:
		return fmt.Sprintf("%s, %d of %d bytes", p.Phase, p.Done, p.Total)
	}
	return p.Phase
}
