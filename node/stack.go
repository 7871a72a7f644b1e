package node

import (
	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
)

func refsOf(s dsec.Spec) []dsec.LayerRef { return append([]dsec.LayerRef{s.Image}, s.Layers...) }

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
