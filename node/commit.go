package node

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/image/erofs"
	"github.com/opendsec/dsec/internal/failpoint"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/snapshot"
)

// maxPacked is how many packed layers may lie one on the other. Each costs a
// sandbox that is made of them a mount and a lookup; one more, and they become
// one. See bench/RESULTS.md for what they cost.
const maxPacked = 8

// packsAtOnce bounds the memory and the disk that packing takes. One project has
// at most projectPacks of them: its disks may be made to take long.
const (
	packsAtOnce  = 4
	projectPacks = 2
)

// packSuffix is of the lease under which the layers of a disk are packed.
const packSuffix = ".pack"

// Commit implements Service.
func (n *Node) Commit(ctx context.Context, id dsec.SandboxID, tag layer.Tag, scrub dsec.Scrub, callID string) (packed dsec.Packed, err error) {
	const op = "commit sandbox"
	if tag.Name != "" {
		if err := layer.CheckTag(tag.Name); err != nil {
			return packed, dsec.E(dsec.Invalid, op, string(id), err)
		}
	}
	if err := scrub.Validate(); err != nil {
		return packed, err
	}
	answer, err := n.once(ctx, "commit", id, callID, []any{tag.Name, scrub}, func(t *turn) (string, error) {
		switch t.state() {
		case dsec.Running, dsec.Paused, dsec.Stopped, dsec.Failed:
		default:
			return "", t.illegal(op)
		}
		if t.rec.Intent == intentDestroy { // only the turn writes it
			return "", t.goneNow(op)
		}
		ctx, end := t.packing(ctx)
		defer end()
		packed, err := n.pack(ctx, t.box, tag, scrub)
		if err != nil {
			return "", err
		}
		b, err := json.Marshal(packed)
		if err != nil {
			return "", dsec.E(dsec.Internal, op, string(id), err)
		}
		return string(b), n.keep(t.remember(string(b)))
	})
	if err != nil {
		return packed, err
	}
	if err := json.Unmarshal([]byte(answer), &packed); err != nil {
		return packed, dsec.E(dsec.Corrupt, op, string(id), err)
	}
	return packed, nil
}

// pack makes a layer of the disk of a sandbox. The turn is held.
func (n *Node) pack(ctx context.Context, b *box, tag layer.Tag, scrub dsec.Scrub) (packed dsec.Packed, err error) {
	const op = "commit sandbox"
	p, ok := b.rt.(runtime.Packer)
	if !ok || n.cfg.Add == nil {
		return packed, b.unsupported(op)
	}
	done, err := n.packs.take(ctx, b.rec.Project)
	if err != nil {
		return packed, dsec.E(dsec.ClassOf(err), op, string(b.id), err)
	}
	defer done()
	b.use(1)
	defer b.use(-1)
	set, release, err := n.layersOf(ctx, b.rec.Project, b.id, b.rec.Digests)
	if err != nil {
		return packed, err
	}
	defer release()
	chain := chainOf(set.Layers)
	info, err := n.cfg.Add(ctx, layer.New{Source: "packed from " + string(b.id), Tag: tag, Config: &set.Config}, func(f image.Files) (dsec.Lineage, error) {
		l := dsec.Lineage{Version: dsec.LineageVersion, Parents: digestsOf(set), Sandbox: b.id, Time: n.cfg.Clock().UTC()}
		if len(chain) < maxPacked {
			packed, err = p.Pack(ctx, b.id, f, scrub)
		} else {
			l.Parents, l.Merged = l.Parents[:len(l.Parents)-len(chain)], l.Parents[len(l.Parents)-len(chain):]
			packed, err = n.packMerged(ctx, b, p, scrub, set.Layers, f)
		}
		if err == nil && packed.Report != nil {
			l.Scrub = packed.Report.Digest()
		}
		packed.Lineage = l
		if err == nil {
			err = failpoint.Hit(ctx, "node.pack.add")
		}
		return l, err
	})
	if err != nil {
		return packed, dsec.E(dsec.ClassOf(err), op, string(b.id), err)
	}
	packed.Digest, packed.Tag, packed.Entries, packed.MetaSize, packed.DataSize = string(info.Digest), tag.Name, info.Entries, info.MetaSize, info.DataSize
	return packed, nil
}

// chainOf is the packed layers at the top of a stack.
func chainOf(layers []layer.Local) []layer.Local {
	at := len(layers)
	for at > 1 && layers[at-1].Lineage != nil {
		at--
	}
	return layers[at:]
}

// packMerged packs the disk and makes one layer of it and of the packed layers
// it stands on.
func (n *Node) packMerged(ctx context.Context, b *box, p runtime.Packer, scrub dsec.Scrub, layers []layer.Local, into image.Files) (dsec.Packed, error) {
	chain := chainOf(layers)
	top, err := n.scratch()
	if err != nil {
		return dsec.Packed{}, err
	}
	defer closeAll(top.Meta, top.Data)
	packed, err := p.Pack(ctx, b.id, top, scrub)
	if err != nil {
		return packed, err
	}
	below, err := snapshot.OpenBelow(layers[:len(layers)-len(chain)])
	if err != nil {
		return packed, err
	}
	defer below.Close()
	var images []*erofs.Image
	for _, l := range chain {
		data, err := n.cfg.Store.OpenData(ctx, l)
		if err != nil {
			return packed, err
		}
		defer data.Close()
		meta, err := os.Open(l.Meta)
		if err != nil {
			return packed, dsec.E(dsec.Internal, "open layer", string(l.Digest), err)
		}
		defer meta.Close()
		im, err := erofs.Open(meta, l.MetaSize, data)
		if err != nil {
			return packed, dsec.E(dsec.Corrupt, "open layer", string(l.Digest), err)
		}
		images = append(images, im)
	}
	im, err := erofs.Open(top.Meta, packed.MetaSize, top.Data)
	if err != nil {
		return packed, dsec.E(dsec.Corrupt, "open packed disk of", string(b.id), err)
	}
	_, err = image.Merge(ctx, append(images, im), into, image.MergeOptions{KeepWhiteouts: true, Hides: below.Has})
	return packed, err
}

