package microvm

import (
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/runtimetest"
)

func TestConformance(t *testing.T) { conforms(t, func(*dsec.Spec) {}) }

func TestColdMachinesConform(t *testing.T) {
	if !long {
		t.Skip("a kernel boots for each sandbox: DSEC_LONG is not set")
	}
	conforms(t, func(s *dsec.Spec) { s.Boot = dsec.BootCold })
}

func conforms(t *testing.T, spec func(*dsec.Spec)) {
	w := newWorld(t)
	runtimetest.Run(t, func(t *testing.T) *runtimetest.Env {
		return &runtimetest.Env{
			Runtime: w.r,
			Spec:    spec,
			Layers: func(_ *testing.T, lease string) layer.Set {
				return layer.Set{Lease: lease, Layers: []layer.Local{kit.base}, Config: image.Config{Env: []string{"FROM=image"}}}
			},
			Reopen: func(t *testing.T) runtime.Runtime {
				w.reopen(t)
				return w.r
			},
		}
	})
	w.openRuntime(t) // the suite closes the one it had
}
