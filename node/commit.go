package node

import (
	"context"
	"errors"
	"io"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/runtime"
)

// Commit implements Service: it stops the sandbox, makes a layer of what was
// changed in it, and tags that. The sandbox stays stopped.
func (n *Node) Commit(ctx context.Context, id dsec.SandboxID, tag layer.Tag, callID string) (digest string, err error) {
	if err := layer.CheckTag(tag.Name); err != nil {
		return "", dsec.E(dsec.Invalid, "commit sandbox", string(id), err)
	}
	return n.once(ctx, "commit", id, callID, tag.Name, func(t *turn) (string, error) {
		s, ok := t.rt.(runtime.Snapshotter)
		if !ok || n.cfg.Import == nil {
			return "", t.unsupported("commit sandbox")
		}
		if t.state() != dsec.Stopped {
			if err := n.stop(ctx, t.box, dsec.NewResult(dsec.CauseCompleted, "commit", dsec.InducedBySelf), nil); err != nil {
				return "", err
			}
		}
		if t.state() != dsec.Stopped {
			return "", t.illegal("commit sandbox")
		}
		digest, err := n.snapshot(ctx, t.box, s, tag)
		if err != nil {
			return "", err
		}
		return digest, n.keep(t.remember(digest))
	})
}

// snapshot pipes the sandbox's writable layer into the importer.
func (n *Node) snapshot(ctx context.Context, b *box, s runtime.Snapshotter, tag layer.Tag) (string, error) {
	set, err := n.cfg.Store.For(b.rec.Project).Acquire(ctx, string(b.id), refsOf(b.rec.Spec)) // the same set again: for its config
	if err != nil {
		return "", dsec.E(dsec.ClassOf(err), "commit sandbox", string(b.id), err)
	}
	b.use(1)
	defer b.use(-1)
	r, w := io.Pipe()
	written := make(chan error, 1)
	go func() {
		err := s.Snapshot(ctx, b.id, w)
		_ = w.CloseWithError(err) // never errs; nil is the end of the tar
		written <- err
	}()
	digest, err := n.cfg.Import(ctx, r, tag, set.Config)
	_ = r.CloseWithError(io.ErrClosedPipe) // never errs; ends a snapshot that nobody reads
	serr := <-written
	if serr != nil && !errors.Is(serr, io.ErrClosedPipe) {
		err = serr // the importer only saw its effect
	}
	if err != nil {
		return "", dsec.E(dsec.ClassOf(err), "commit sandbox", string(b.id), err)
	}
	return digest, nil
}
