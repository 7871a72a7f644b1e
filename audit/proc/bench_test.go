package proc

import (
	"testing"

	"github.com/opendsec/dsec/audit"
	"github.com/opendsec/dsec/internal/linux"
)

// BenchmarkStarts is a shell that starts 200 short programs: of a sandbox that is seen,
// and of a uid next to it that is not, in turns. It is the worst case: a build does something between starts.
func BenchmarkStarts(b *testing.B) {
	k, o := linux.NewKeeper(), &told{}
	defer k.Close()
	w := openWitness(b, k, o)
	id := newID()
	must(b, w.Add(b.Context(), audit.Subject{ID: id, UID: base}, false))
	must(b, w.Start())
	for name, n := range map[string]uint32{"seen": 0, "unseen": 1} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				as(b, n, 0, "/bin/sh", "-c", "i=0; while [ $i -lt 200 ]; do i=$((i+1)); /bin/true; done")
			}
		})
	}
	w.Remove(b.Context(), id, nil)
	must(b, w.Close())
}
