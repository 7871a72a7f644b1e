package node

import (
	"context"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
)

// acquire leases the layers of a spec. An image that was packed from a sandbox
// stands for all it was packed on.
func (n *Node) acquire(ctx context.Context, project string, id dsec.SandboxID, s dsec.Spec) (layer.Set, error) {
	store := n.cfg.Store.For(project)
	refs, err := store.Stack(ctx, s.Image)
	if err != nil {
		return layer.Set{}, err
	}
	refs = append(refs, s.Layers...)
	if len(refs) > dsec.MaxLayers+1 {
		return layer.Set{}, dsec.Errorf(dsec.Invalid, "stack layers", dsec.Quote(string(s.Image)), "%d layers, at most %d", len(refs), dsec.MaxLayers+1)
	}
	set, err := store.Acquire(ctx, string(id), refs)
	if err != nil {
		return set, err
	}
	return set, checkTwice(set, refs)
}

// checkTwice: no mechanism stacks a layer on itself. Two names may mean one.
func checkTwice(s layer.Set, refs []dsec.LayerRef) error {
	at := map[layer.Digest]int{}
	for i, l := range s.Layers {
		if j, twice := at[l.Digest]; twice {
			return dsec.Errorf(dsec.Invalid, "stack layers", string(l.Digest), "it is given twice, as %s and %s",
				dsec.Quote(string(refs[j])), dsec.Quote(string(refs[i])))
		}
		at[l.Digest] = i
	}
	return nil
}

func digestsOf(s layer.Set) []string {
	var out []string
	for _, l := range s.Layers {
		out = append(out, string(l.Digest))
	}
	return out
}
