package node

import (
	"context"
	"encoding/json"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/failpoint"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/runtime"
)

// Checkpoint implements Checkpointer.
func (n *Node) Checkpoint(ctx context.Context, id dsec.SandboxID, keep time.Duration, callID string) (out dsec.Checkpoint, err error) {
	const op = "checkpoint sandbox"
	if keep < 0 || keep > dsec.MaxKeepCheckpoint {
		return out, dsec.Errorf(dsec.Invalid, op, string(id), "kept for %v, want 0 to %v", keep, dsec.MaxKeepCheckpoint)
	}
	answer, err := n.once(ctx, "checkpoint", id, callID, keep, func(t *turn) (string, error) {
		c, ok := t.rt.(runtime.Checkpointer)
		if !ok {
			return "", t.unsupported(op)
		}
		if n.cfg.Checkpoints == nil {
			return "", dsec.Errorf(dsec.Unsupported, op, string(id), "this node has no object storage")
		}
		if s := t.state(); s != dsec.Running && s != dsec.Paused {
			return "", t.illegal(op)
		}
		ctx, end := t.packing(ctx) // a deletion does not wait for the storage
		defer end()
		made, err := n.checkpoint(ctx, t.box, c, keep)
		if err != nil {
			return "", dsec.E(dsec.ClassOf(err), op, string(id), err)
		}
		b, err := json.Marshal(made)
		if err != nil {
			return "", dsec.E(dsec.Internal, op, string(id), err)
		}
		return string(b), n.keep(t.remember(string(b)))
	})
	if err != nil {
		return out, err
	}
	if err := json.Unmarshal([]byte(answer), &out); err != nil {
		return out, dsec.E(dsec.Corrupt, op, string(id), err)
	}
	return out, nil
}

// checkpoint keeps one moment of a sandbox in the object storage. The turn is held.
func (n *Node) checkpoint(ctx context.Context, b *box, rt runtime.Checkpointer, keep time.Duration) (out dsec.Checkpoint, err error) {
	done, err := n.packs.take(ctx, b.rec.Project)
	if err != nil {
		return out, err
	}
	defer done()
	b.use(1)
	defer b.use(-1)
	name := "checkpoint" + dsec.Random(20)
	at := n.cfg.Clock().UTC()
	if err := rt.KeepMoment(ctx, b.id, name); err != nil {
		return out, err
	}
	defer n.dropMoment(ctx, rt, b.id, name)
	m, err := rt.OpenMoment(ctx, name)
	if err != nil {
		return out, err
	}
	defer closeAll(m.Files.Disk, m.Files.Memory)
	if keep == 0 {
		keep = dsec.KeepCheckpoint
	}
	if err := failpoint.Hit(ctx, "node.checkpoint.kept"); err != nil {
		return out, err
	}
	until := n.cfg.Clock().UTC().Add(keep)
	c := layer.Checkpoint{Project: b.rec.Project, Sandbox: b.id, Time: at, Spec: b.goesOn(), Config: m.Config, Machine: m.Machine}
	if b.config != nil {
		c.Config = *b.config
	}
	d, c, err := n.cfg.Checkpoints.KeepCheckpoint(ctx, c, m.Files, until)
	if err != nil {
		return out, err
	}
	out = told(d, c)
	out.Until = until
	return out, nil
}

// goesOn is the spec of what goes on from a sandbox as it is now: of the layers that its names
// meant, with the network policy in force, and with no name, which is the source's.
func (b *box) goesOn() dsec.Spec {
	b.mu.Lock()
	defer b.mu.Unlock()
	spec, now := b.rec.Spec, b.rec.Network
	if now != nil {
		spec.Network, spec.Allow, spec.Cutoff, spec.MirrorDeny = now.Mode, now.Allow, now.Cutoff, now.MirrorDeny
	}
	if spec.Hostname == string(b.id) {
		spec.Hostname = ""
	}
	spec.Name, spec.CallID, spec.Checkpoint, spec.Image, spec.Layers = "", "", "", "", nil
	for i, d := range b.rec.Digests {
		if i == 0 {
			spec.Image = dsec.LayerRef(d)
		} else {
			spec.Layers = append(spec.Layers, dsec.LayerRef(d))
		}
	}
	return spec
}

func told(d layer.Digest, c layer.Checkpoint) dsec.Checkpoint {
	return dsec.Checkpoint{Digest: string(d), Sandbox: c.Sandbox, Time: c.Time, Spec: c.Spec, Disk: c.Disk.Size, Memory: c.Memory.Size}
}

