package image

import (
	"errors"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"

	"github.com/opendsec/dsec"
)

// lying is the image with a config that names other plain layers than it has.
func lying(t *testing.T, img v1.Image) v1.Image {
	t.Helper()
	cf, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	cf = cf.DeepCopy()
	for i := range cf.RootFS.DiffIDs {
		cf.RootFS.DiffIDs[i] = v1.Hash{Algorithm: "sha256", Hex: strings.Repeat("a", 64)}
	}
	out, err := mutate.ConfigFile(img, cf)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// TestAnImageThatClaimsOtherLayersIsCorrupt: who has a layer under its plain
// digest elsewhere takes it for the one that the image has.
func TestAnImageThatClaimsOtherLayersIsCorrupt(t *testing.T) {
	honest := makeImage(t, makeTar(t, file("a", "1")), makeTar(t, file("b", "2")))
	img := lying(t, honest)
	dir := t.TempDir()
	if _, err := layout.Write(dir, indexOf(mutate.IndexAddendum{Add: img})); err != nil {
		t.Fatal(err)
	}
	src := push(t, newRegistry(t)+"/x:1", img)
	for _, s := range []string{dir, src} {
		if _, err := tryConvert(t, s, Options{}); !errors.Is(err, dsec.Corrupt.Err()) {
			t.Errorf("%s: %v", s, err)
		}
	}
	for _, c := range []struct {
		src  string
		want bool // it is whole
	}{{src, false}, {push(t, newRegistry(t)+"/x:1", honest), true}} {
		r, err := NewPuller().Resolve(t.Context(), c.src, Options{})
		if err != nil {
			t.Fatal(err)
		}
		p, err := r.OpenPlain(t.Context(), r.Layers[0], nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		id, err := p.Finish()
		if whole := err == nil && id == r.Layers[0].DiffID; whole != c.want || !whole && !errors.Is(err, dsec.Corrupt.Err()) {
			t.Errorf("%s: %v", c.src, err)
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	}
}
