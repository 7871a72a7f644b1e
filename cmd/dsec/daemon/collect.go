package daemon

import (
	"context"
	"log/slog"
	"time"

	"github.com/opendsec/dsec/layer/store"
)

// Layers that have no tag and that no sandbox has are removed when nobody has
// used them for layerGrace: they can still be named by digest.
const (
	layerGrace   = 7 * 24 * time.Hour
	collectEvery = time.Hour
)

// collecting removes unused layers until stop is called, which waits for it.
func collecting(s *store.Store, every time.Duration, log *slog.Logger) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		t := time.NewTicker(every)
		defer t.Stop()
		for {
			select {
			case <-t.C:
			case <-ctx.Done():
				return
			}
			gone, err := s.Collect(ctx, false)
			for _, l := range gone {
				log.Info("layer removed: it has no tag and was not used", "digest", l.Digest, "source", l.Source)
			}
			if err != nil && ctx.Err() == nil {
				log.Warn("remove unused layers", "err", err)
			}
		}
	}()
	return func() { cancel(); <-done }
}
