package container

import (
	"testing"

	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/runtimetest"
	"github.com/opendsec/dsec/runtime/runtimetest/layertest"
)

func TestConformance(t *testing.T) {
	everyPlan(t, func(t *testing.T, w *world) {
		runtimetest.Run(t, func(t *testing.T) *runtimetest.Env {
			return &runtimetest.Env{
				Runtime: w.r,
				Layers: func(t *testing.T, lease string) layer.Set {
					return layer.Set{Lease: lease, Layers: []layer.Local{layertest.Base(t)}, Config: image.Config{Env: []string{"FROM=image"}}}
				},
				Reopen: func(t *testing.T) runtime.Runtime {
					w.close(t)
					w.open(t)
					return w.r
				},
			}
		})
		w.openRuntime(t) // the suite closes the one it had
	})
}
