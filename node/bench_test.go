package node

import (
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/runtimetest"
)

// BenchmarkCreateDelete is what the node itself costs: its runtime is the fake.
func BenchmarkCreateDelete(b *testing.B) {
	fake := runtimetest.NewFake()
	defer fake.Close()
	n, err := New(Config{ID: "bench", Dir: b.TempDir(), Store: &memStore{leases: map[string]bool{}},
		Runtimes: map[dsec.Tier]runtime.Runtime{dsec.TierContainer: fake}})
	if err != nil {
		b.Fatal(err)
	}
	defer n.Close()
	b.SetParallelism(4)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			sb, err := n.Create(b.Context(), "p", spec(nil))
			if err != nil {
				b.Error(err)
				return
			}
			if _, err := n.Delete(b.Context(), sb.ID, ""); err != nil {
				b.Error(err)
				return
			}
		}
	})
}
