package node

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"sync"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/runtime"
)

// forksAtOnce is how many copies of one sandbox are made at a time.
const forksAtOnce = 8

// Fork implements Forker.
func (n *Node) Fork(ctx context.Context, id dsec.SandboxID, count int, callID string) ([]Sandbox, error) {
	const op = "fork sandbox"
	if count < 1 || count > dsec.MaxForks {
		return nil, dsec.Errorf(dsec.Invalid, op, string(id), "%d copies, want 1 to %d", count, dsec.MaxForks)
	}
	answer, err := n.once(ctx, "fork", id, callID, count, func(t *turn) (string, error) {
		f, ok := t.rt.(runtime.Forker)
		if !ok {
			return "", t.unsupported(op)
		}
		if s := t.state(); s != dsec.Running && s != dsec.Paused {
			return "", t.illegal(op)
		}
		ids, err := n.fork(ctx, t.box, f, count)
		if err != nil {
			return "", err
		}
		text, err := json.Marshal(ids)
		if err == nil {
			err = n.keep(t.remember(string(text)))
		}
		if err != nil {
			n.dropForks(ctx, ids)
		}
		return string(text), err
	})
	if err != nil {
		return nil, err
	}
	var ids []dsec.SandboxID
	if err := json.Unmarshal([]byte(answer), &ids); err != nil {
		return nil, dsec.E(dsec.Corrupt, op, string(id), err)
	}
	out := make([]Sandbox, len(ids))
	for i, id := range ids {
		if out[i], err = n.Get(ctx, id); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// fork makes copies of one moment. The turn of the source is held.
func (n *Node) fork(ctx context.Context, source *box, f runtime.Forker, count int) ([]dsec.SandboxID, error) {
	moment := "fork" + dsec.Random(20)
	if err := f.KeepMoment(ctx, source.id, moment); err != nil {
		return nil, err
	}
	defer n.dropMoment(ctx, f, source.id, moment)
	ids, errs := make([]dsec.SandboxID, count), make([]error, count)
	cctx, cancel := context.WithCancel(ctx)
	defer cancel()
	slots := make(chan struct{}, forksAtOnce)
	var wg sync.WaitGroup
	for i := range count {
		if cctx.Err() != nil {
			break
		}
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			if ids[i], errs[i] = n.forkOne(cctx, source, moment); errs[i] != nil {
				cancel() // the others are of no use
			}
		})
	}
	wg.Wait()
	// What the others say is that they were given up.
	err := errors.Join(slices.DeleteFunc(slices.Clone(errs), func(err error) bool { return err == nil || dsec.ClassOf(err) == dsec.Canceled && ctx.Err() == nil })...)
	if err == nil {
		err = errors.Join(errs...)
	}
	if err != nil {
		n.dropForks(ctx, ids)
		return nil, dsec.E(dsec.ClassOf(err), "fork sandbox", string(source.id), err)
	}
	return ids, nil
}

// forkOne creates one copy; its name is nobody's, because it is the source's.
func (n *Node) forkOne(ctx context.Context, source *box, moment string) (dsec.SandboxID, error) {
	source.mu.Lock()
	spec, project, now := source.rec.Spec, source.rec.Project, source.rec.Network
	source.mu.Unlock()
	if now != nil { // what was set since holds for a copy from its first packet
		spec.Network, spec.Allow, spec.Cutoff, spec.MirrorDeny = now.Mode, now.Allow, now.Cutoff, now.MirrorDeny
	}
	if spec.Hostname == string(source.id) {
		spec.Hostname = ""
	}
	spec.Name, spec.CallID, spec.Checkpoint = "", "", "" // it goes on from a moment of this node
	b, err := n.admit(project, spec, hashOf(spec), nil)
	if err != nil {
		return "", err
	}
	defer b.unlock()
	b.from, b.config = moment, source.config
	steps, err := n.create(ctx, b, nil)
	n.cfg.Metrics.created(err, steps)
	if err != nil {
		return "", n.failCreation(ctx, b, nil, steps, err)
	}
	return b.id, nil
}

// dropForks deletes copies that nobody gets.
func (n *Node) dropForks(ctx context.Context, ids []dsec.SandboxID) {
	slots := make(chan struct{}, forksAtOnce)
	var wg sync.WaitGroup
	for _, id := range ids {
		if id == "" {
			continue
		}
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			dctx, stop := n.detached(ctx, undoLimit)
			defer stop()
			if _, err := n.Delete(dctx, id, ""); err != nil {
				n.cfg.Log.Error("copy not deleted", "sandbox", id, "err", err)
			}
		})
	}
	wg.Wait()
}
