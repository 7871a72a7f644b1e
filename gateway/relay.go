package gateway

import (
	"context"
	"errors"
	"io"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/api/wire"
)

// open opens a stream of the node a sandbox id names.
func (g *Gateway) open(ctx context.Context, sandbox, path string, req proto.Message) (*wire.FrameReader, io.Closer, error) {
	_, node, err := dsec.ParseSandboxID(sandbox)
	if err != nil {
		return nil, nil, err
	}
	return g.cfg.Cluster.Stream(ctx, node, path, scope(ctx), req)
}

// watchdog closes a stream that gave no sign of life for a while.
type watchdog struct {
	t     *time.Timer
	after time.Duration
}

func newWatchdog(c io.Closer, after time.Duration) *watchdog {
	return &watchdog{time.AfterFunc(after, func() { _ = c.Close() }), after}
}

func (w *watchdog) fed()  { w.t.Reset(w.after) }
func (w *watchdog) stop() { w.t.Stop() }

// relay passes messages of a node on until the stream ends. While the client
// takes one, the watchdog sleeps: slowness is not the node's then.
func relay[M proto.Message](r *wire.FrameReader, c io.Closer, fresh func() M, send func(M) error, alive M) error {
	dog := newWatchdog(c, nodeSilence)
	defer dog.stop()
	for {
		m := fresh()
		idle, err := r.Message(m)
		dog.stop()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		case idle:
			m = alive
		}
		if err := send(m); err != nil {
			return err
		}
		dog.fed()
	}
}
