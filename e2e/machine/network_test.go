package machine

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

// refused is what a program in a sandbox sees of an address that nothing opens. It
// is refused by the router, so nothing leaves.
const refused = "echo | nc -w 3 192.0.2.1 80 2>&1; /bin/busybox nslookup x.example 2>&1"

// notPermitted is what they say: to a kernel of the sandbox's own it is told as of a port where nobody listens.
var notPermitted = func() *regexp.Regexp {
	if hosted() {
		return regexp.MustCompile("not permitted")
	}
	return regexp.MustCompile("not permitted|refused")
}()

// TestPoliciesOutliveTheAgent: an allow-list is in force when sandbox, agent and
// command line say so, also while no agent lives.
func TestPoliciesOutliveTheAgent(t *testing.T) {
	h := start(t)
	id := h.create(func(s *dsec.Spec) { s.Network = dsec.NetworkAllow })
	closed := func(when string) {
		t.Helper()
		out, _ := h.sh(id, refused)
		if !notPermitted.MatchString(out) || !strings.Contains(out, "NXDOMAIN") {
			t.Errorf("%s: %q", when, out)
		}
	}
	closed("without rules")
	eventually(t, "who listens is told", func() bool {
		past, _, err := h.Past(t.Context(), client.Events{Sandboxes: []dsec.SandboxID{id}, Types: []dsec.EventType{dsec.EventRefused}, Since: time.Now().Add(-time.Hour)})
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range past {
			if e.Type == dsec.EventRefused && e.Detail == "tcp 192.0.2.1:80" && e.Fields["generation"] == "1" && e.Fields["refused"] != "" && (e.Fields["program"] == "nc" || !hosted()) {
				return true
			}
		}
		return false
	})
	eventually(t, "who asks for a name is told", func() bool {
		past, _, err := h.Past(t.Context(), client.Events{Sandboxes: []dsec.SandboxID{id}, Types: []dsec.EventType{dsec.EventRefused}, Since: time.Now().Add(-time.Hour)})
		return err == nil && slices.ContainsFunc(past, func(e dsec.Event) bool { return e.Detail == "dns x.example" })
	})
	rules := []dsec.NetworkRule{{CIDR: "198.51.100.7", Ports: []string{"443"}}, {Domain: "good.example"}}
	sb, err := h.SetNetwork(t.Context(), id, dsec.NetworkPolicy{Mode: dsec.NetworkAllow, Allow: rules})
	if err != nil || sb.Network == nil || sb.Network.Generation != 2 || len(sb.Network.Allow) != 2 {
		t.Fatalf("%+v, %v", sb.Network, err)
	}
	closed("with other rules")
	looker := h.Child("egress")
	powerless(t, looker)
	h.Kill("node")
	eventually(t, "the next agent answers", func() bool { _, err := h.Get(t.Context(), id); return err == nil })
	closed("with another agent")
	if now := h.Child("egress"); now != looker {
		t.Errorf("who looks at names was process %d, is %d", looker, now)
	}
	h.Kill("egress")
	if _, err := h.SetNetwork(t.Context(), id, dsec.NetworkPolicy{Mode: dsec.NetworkAllow, Allow: rules}); err != nil {
		t.Errorf("with another process that looks at names: %v", err)
	}
	powerless(t, h.Child("egress"))
	if out := h.cli("network", string(id)); !strings.HasPrefix(out, "allow-list, generation 3\n  198.51.100.7,443\n  good.example\npackets: ") {
		t.Errorf("dsec network: %q", out)
	}
	if out := h.cli("network", string(id), "none"); out != "none, generation 4\n" {
		t.Errorf("dsec network none: %q", out)
	}
	if out, _ := h.sh(id, "echo | nc -w 3 192.0.2.1 80 2>&1"); !notPermitted.MatchString(out) {
		t.Errorf("with the mode none: %q", out)
	}
	if _, err := h.SetNetwork(t.Context(), id, dsec.NetworkPolicy{Mode: dsec.NetworkAllow, Allow: []dsec.NetworkRule{{CIDR: "2001:db8::1"}}}); dsec.ClassOf(err) != dsec.Unsupported {
		t.Errorf("IPv6: %v", err)
	}
	none := h.create(nil)
	if _, err := h.SetNetwork(t.Context(), none, dsec.NetworkPolicy{Mode: dsec.NetworkOpen}); dsec.ClassOf(err) != dsec.IllegalState {
		t.Errorf("a sandbox without a network: %v", err)
	}
}

// powerless checks that a process has its own uid, no capability, and not the
// network of the machine.
func powerless(t *testing.T, pid int) {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"Uid:\t61442\t61442\t61442\t61442\n", "CapInh:\t0000000000000000\n", "CapPrm:\t0000000000000000\n", "CapEff:\t0000000000000000\n", "CapAmb:\t0000000000000000\n", "NoNewPrivs:\t1\n"} {
		if !strings.Contains(string(status), want) {
			t.Errorf("process %d has no %q:\n%s", pid, want, status)
		}
	}
	theirs, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", pid))
	if err != nil {
		t.Fatal(err)
	}
	if own, _ := os.Readlink("/proc/self/ns/net"); own == theirs {
		t.Errorf("process %d is in the network of the machine", pid)
	}
}
