package daemon

import (
	"context"
	"log/slog"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/config"
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
	return repeating(every, every, func(ctx context.Context) {
		gone, err := s.Collect(ctx, false)
		for _, l := range gone {
			log.Info("layer removed: it has no tag and was not used", "digest", l.Digest, "source", l.Source)
		}
		if err != nil && ctx.Err() == nil {
			log.Warn("remove unused layers", "err", err)
		}
	})
}

const trimEvery = time.Minute

// trim keeps the data of layers within what they may take of this machine.
func (a *agent) trim(ctx context.Context, s *settings, log *slog.Logger) {
	if s.Node.OnDemand == "off" { // what is not here whole cannot be used
		return
	}
	var st unix.Statfs_t
	err := unix.Statfs(s.layerDir(), &st)
	var most int64
	if err == nil {
		most, err = config.Bytes(s.Node.LayerCache, int64(st.Blocks)*st.Bsize)
	}
	var freed int64
	if err == nil {
		freed, err = a.store.Trim(ctx, most, a.layers.demand.letGo)
	}
	if freed > 0 {
		log.Info("data of unused layers given back: they come again on demand", "bytes", freed)
	}
	if err != nil && ctx.Err() == nil {
		log.Warn("keep the data of layers within node.layer_cache", "err", err)
	}
}

// repeating does something after a while and then every so often until stop is
// called, which waits for it.
func repeating(first, every time.Duration, what func(context.Context)) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		t := time.NewTimer(first)
		defer t.Stop()
		for {
			select {
			case <-t.C:
				what(ctx)
				t.Reset(every)
			case <-ctx.Done():
				return
			}
		}
	}()
	return func() { cancel(); <-done }
}
