package fullvm

import (
	"slices"
	"testing"

	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/runtimetest"
)

// first are the cases of the shorter run: those that are most of this tier's own making.
var first = []string{"a probe says what it found", "exit codes and streams", "A5_a timeout ends the tree", "I3_a command killed for memory exits 137",
	"files", "a tier without phases names itself"}

// TestConformance boots a machine for each sandbox of the suite, which takes minutes without KVM.
func TestConformance(t *testing.T) {
	w := newWorld(t)
	disk := smallLayer(t)
	runtimetest.Run(t, func(*testing.T) *runtimetest.Env {
		return &runtimetest.Env{
			Runtime: w.r,
			Layers: func(_ *testing.T, lease string) layer.Set {
				return layer.Set{Lease: lease, Layers: []layer.Local{disk}}
			},
			Reopen: func(t *testing.T) runtime.Runtime {
				must(t, w.r.Close())
				w.driver.Close()
				w.openRuntime(t)
				return w.r
			},
			Skip: func(name string) string {
				if long || slices.Contains(first, name) {
					return ""
				}
				return "a machine boots for it, emulated: DSEC_LONG is not set"
			},
			Small: 96 << 20, // with less, the kernel does not begin
		}
	})
	w.openRuntime(t) // the suite closes the one it had
}
