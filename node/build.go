package node

import (
	"context"
	"errors"
	"slices"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/lifecycle"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/runtime"
)

// buildTwice tries a second time what the platform itself did not manage.
func (n *Node) buildTwice(ctx context.Context, b *box, key []byte) ([]dsec.Step, error) {
	steps, err := n.build(ctx, b, key)
	if err == nil || ctx.Err() != nil || b.left || !worthRetry(err) {
		return steps, err
	}
	n.cfg.Metrics.retries.Inc()
	n.cfg.Log.Warn("creation tried again", "sandbox", b.id, "err", err)
	b.emit(dsec.Event{Type: dsec.EventNote, Detail: "creation tried again after: " + err.Error()})
	again, err := n.build(ctx, b, key)
	return append(steps, again...), err
}

func worthRetry(err error) bool {
	switch dsec.ClassOf(err) {
	case dsec.Internal, dsec.Unavailable, dsec.Timeout:
		return true
	}
	return false
}

func (n *Node) build(ctx context.Context, b *box, key []byte) ([]dsec.Step, error) {
	var set layer.Set
	var inner []dsec.Step
	spec := b.rec.Spec // does not change
	from, err := n.origin(ctx, b)
	if err != nil {
		return nil, err
	}
	defer func() { n.drop(ctx, b, from) }()
	steps := []lifecycle.Step{
		{Name: "layers",
			Do: func(ctx context.Context) (err error) {
				ctx = layer.WithProgress(ctx, b.tellImage())
				set, err = n.cfg.Store.For(b.rec.Project).Acquire(ctx, string(b.id), refsOf(spec))
				if err != nil {
					err = errors.Join(&buildError{err: err}, n.release(ctx, b))
				}
				if b.config != nil {
					set.Config = *b.config
				}
				return err
			},
			Undo: func(ctx context.Context) error { return n.release(ctx, b) }},
		{Name: "checkpoint", Do: func(ctx context.Context) error { return n.bring(ctx, b, from, set) }},
		{Name: "runtime",
			Do: func(ctx context.Context) (err error) {
				b.startOver(digestsOf(set))
				if inner, err = b.rt.Create(ctx, runtime.Request{ID: b.id, Spec: spec, Layers: set, From: b.from}); err != nil {
					return &buildError{err: err, run: true}
				}
				return nil
			},
			Undo: func(ctx context.Context) error { return b.leaves(b.rt.Destroy(ctx, b.id)) }},
		{Name: "ready", Do: func(context.Context) error { return n.ready(b, key) }},
	}
	if from == nil {
		steps = slices.DeleteFunc(steps, func(s lifecycle.Step) bool { return s.Name == "checkpoint" })
	}
	times, err := lifecycle.Run(ctx, "node.build", steps...)
	for i, s := range times {
		if s.Name == "runtime" && len(inner) > 0 { // its own steps say more
			times = append(append(append([]dsec.Step(nil), times[:i]...), inner...), times[i+1:]...)
			break
		}
	}
	return times, err
}
