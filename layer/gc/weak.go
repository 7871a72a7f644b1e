package gc

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/layer"
)

// maxNote is the most bytes of an oci note, docs/formats/stack.md.
const maxNote = 64 << 10

// findWeak lists the weak objects that are old enough and speak of nothing that
// is there after this run.
func (p *pass) findWeak(ctx context.Context) error {
	sums := map[[sha256.Size]byte]bool{}
	for key, list := range p.world.hints {
		if p.stays(key) {
			for _, sum := range list {
				sums[sum] = true
			}
		}
	}
	for kind, objects := range p.world.weak {
		for key, o := range objects {
			if p.young(o) || kind == "oci" {
				continue
			}
			_, hex, _ := strings.Cut(key, "/")
			d, err := layer.ParseDigest("sha256:" + hex)
			switch {
			case kind == "claims", kind == "probe":
			case err != nil: // not ours
				continue
			case kind == "hints" && sums[d.Sum()], (kind == "traces" || kind == "lineages") && p.stays(layer.ManifestKey(d)):
				continue
			}
			p.weak = append(p.weak, key)
		}
	}
	err := p.findNotes(ctx)
	slices.Sort(p.weak)
	return err
}

// findNotes lists the notes of converted layers whose layer is not there.
func (p *pass) findNotes(ctx context.Context) error {
	var mu sync.Mutex
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(atOneTime)
	for key, o := range p.world.weak["oci"] {
		if p.young(o) {
			continue
		}
		g.Go(func() error {
			b, err := blob.ReadAll(gctx, p.blobs, key, maxNote)
			if class := dsec.ClassOf(err); class == dsec.NotFound || class == dsec.Corrupt {
				return nil
			}
			if err != nil {
				return err
			}
			var note struct {
				Layer string `json:"layer"`
			}
			if json.Unmarshal(b, &note) != nil || note.Layer == "" {
				return nil // of a later version, or of a layer with nothing in it
			}
			if d, err := layer.ParseDigest(note.Layer); err == nil && !p.stays(layer.ManifestKey(d)) {
				mu.Lock()
				defer mu.Unlock()
				p.weak = append(p.weak, key)
			}
			return nil
		})
	}
	return g.Wait()
}
