package daemon

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
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

// fullFrees is what is freed at once where the disk is full.
const fullFrees = 1 << 30

// trim keeps the data of layers within what they may take of this machine, and
// tells the loader how much more it may keep. Where the disk is full they give
// back more.
func (a *agent) trim(ctx context.Context, s *settings, diskFull bool, log *slog.Logger) {
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
		freed, err = oneTrim{most: most, trim: func(ctx context.Context, most int64) (int64, int64, error) {
			return a.store.Trim(ctx, most, a.layers.demand.letGo)
		}, room: a.loader.Room}.run(ctx, diskFull)
	}
	if freed > 0 {
		log.Info("data of unused layers given back: they come again on demand", "bytes", freed)
	}
	if err != nil && ctx.Err() == nil {
		log.Warn("keep the data of layers within node.layer_cache", "err", err)
	}
}

// oneTrim trims once.
type oneTrim struct {
	most int64
	trim func(ctx context.Context, most int64) (freed, used int64, err error) // used: 0 if it is not known
	room func(ctx context.Context, left int64) error
}

// run tells what room there is also when not all could be given back: until it is
// told, the loader keeps nothing and does not ask again.
func (t oneTrim) run(ctx context.Context, diskFull bool) (freed int64, err error) {
	freed, used, err := t.trim(ctx, t.most)
	if err != nil && used == 0 {
		return freed, err
	}
	if diskFull {
		more, still, merr := t.trim(ctx, max(0, used-fullFrees))
		freed += more
		if err = errors.Join(err, merr); merr == nil || still > 0 {
			used = still
		}
	}
	if rerr := t.room(ctx, max(0, t.most-used)); dsec.ClassOf(rerr) != dsec.Unavailable { // the next one asks
		err = errors.Join(err, rerr)
	}
	return freed, err
}

// trimAgain is how long after a trim the next one is at least.
const trimAgain = 10 * time.Second

// trimming trims now and then, and when the loader finds no room, until stop is
// called, which waits for it.
func (a *agent) trimming(s *settings, log *slog.Logger) (stop func()) {
	return repeating(0, trimAgain, func(ctx context.Context) {
		t := time.NewTimer(trimEvery)
		defer t.Stop()
		full := false
		select {
		case full = <-a.shorts:
		case <-t.C:
		case <-ctx.Done():
			return
		}
		a.trim(ctx, s, full, log)
	})
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