// scratch is two files without a name.
func (n *Node) scratch() (f image.Files, err error) {
	for _, to := range []**os.File{&f.Meta, &f.Data} {
		fd, err := unix.Open(n.cfg.Dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
		if err != nil {
			closeAll(f.Meta, f.Data)
			return f, dsec.E(dsec.Internal, "make scratch file in", n.cfg.Dir, err)
		}
		*to = os.NewFile(uintptr(fd), "scratch")
	}
	return f, nil
}

func closeAll(files ...*os.File) {
	for _, f := range files {
		if f != nil {
			f.Close() // nothing of it is kept
		}
	}
}

// layersOf leases layers by digest for a moment.
func (n *Node) layersOf(ctx context.Context, project string, id dsec.SandboxID, digests []string) (layer.Set, func(), error) {
	var refs []dsec.LayerRef
	for _, d := range digests {
		refs = append(refs, dsec.LayerRef(d))
	}
	store, lease := n.cfg.Store.For(project), string(id)+packSuffix
	set, err := store.Acquire(ctx, lease, refs)
	release := func() {
		rctx, done := n.detached(ctx, undoLimit)
		defer done()
		if err := store.Release(rctx, lease); err != nil {
			n.cfg.Log.Error("lease not released", "lease", lease, "err", err)
		}
	}
	if err != nil {
		release()
		return set, nil, err
	}
	return set, release, nil
}

// Changes implements Inside.
func (n *Node) Changes(ctx context.Context, id dsec.SandboxID, most int) (dsec.Changes, error) {
	const op = "compare disk of sandbox"
	if most <= 0 || most > dsec.MaxChanges {
		most = dsec.MaxChanges
	}
	if b := n.find(id); b != nil {
		p, ok := b.rt.(runtime.Packer)
		if !ok {
			return dsec.Changes{}, b.unsupported(op)
		}
		b.use(1)
		defer b.use(-1)
		c, err := p.Changes(ctx, id, most)
		if err == nil || n.find(id) != nil {
			return c, err
		}
	}
	r, err := n.ledger.ended(id)
	if err != nil {
		return dsec.Changes{}, err
	}
	if r == nil || r.Kept == nil || n.cfg.Clock().After(r.Kept.Until) {
		return dsec.Changes{}, n.goneError(op, id)
	}
	return n.keptChanges(ctx, r, most)
}

// keptChanges reads them from the packed layer.
func (n *Node) keptChanges(ctx context.Context, r *record, most int) (c dsec.Changes, err error) {
	const op = "compare kept disk of sandbox"
	set, release, err := n.layersOf(ctx, r.Project, r.ID, []string{r.Kept.Digest}) // and what it stands on
	if err != nil {
		return c, err
	}
	defer release()
	under, top := set.Layers[:len(set.Layers)-1], set.Layers[len(set.Layers)-1]
	below, err := snapshot.OpenBelow(under)
	if err != nil {
		return c, err
	}
	meta, err := os.Open(top.Meta)
	if err == nil {
		defer meta.Close()
		var im *erofs.Image
		if im, err = erofs.Open(meta, top.MetaSize, nil); err == nil {
			c, err = snapshot.ChangesOf(ctx, im, below, most)
		}
	}
	if err = errors.Join(err, below.Close()); err != nil {
		return c, dsec.E(dsec.ClassOf(err), op, string(r.ID), err)
	}
	return c, nil
}

// keepFailed packs the disk of a sandbox that did not end well, if that was
// asked for. That it cannot be packed keeps nobody from removing it: a full
// disk is freed by removing. The turn is held.
func (n *Node) keepFailed(ctx context.Context, b *box) error {
	ttl := b.rec.Spec.Lifetimes.KeepFailed // does not change
	b.mu.Lock()
	res := b.rec.Result // which an error of a layer changes outside the turn
	b.mu.Unlock()
	if ttl == 0 || b.state() == dsec.Deleted || b.rec.Kept != nil || res == nil || res.Outcome == dsec.OutcomeOK || len(b.rec.Digests) == 0 || n.cfg.Add == nil {
		return nil
	}
	pctx, done := n.detached(ctx, n.cfg.PackTime)
	defer done()
	stop := context.AfterFunc(n.ctx, done) // a node that closes does it the next time
	defer stop()
	until := n.cfg.Clock().UTC().Add(ttl)
	tag := layer.Tag{Name: "kept/" + string(b.id), Project: b.rec.Project, Expires: until}
	packed, err := n.pack(pctx, b, tag, dsec.Scrub{})
	if n.ctx.Err() != nil {
		return dsec.E(dsec.Unavailable, "keep disk of sandbox", string(b.id), ErrClosed)
	}
	if err != nil {
		n.cfg.Log.Error("disk of a failed sandbox not kept", "sandbox", b.id, "err", err)
		b.emit(dsec.Event{Type: dsec.EventNote, Detail: "its disk could not be kept: " + err.Error()})
		return nil
	}
	kept := &Kept{Digest: packed.Digest, Tag: tag.Name, Until: until}
	b.emit(dsec.Event{Type: dsec.EventNote, Detail: "its disk is kept as " + packed.Digest + " until " + until.Format(time.RFC3339)})
	change := func(r *record) { r.Kept = kept }
	if err := b.move(change, nil); dsec.ClassOf(err) == dsec.NoSpace {
		b.applied(change, nil)
	} else if err != nil {
		return err
	}
	return nil
}
