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

// trouble is a read of a layer that is an error for somebody, or the failure of
// all disks of a tier.
type trouble struct {
	cause dsec.Cause
	layer layer.Digest // of infra_image
	tier  dsec.Tier    // of infra_disk
	at    time.Time
	err   error
}

func (t *trouble) String() string {
	if t.cause == dsec.CauseInfraDisk {
		return "disk: " + t.err.Error()
	}
	return "layer " + string(t.layer) + ": " + t.err.Error()
}

func (t *trouble) event() dsec.Event {
	if t.cause == dsec.CauseInfraDisk {
		return dsec.Event{Type: dsec.EventDiskError, Detail: t.err.Error()}
	}
	return dsec.Event{Type: dsec.EventLayerError, Detail: t.err.Error(),
		Fields: map[string]string{"layer": string(t.layer), "class": string(dsec.ClassOf(t.err))}}
}

// LayerFailed blames sandboxes on infra_image, durably when it returns nil: those
// that have a layer of which reads are errors, the first of them at that time, and
// that had not ended by then, deleted ones too. One of them sees the error, and
// which one nobody knows, for they read through one mount. It is to be called
// before the reader is told, and the reader is not to be told when it errs. A time
// that is unknown (zero), or has not come, is now.
//
// It does not wait for what is done to a sandbox meanwhile: that may wait for the
// very read.
//
// None of them is ended: it may not have been the one, and who uses it may know
// better. Commands that end from then on say so (process.Result.Blame), and the
// sandbox will end as infra_image, see verdict. Stopping, starting again and a
// restart of the agent change nothing about that.
func (n *Node) LayerFailed(d layer.Digest, at time.Time, err error) error {
	if n.ctx.Err() != nil {
		return dsec.E(dsec.Unavailable, "blame users of layer", string(d), ErrClosed)
	}
	if now := n.cfg.Clock(); at.IsZero() || at.After(now) {
		at = now
	}
	t := &trouble{cause: dsec.CauseInfraImage, layer: d, at: at.UTC(), err: err}
	known, err := n.blameLive(t)
	if err != nil {
		return err
	}
	ended, err := n.ledger.endedWith(t, known)
	if err != nil {
		return err
	}
	var ops []op
	for _, id := range ended {
		ops = append(ops, blameEnded(id, t))
	}
	if len(ops) == 0 {
		return nil
	}
	return n.ledger.commit(ops...)
}

// blameLive blames what is not deleted, durably, and lists what there is.
func (n *Node) blameLive(t *trouble) (known map[dsec.SandboxID]bool, err error) {
	var ops []op
	var written []func()
	known = map[dsec.SandboxID]bool{}
	for _, b := range n.all() {
		known[b.id] = true
		if b.suffers(t) {
			put, done := b.putBlame()
			ops, written = append(ops, put), append(written, done)
		}
	}
	if len(ops) == 0 {
		return known, nil
	}
	if err := n.ledger.commit(ops...); err != nil {
		return nil, err
	}
	for _, done := range written {
		done()
	}
	return known, nil
}

// suffers says whether the ledger does not have yet what the sandbox is
// blamed on.
func (b *box) suffers(t *trouble) (unwritten bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.gone || !b.rec.livedWith(t) {
		return false
	}
	fresh := b.rec.blame(t)
	if fresh {
		b.blames++
		b.dirty = true
	}
	if fresh || t.layer != "" && t.at.Sub(b.layerError) >= layerErrorsBy {
		b.layerError = t.at
		b.emitLocked(t.event())
	}
	if fresh && t.cause == dsec.CauseInfraDisk {
		b.emitLocked(repercussion(toNode, dsec.InducedByUnknown, t.String()))
	}
	return b.blames != b.blamesIn
}

// livedWith says whether the sandbox had the layer or the disk when it failed, or
// since. As long as its end is not known it may have processes.
func (r *record) livedWith(t *trouble) bool {
	if t.layer != "" && !slices.Contains(r.Digests, string(t.layer)) || t.layer == "" && r.Spec.Tier != t.tier {
		return false
	}
	end := r.Ended
	if end.IsZero() && (r.State == dsec.Stopped || r.State == dsec.Deleted) { // written before Ended was
		end = r.Changed
	}
	return end.IsZero() || !end.Before(t.at)
}

// blame says whether the record has changed.
func (r *record) blame(t *trouble) (fresh bool) {
	since, why := later(t.at, r.Created).UTC(), t.String()
	if r.Blame == nil {
		r.Blame = &dsec.Blame{Cause: t.cause, Since: since, Evidence: []string{why}}
		r.Result = r.verdict(r.Result)
		return true
	}
	now := *r.Blame // who was given a copy of the record has the old one
	if since.Before(now.Since) {
		now.Since, fresh = since, true
	}
	if len(now.Evidence) < blamedEvidence && !slices.Contains(now.Evidence, why) {
		now.Evidence, fresh = append(slices.Clone(now.Evidence), why), true
	}
	if fresh {
		r.Blame = &now
	}
	return fresh
}

// verdict is how a sandbox ended that would have ended so. What it is blamed on
// is the cause of its end, whether that is known before the end or after; but not
// of what the platform did to it anyway, nor of what a policy or a preemption
// ended it for, nor of a creation that was wrong in itself or not wanted any more.
// A start that was not in time, or failed for no reason that is known, is one
// that may have read what could not be had.
func (r *record) verdict(res *dsec.Result) *dsec.Result {
	if r.Blame == nil || res == nil {
		return res
	}
	switch c := res.Cause; {
	case c == dsec.CauseInfraStartTimeout:
	case c.Infra(), c == dsec.CausePreempted, c == dsec.CausePolicyKill:
		return res
	case res.Phase != "run" && slices.Contains(creationsOwn, c):
		return res
	}
	evidence := append(slices.Clone(r.Blame.Evidence), "otherwise: "+string(res.Cause))
	out := dsec.NewResult(r.Blame.Cause, res.Phase, dsec.InducedByPlatform, append(evidence, res.Evidence...)...)
	out.Usage = res.Usage
	return out
}

// creationsOwn are ends of creations that no error of a layer leads to.
var creationsOwn = []dsec.Cause{dsec.CauseTaskInvalid, dsec.CauseTaskImageNotFound, dsec.CauseTaskSetup, dsec.CauseCancelled}

// blameOf is what a command is blamed on that began and ended so.
func (b *box) blameOf(begun time.Time, took time.Duration) dsec.Cause {
	b.mu.Lock()
	defer b.mu.Unlock()
	bl := b.rec.Blame
	if bl == nil || !begun.IsZero() && begun.Add(took).Before(bl.Since) {
		return ""
	}
	return bl.Cause
}

// startOver forgets what an attempt at creating it before this one was blamed on:
// nothing of that is left.
func (b *box) startOver(digests []string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.rec.Digests = digests
	if b.rec.Blame != nil {
		b.rec.Blame = nil
		b.blames++
	}
}
