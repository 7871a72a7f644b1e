package daemon

import (
	"context"
	"log/slog"
	"math"
	"os/exec"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/embedded"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/runtime/gvisor"
)

// openGVisor opens the runtime of isolation "gvisor". A machine without runsc has it, too:
// it takes over what there is, and says why there can be no more.
func openGVisor(ctx context.Context, s *settings, m *machine, log *slog.Logger) (*gvisor.Runtime, error) {
	helper, err := embedded.Hold()
	if err != nil {
		return nil, err
	}
	defer helper.Close()
	c := gvisor.Config{Dir: s.gvisorDir(), Images: s.gvisorImages(), Runsc: s.Node.Runsc, Helper: helper, Hold: m.hold, Cgroups: m.groups, Disks: m.disks, Log: log, Unseen: m.evidence.unseen}
	if c.Runsc == "" {
		if c.Runsc, err = exec.LookPath("runsc"); err != nil {
			c.Runsc = "" // which it says, when it is asked for
		}
	}
	// Behind those of containers, as many if there are so many.
	base := uint64(s.Node.UIDBase) + uint64(s.Node.UIDRanges)<<16
	c.UIDBase, c.UIDRanges = uint32(base), int(min(uint64(s.Node.UIDRanges), (math.MaxUint32-base)>>16))
	if m.loader != nil {
		c.Complete = m.complete
	}
	if m.network != nil {
		c.Network = m.network
	}
	return gvisor.Open(ctx, c)
}

// gvisorImageCache is what images of gvisor sandboxes that nobody uses may take.
const gvisorImageCache = 20 << 30

// collectGVisor removes images that nobody uses until stop is called, which waits for it.
func collectGVisor(r *gvisor.Runtime, every time.Duration, log *slog.Logger) (stop func()) {
	return repeating(every, every, func(context.Context) {
		if _, err := r.Images().Collect(gvisorImageCache); err != nil {
			log.Warn("remove unused images of gvisor", "err", err)
		}
	})
}

// complete has all data of a layer brought, and waits until it is plain files.
func (m *machine) complete(ctx context.Context, l layer.Local) error {
	user := "complete-" + dsec.Random(8)
	if err := m.mounts.Use(ctx, user, []layer.Local{l}); err != nil { // who is served is asked for
		return err
	}
	defer m.mounts.Unuse(user)
	if err := m.loader.Fetch(ctx, l.Digest, nil); err != nil {
		return err
	}
	// The store is told beside the answer.
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		if whole, err := l.Whole(); err != nil || whole {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return dsec.E(dsec.ClassOf(ctx.Err()), "complete layer", string(l.Digest), context.Cause(ctx))
		}
	}
}
