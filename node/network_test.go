package node

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/runtime"
)

// networked is a tier whose sandboxes have networks, of which it remembers the last.
type networked struct {
	runtime.Runtime
	last dsec.NetworkPolicy
}

func (n *networked) SetNetwork(_ context.Context, _ dsec.SandboxID, p dsec.NetworkPolicy) (uint64, error) {
	n.last = p
	return 2, nil
}

func (n *networked) Egress(context.Context, dsec.SandboxID) (dsec.Egress, error) {
	return dsec.Egress{}, nil
}

// TestAChangeOfTheNetworkKeepsTheCutoff: it is of the task, not of the mode.
func TestAChangeOfTheNetworkKeepsTheCutoff(t *testing.T) {
	w := newWorld(t, nil)
	rt := &networked{Runtime: w.fake}
	w.cfg.Runtimes[dsec.TierContainer] = rt
	cutoff := time.Date(2025, 1, 31, 0, 0, 0, 0, time.UTC)
	sb := w.create(func(s *dsec.Spec) {
		s.Network, s.Cutoff, s.MirrorDeny = dsec.NetworkMirror, cutoff, []string{"pypi:requests"}
	})
	if _, err := w.SetNetwork(t.Context(), sb.ID, dsec.NetworkPolicy{Mode: dsec.NetworkAllow, Allow: []dsec.NetworkRule{{Mirror: "pypi"}}}, ""); err != nil {
		t.Fatal(err)
	}
	w.crash()
	got, err := w.Get(t.Context(), sb.ID)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range []dsec.NetworkPolicy{rt.last, got.Network.NetworkPolicy} {
		if !p.Cutoff.Equal(cutoff) || !slices.Equal(p.MirrorDeny, []string{"pypi:requests"}) || p.Mode != dsec.NetworkAllow {
			t.Errorf("in force is %+v", p)
		}
	}
}
