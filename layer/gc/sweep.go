package gc

import (
	"context"
	"crypto/sha256"
	"slices"

	"golang.org/x/sync/errgroup"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/layer"
)

// sweep deletes what this run may delete, what needs others first.
func (p *pass) sweep(ctx context.Context) error {
	if err := p.remove(ctx, p.gone); err != nil {
		return err
	}
	if err := p.repoint(ctx); err != nil {
		return err
	}
	byKind := map[layer.Kind][]string{}
	for key := range p.due {
		if kind, _, err := layer.ParseKey(key); err == nil && p.doomed(key) {
			byKind[kind] = append(byKind[kind], key)
		}
	}
	for _, kind := range layer.Kinds {
		slices.Sort(byKind[kind])
		if err := p.remove(ctx, byKind[kind]); err != nil {
			return err
		}
	}
	done := make([]string, 0, len(p.executing))
	for _, name := range p.executing {
		done = append(done, layer.CondemnedPrefix+name)
	}
	if err := p.remove(ctx, done); err != nil {
		return err
	}
	return p.remove(ctx, p.weak)
}

// remove deletes objects while the run is alive.
func (p *pass) remove(ctx context.Context, keys []string) error {
	for batch := range slices.Chunk(keys, 8*atOneTime) {
		actx, cancel, err := p.run.alive(ctx)
		if err != nil {
			return err
		}
		g, gctx := errgroup.WithContext(actx)
		g.SetLimit(atOneTime)
		for _, key := range batch {
			g.Go(func() error { return p.blobs.Delete(gctx, key) })
		}
		err = g.Wait()
		cancel()
		if err != nil {
			return err
		}
	}
	return nil
}

// condemn writes down what a later run may delete.
func (p *pass) condemn(ctx context.Context) error {
	var keys []string
	for key := range p.world.objects {
		if p.guilty(key) {
			keys = append(keys, key)
		}
	}
	slices.Sort(keys)
	for some := range slices.Chunk(keys, layer.MaxCondemnedKeys) {
		c := layer.NewCondemned(some)
		if err := blob.PutBytes(ctx, p.blobs, layer.CondemnedPrefix+dsec.Random(20), c.Encode(), blob.PutOptions{}); err != nil {
			return err
		}
	}
	return nil
}

// repoint makes hints that name a doomed index name one that stays and has the
// chunk. Those that no index has any more are weak objects that speak of
// nothing.
func (p *pass) repoint(ctx context.Context) error {
	doomed := map[[sha256.Size]byte]string{} // to the key of a doomed index
	for key, sums := range p.world.hints {
		for _, sum := range sums {
			if p.doomed(key) {
				doomed[sum] = key
			}
		}
	}
	if len(doomed) == 0 {
		return nil
	}
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(atOneTime)
	for key, sums := range p.world.hints {
		_, stays, err := layer.ParseKey(key)
		if err != nil || p.doomed(key) {
			continue
		}
		for _, sum := range sums {
			if _, ok := doomed[sum]; ok {
				delete(doomed, sum)
				g.Go(func() error { return p.repointOne(gctx, layer.HintKey(layer.FromSum(sum[:])), stays) })
			}
		}
	}
	return g.Wait()
}

func (p *pass) repointOne(ctx context.Context, hint string, to layer.Digest) error {
	b, err := blob.ReadAll(ctx, p.blobs, hint, 128)
	if class := dsec.ClassOf(err); class == dsec.NotFound || class == dsec.Corrupt {
		return nil
	}
	if err != nil {
		return err
	}
	if named, err := layer.ParseDigest(string(b)); err == nil && p.stays(layer.IndexKey(named)) {
		return nil
	}
	return blob.PutBytes(ctx, p.blobs, hint, []byte(to), blob.PutOptions{})
}