// FindCheckpoint implements Checkpointer.
func (n *Node) FindCheckpoint(ctx context.Context, project, digest string) (dsec.Checkpoint, error) {
	c, err := n.findCheckpoint(ctx, project, digest)
	return told(layer.Digest(digest), c), err
}

func (n *Node) findCheckpoint(ctx context.Context, project, digest string) (layer.Checkpoint, error) {
	d, err := layer.ParseDigest(digest)
	if err != nil {
		return layer.Checkpoint{}, err
	}
	if n.cfg.Checkpoints == nil {
		return layer.Checkpoint{}, dsec.Errorf(dsec.Unsupported, "find checkpoint", digest, "this node has no object storage")
	}
	return n.cfg.Checkpoints.FindCheckpoint(ctx, project, d)
}

// checkCheckpoint refuses a spec that goes on from one where nothing can.
func (n *Node) checkCheckpoint(s *dsec.Spec, rt runtime.Runtime) error {
	if s.Checkpoint == "" {
		return nil
	}
	const op = "go on from checkpoint"
	if _, err := layer.ParseDigest(s.Checkpoint); err != nil {
		return err
	}
	if _, ok := rt.(runtime.Checkpointer); !ok {
		return dsec.Errorf(dsec.Unsupported, op, s.Checkpoint, "the tier %s cannot", kindOf(s))
	}
	if n.cfg.Checkpoints == nil {
		return dsec.Errorf(dsec.Unsupported, op, s.Checkpoint, "this node has no object storage")
	}
	return nil
}

// origin is a checkpoint that a creation goes on from.
type origin struct {
	digest layer.Digest
	c      layer.Checkpoint
	rt     runtime.Checkpointer
	moment string // that was made of it; "": none
}

// origin finds what a creation goes on from, and that it is asked for as what it is; nil: it begins
// anew. The turn is held.
func (n *Node) origin(ctx context.Context, b *box) (*origin, error) {
	s := b.rec.Spec // does not change
	if s.Checkpoint == "" {
		return nil, nil
	}
	c, err := n.findCheckpoint(ctx, b.rec.Project, s.Checkpoint)
	if err != nil {
		return nil, &buildError{err: err}
	}
	if _, err := s.GoesOnFrom(c.Spec); err != nil {
		return nil, err
	}
	rt, ok := b.rt.(runtime.Checkpointer)
	if !ok {
		return nil, b.unsupported("go on from checkpoint")
	}
	b.config = &c.Config
	return &origin{digest: layer.Digest(s.Checkpoint), c: c, rt: rt}, nil
}

// bring makes a moment of a checkpoint, of which a copy is made as of any.
func (n *Node) bring(ctx context.Context, b *box, o *origin, set layer.Set) error {
	for i, ref := range refsOf(o.c.Spec) {
		if i >= len(set.Layers) || len(set.Layers) != len(o.c.Spec.Layers)+1 || string(set.Layers[i].Digest) != string(ref) {
			return &buildError{err: dsec.Errorf(dsec.Conflict, "go on from checkpoint", string(o.digest), "it is of other layers than %v", digestsOf(set)), run: true}
		}
	}
	name := "brought" + dsec.Random(20)
	m := runtime.Moment{Spec: o.c.Spec, Config: o.c.Config, Machine: o.c.Machine, Disk: o.c.Disk.Size, Memory: o.c.Memory.Size}
	err := o.rt.BringMoment(ctx, name, m, set.Layers, func(ctx context.Context, f layer.MomentFiles) error {
		return n.cfg.Checkpoints.FetchCheckpoint(ctx, o.digest, o.c, f)
	})
	switch dsec.ClassOf(err) {
	case "":
	case dsec.NotFound, dsec.Corrupt: // of what the manifest names, which is the platform's to keep
		return &buildError{err: err, kept: true}
	default:
		return &buildError{err: err, run: true}
	}
	o.moment, b.from = name, name
	return failpoint.Hit(ctx, "node.checkpoint.brought")
}

// drop forgets the moment that was made of a checkpoint, if one was.
func (n *Node) drop(ctx context.Context, b *box, o *origin) {
	if o == nil || o.moment == "" {
		return
	}
	n.dropMoment(ctx, o.rt, b.id, o.moment)
	o.moment, b.from = "", ""
}

// dropMoment forgets a moment, also when the caller has gone.
func (n *Node) dropMoment(ctx context.Context, rt runtime.Forker, id dsec.SandboxID, name string) {
	dctx, stop := n.detached(ctx, undoLimit)
	defer stop()
	if err := rt.DropMoment(dctx, name); err != nil {
		n.cfg.Log.Error("moment not dropped", "sandbox", id, "err", err)
	}
}
