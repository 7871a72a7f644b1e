package node

import (
	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
)

func refsOf(s dsec.Spec) []dsec.LayerRef { return append([]dsec.LayerRef{s.Image}, s.Layers...) }

func digestsOf(s layer.Set) []string {
	var out []string
	for _, l := range s.Layers {
		out = append(out, string(l.Digest))
	}
	return out
}
