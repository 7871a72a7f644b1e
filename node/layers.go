package node

import (
	"slices"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
)

const (
	blamedEvidence = 8           // reasons that are kept of a sandbox
	layerErrorsBy  = time.Second // events of one sandbox are so far apart at least
)

// LayerFailed puts down to the platform, durably, whatever becomes of the
// sandboxes that have a layer of which reads are errors, the first of them at
// that time, and of those that have ended since: one of them sees the error, and
// which one nobody knows, for they read through one mount. It is to be called
// before the reader is told.
//
// None of them is ended: it may not have been the one, and who uses it may know
// better. Commands that end from then on say so (process.Result.Blame), and the
// sandbox will end as infra_image, see verdict. Stopping, starting again and a
// restart of the agent change nothing about that.
func (n *Node) LayerFailed(d layer.Digest, at time.Time, err error) {
	marked := false
	for _, b := range n.all() {
		marked = b.layerFailed(d, at, err) || marked
	}
	if !marked {
		return
	}
	// Of one that is being changed right now it is written with that change.
	if werr := n.flush(); werr != nil {
		n.cfg.Log.Error("failed read of a layer not written", "layer", d, "err", werr)
	}
}

// layerFailed says whether the record has changed.
func (b *box) layerFailed(d layer.Digest, at time.Time, err error) (marked bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	r := &b.rec
	if b.gone || !slices.Contains(r.Digests, string(d)) {
		return false
	}
	switch r.State {
	case dsec.Running, dsec.Paused, dsec.Creating, dsec.Starting:
	case dsec.Stopping, dsec.Stopped, dsec.Failed:
		if r.Changed.Before(at) { // it had ended
			return false
		}
	default:
		return false
	}
	why := "layer " + string(d) + ": " + err.Error()
	switch {
	case r.Blame == nil:
		r.Blame = &dsec.Blame{Cause: dsec.CauseInfraImage, Since: later(at, r.Created).UTC(), Evidence: []string{why}}
		r.Result = r.verdict(r.Result)
		marked = true
	case len(r.Blame.Evidence) < blamedEvidence && !slices.Contains(r.Blame.Evidence, why):
		was := *r.Blame // who was given a copy of the record has the old one
		was.Evidence = append(slices.Clone(was.Evidence), why)
		r.Blame, marked = &was, true
	}
	b.dirty = b.dirty || marked
	if marked || at.Sub(b.layerError) >= layerErrorsBy {
		b.layerError = at
		b.emitLocked(dsec.Event{Type: dsec.EventLayerError, Detail: err.Error(),
			Fields: map[string]string{"layer": string(d), "class": string(dsec.ClassOf(err))}})
	}
	return marked
}

// verdict is how a sandbox ended that would have ended so. What has happened to
// it before is the cause, whatever followed; but not of what the platform did to
// it anyway, nor of what it was ended for by a policy.
func (r *record) verdict(res *dsec.Result) *dsec.Result {
	if r.Blame == nil || res == nil || res.Cause.Infra() || res.Cause == dsec.CausePreempted || res.Cause == dsec.CausePolicyKill {
		return res
	}
	return r.putDown(res)
}

// putDown makes what has happened to a sandbox the cause of its end.
func (r *record) putDown(res *dsec.Result) *dsec.Result {
	evidence := append(slices.Clone(r.Blame.Evidence), "otherwise: "+string(res.Cause))
	out := dsec.NewResult(r.Blame.Cause, res.Phase, dsec.InducedByPlatform, append(evidence, res.Evidence...)...)
	out.Usage = res.Usage
	return out
}

// blameOf is what a command is put down to that began and ended so.
func (b *box) blameOf(begun time.Time, took time.Duration) dsec.Cause {
	b.mu.Lock()
	defer b.mu.Unlock()
	bl := b.rec.Blame
	if bl == nil || !begun.IsZero() && begun.Add(took).Before(bl.Since) {
		return ""
	}
	return bl.Cause
}
