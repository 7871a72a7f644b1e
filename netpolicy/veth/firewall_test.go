package veth

import (
	"os/exec"
	"strings"
	"testing"
)

func inNode(t *testing.T, l lab, script string) {
	t.Helper()
	err := inNamespace(l.node, func() error {
		out, err := exec.Command("sh", "-ec", script).CombinedOutput()
		if err != nil {
			t.Logf("%s", out)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestAWallOfTheNodeIsFoundAndItsRemedyWorks puts up what firewalls put up,
// and does what the probe says.
func TestAWallOfTheNodeIsFoundAndItsRemedyWorks(t *testing.T) {
	for _, c := range []struct{ name, tool, script, chain string }{
		{"nftables", "nft", "nft add table inet fw; nft 'add chain inet fw f1 { type filter hook forward priority 0; policy drop; }'", "inet fw f1"},
		{"a last rule", "nft", "nft add table inet fw; nft 'add chain inet fw f1 { type filter hook forward priority 0; }'; " +
			"nft add rule inet fw f1 tcp dport 1 accept; nft add rule inet fw f1 counter reject with icmpx admin-prohibited", "inet fw f1"},
		{"iptables-nft", "iptables-nft", "iptables-nft -P FORWARD DROP; iptables-nft -A FORWARD -p tcp --dport 1 -j ACCEPT", "ip filter FORWARD"},
		{"iptables-legacy", "iptables-legacy", "iptables-legacy -P FORWARD DROP", "iptables-legacy FORWARD"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if _, err := exec.LookPath(c.tool); err != nil {
				t.Skip(err)
			}
			l := newLab(t)
			n := testNetwork(t, l, Config{})
			ns, _ := attach(t, n, "a", "open")
			found := func() []Wall {
				t.Helper()
				return must(Walls(t.Context(), Config{Name: n.c.Name, Node: l.node}))(t)
			}
			if w := found(); len(w) != 0 {
				t.Fatalf("without a firewall: %+v", w)
			}
			if err := inNamespace(l.node, func() error { return exec.Command(c.tool, "-L").Run() }); c.tool == "iptables-legacy" && err != nil {
				t.Skipf("this kernel has no iptables-legacy: %v", err)
			}
			inNode(t, l, c.script)
			if _, err := dial(ns, "tcp4", public+":80"); err == nil {
				t.Fatal("the wall lets packets pass")
			}
			w := found()
			if len(w) != 1 || w[0].Chain != c.chain {
				t.Fatalf("got %+v, want %s", w, c.chain)
			}
			inNode(t, l, strings.ReplaceAll(w[0].Remedy, "iptables ", "iptables-nft "))
			if _, err := dial(ns, "tcp4", public+":80"); err != nil {
				t.Errorf("after %q: %v", w[0].Remedy, err)
			}
			if w := found(); len(w) != 0 {
				t.Errorf("after the remedy: %+v", w)
			}
		})
	}
}

func TestWallsGoThroughTheToolThatOwnsThem(t *testing.T) {
	const rules = `{"nftables": [{"metainfo": {}},
		{"chain": {"family": "ip", "table": "filter", "name": "DOCKER-USER"}},
		{"chain": {"family": "ip", "table": "filter", "name": "FORWARD", "hook": "forward", "policy": "drop"}},
		{"chain": {"family": "ip6", "table": "filter", "name": "FORWARD", "hook": "forward", "policy": "drop"}},
		{"chain": {"family": "inet", "table": "firewalld", "name": "filter_FORWARD", "hook": "forward", "policy": "accept"}},
		{"rule": {"family": "inet", "table": "firewalld", "chain": "filter_FORWARD", "expr": [{"jump": {"target": "zones"}}]}},
		{"rule": {"family": "inet", "table": "firewalld", "chain": "filter_FORWARD", "expr": [{"reject": {"type": "icmpx"}}]}},
		{"chain": {"family": "inet", "table": "open", "name": "f", "hook": "forward", "policy": "accept"}},
		{"rule": {"family": "inet", "table": "open", "chain": "f", "expr": [{"match": {}}, {"drop": null}]}},
		{"chain": {"family": "inet", "table": "knows", "name": "f", "hook": "forward", "policy": "drop"}},
		{"rule": {"family": "inet", "table": "knows", "chain": "g", "expr": [{"match": {"right": "dsec-*"}}, {"accept": null}]}}]}`
	walls, err := wallsIn([]byte(rules), "dsec-x")
	if err != nil || len(walls) != 2 {
		t.Fatalf("%+v, %v", walls, err)
	}
	for i, want := range []string{"iptables -I DOCKER-USER -i dsec-x", "firewall-cmd"} {
		if !strings.Contains(walls[i].Remedy, want) {
			t.Errorf("%+v, want %s", walls[i], want)
		}
	}
}
