package adversary

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/process"
)

// probing is a neighbour that sleeps, works, writes and reads, over and over.
type probing struct {
	h *host
	p *client.Process
}

func (h *host) probe(t *testing.T, id dsec.SandboxID, seconds float64) *probing {
	t.Helper()
	return &probing{h, h.background(t, id, "/attack", "-probe", fmt.Sprint(seconds))}
}

// p99 waits until it ends, and wants everything it did to be right.
func (p *probing) p99(t *testing.T) time.Duration {
	t.Helper()
	r, err := p.p.Wait(t.Context())
	if err != nil || r.ExitCode != 0 {
		t.Fatalf("the neighbour: %+v, %v", r, err)
	}
	stdout, _, err := p.p.Kept(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var all []int
	for line := range strings.Lines(string(stdout.Head) + string(stdout.Tail)) {
		n, err := strconv.Atoi(strings.TrimSpace(line))
		if err != nil {
			t.Fatalf("the neighbour met %q", line)
		}
		all = append(all, n)
	}
	if len(all) < 3 {
		t.Fatalf("the neighbour came to %d rounds", len(all))
	}
	slices.Sort(all)
	return time.Duration(all[len(all)*99/100]) * time.Microsecond
}

// damageStaysWithWhoDoesIt: whatever one sandbox uses up, its limit is its own:
// agent and hold are the same processes, a neighbour works and can still be
// given each of these things, and the sandbox can be destroyed.
func damageStaysWithWhoDoesIt(t *testing.T, h *host) {
	env, beside := map[string]string{"ATTACK_SECONDS": "1"}, 0.4
	if long {
		env, beside = map[string]string{"ATTACK_SECONDS": "30", "ATTACK_MOST": "1000000"}, 20
	}
	before := h.look(t)
	quiet := h.neighbour(t)
	other := h.create(t, nil)
	idle := h.probe(t, other, 0.7).p99(t)
	for _, v := range classes(t)["Damage"] {
		t.Run(v.Name, func(t *testing.T) {
			probe := h.probe(t, other, beside)
			var both sync.WaitGroup
			for _, user := range []string{"root", "user"} {
				id := h.create(t, nil)
				both.Go(func() { h.harm(t, id, user, v, env) })
			}
			both.Wait()
			t.Logf("p99 of the neighbour's rounds: %v, idle %v", probe.p99(t), idle)
			quiet.check(t)
		})
	}
	h.unchanged(t, before)
}

// harm does one damage in a sandbox, which lives and can be destroyed.
func (h *host) harm(t *testing.T, id dsec.SandboxID, user string, v Vector, env map[string]string) {
	s := h.try(t, id, user, v.Name, env)
	if err := v.as(user, s); err != nil {
		t.Errorf("as %s: %v", user, err)
	}
	if s.OOM && s.OOMLimit != 128<<20 {
		t.Errorf("killed at %d", s.OOMLimit)
	}
	h.recorded(t, id, map[string]string{s.exec: v.Name}, v)
	if sb, err := h.Get(t.Context(), id); err != nil || sb.State != dsec.Running {
		t.Errorf("the sandbox is %s, %v", sb.State, err)
	}
	begun := time.Now()
	if existed, err := h.Delete(t.Context(), id); err != nil || !existed {
		t.Errorf("delete: %v, %v", existed, err)
	}
	t.Logf("its end took %v", time.Since(begun))
}

// whoEndsItsOwnSystemIsToBlame: no way to end one's sandbox is blamed on the
// platform, which would take the rollout out of the loss.
func whoEndsItsOwnSystemIsToBlame(t *testing.T, h *host) {
	id := h.create(t, func(s *dsec.Spec) { s.OOM = dsec.OOMSandbox })
	if _, err := h.Exec(t.Context(), id, process.Spec{Argv: []string{"/attack", "memory"}, Timeout: 30 * time.Second}); err != nil {
		t.Fatal(err)
	}
	var sb client.Sandbox
	eventually(t, "it ends", func() bool {
		var err error
		if sb, err = h.Get(t.Context(), id); err != nil {
			t.Fatal(err)
		}
		return sb.Result != nil
	})
	if r := sb.Result; r.Cause != dsec.CauseOOM || r.Mask() || r.InducedBy != dsec.InducedBySelf {
		t.Errorf("%+v", sb.Result)
	}
	ruins(t, h)
}

// ruins: after everything that it can remove is gone, the sandbox answers, and its
// disk can be looked at and removed.
func ruins(t *testing.T, h *host) {
	t.Helper()
	id := h.create(t, nil)
	h.sh(t, id, "rm -rf /bin /etc /root /evil /dev/shm/* 2>/dev/null; kill -9 -1")
	if s := h.try(t, id, "0:0", "leaked-descriptors", nil); !strings.HasPrefix(s.text, "blocked") {
		t.Errorf("%+v", s)
	}
	if _, err := h.Files(id, "").List(t.Context(), "/", 1); err != nil {
		t.Error(err)
	}
	if sb, err := h.Get(t.Context(), id); err != nil || sb.State != dsec.Running {
		t.Errorf("the sandbox is %s, %v", sb.State, err)
	}
	if existed, err := h.Delete(t.Context(), id); err != nil || !existed {
		t.Errorf("delete: %v, %v", existed, err)
	}
}
