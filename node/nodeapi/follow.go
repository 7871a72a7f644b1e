package nodeapi

import (
	"context"
	"net/http"
	"sync"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
	"github.com/opendsec/dsec/process"
)

// piece is the most output in one message.
const piece = 64 << 10

// credit is how far a stream may be sent: a window beyond what the reader
// acknowledged, where bytes that are gone do not count. A window of 0 is no
// limit.
type credit struct {
	window int64
	wake   chan struct{} // holds one element after acked grew

	mu    sync.Mutex
	acked int64
	gaps  []gap // beyond acked, in order
}

// gap is bytes [end-n, end) that were dropped before they were read.
type gap struct{ end, n int64 }

func newCredit(from, window int64) *credit {
	return &credit{acked: from, window: window, wake: make(chan struct{}, 1)}
}

// ack says that everything before an offset was consumed.
func (c *credit) ack(offset int64) {
	c.mu.Lock()
	if offset > c.acked {
		c.acked = offset
	}
	for len(c.gaps) > 0 && c.gaps[0].end <= c.acked {
		c.gaps = c.gaps[1:]
	}
	c.mu.Unlock()
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// skip notes a gap.
func (c *credit) skip(from, to int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.window > 0 {
		c.gaps = append(c.gaps, gap{end: to, n: to - from})
	}
}

// left is how many bytes may be sent at an offset.
func (c *credit) left(offset int64) int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.acked + c.window - offset
	for _, g := range c.gaps {
		n += g.n
	}
	return n
}

// take waits until something may be sent at an offset, and returns how much.
func (c *credit) take(ctx context.Context, offset int64) (int64, error) {
	for {
		if c.window == 0 {
			return piece, nil
		}
		if n := c.left(offset); n > 0 {
			return n, nil
		}
		select {
		case <-c.wake:
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		}
	}
}

// follow sends a stream of an exec from an offset to its end.
func follow(ctx context.Context, p process.Process, st process.Stream, from int64, c *credit, send func(*dsecv1.OutputChunk) error) error {
	name := wire.StreamName(st)
	if st == process.Stderr && p.Spec().PTY != nil {
		return send(&dsecv1.OutputChunk{Stream: name, Offset: from, Eof: true})
	}
	r, err := p.Follow(ctx, st, from)
	if err != nil {
		return err
	}
	defer r.Close()
	at := from
	for {
		chunk, err := r.Next(ctx)
		if err != nil {
			return err
		}
		if chunk.Offset > at {
			c.skip(at, chunk.Offset)
			at = chunk.Offset
		}
		data := chunk.Data
		for len(data) > 0 {
			n, err := c.take(ctx, at)
			if err != nil {
				return err
			}
			n = min(n, piece, int64(len(data)))
			if err := send(&dsecv1.OutputChunk{Stream: name, Offset: at, Data: append([]byte(nil), data[:n]...)}); err != nil {
				return err
			}
			at, data = at+n, data[n:]
		}
		if chunk.EOF {
			return send(&dsecv1.OutputChunk{Stream: name, Offset: at, Eof: true})
		}
	}
}

// serveOutput follows one exec on a connection of its own.
func (s *Server) serveOutput(w http.ResponseWriter, r *http.Request) {
	s.raw(func(w http.ResponseWriter, r *http.Request) error {
		req := &dsecv1.OutputRequest{}
		if err := request(w, r, req); err != nil {
			return err
		}
		streams := map[process.Stream]int64{}
		for _, name := range req.Streams {
			st, err := wire.StreamFrom(name)
			if err != nil {
				return err
			}
			streams[st] = 0
		}
		offsets := map[process.Stream]int64{process.Stdout: req.StdoutOffset, process.Stderr: req.StderrOffset}
		for st, from := range offsets {
			if _, ok := streams[st]; ok || len(req.Streams) == 0 {
				streams[st] = from
			}
		}
		id, p, err := s.process(r.Context(), who(r), req.Sandbox, req.Exec)
		if err != nil {
			return err
		}
		defer s.cfg.Inside.Attach(id)()
		return s.push(w, r, func(ctx context.Context, send func(proto.Message) error) error {
			return s.ended(id, followAll(ctx, p, streams, send))
		})
	})(w, r)
}

// followAll sends streams side by side, then how the exec ended.
func followAll(ctx context.Context, p process.Process, streams map[process.Stream]int64, send func(proto.Message) error) error {
	g, gctx := errgroup.WithContext(ctx)
	for st, from := range streams {
		if from < 0 {
			return dsec.Errorf(dsec.Invalid, "follow output", p.Spec().ID, "offset %d is negative", from)
		}
		g.Go(func() error {
			return follow(gctx, p, st, from, newCredit(0, 0), func(c *dsecv1.OutputChunk) error {
				return send(&dsecv1.OutputResponse{Item: &dsecv1.OutputResponse_Chunk{Chunk: c}})
			})
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	res, err := p.Wait(ctx)
	if err != nil {
		return err
	}
	return send(&dsecv1.OutputResponse{Item: &dsecv1.OutputResponse_Result{Result: wire.ExecResult(res)}})
}
