package guesttest

import (
	"os"
	"testing"

	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/runtimetest"
)

func TestConformance(t *testing.T) {
	if os.Getenv("DSEC_LONG") == "" {
		t.Skip("runtime/microvm runs the same suite in machines: DSEC_LONG is not set")
	}
	m := newMachines(t.TempDir())
	runtimetest.Run(t, func(t *testing.T) *runtimetest.Env {
		r, err := m.open(t.Context())
		must(t, err)
		e := &runtimetest.Env{Runtime: r}
		e.Reopen = func(t *testing.T) runtime.Runtime {
			must(t, e.Runtime.Close())
			r, err := m.open(t.Context())
			must(t, err)
			return r
		}
		return e
	})
}
