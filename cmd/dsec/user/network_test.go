package user

import (
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
)

func TestRulesOfTheCommandLine(t *testing.T) {
	for s, want := range map[string]dsec.NetworkRule{
		"pypi.org":                   {Domain: "pypi.org"},
		"*.pypi.org,443":             {Domain: "*.pypi.org", Ports: []string{"443"}},
		"10.1.2.0/24,5432,8000-8999": {CIDR: "10.1.2.0/24", Ports: []string{"5432", "8000-8999"}},
		"9.9.9.9,udp,53":             {CIDR: "9.9.9.9", Protocol: "udp", Ports: []string{"53"}},
		"mirror:pypi":                {Mirror: "pypi"},
		"192.0.2.1,icmp":             {CIDR: "192.0.2.1", Protocol: "icmp"},
	} {
		got := parseRules([]string{s})
		if len(got) != 1 || !reflect.DeepEqual(got[0], want) || got[0].Validate() != nil || ruleText(got[0]) != s {
			t.Errorf("%s is %+v, again %s, %v", s, got, ruleText(got[0]), got[0].Validate())
		}
	}
	for _, s := range []string{"", ",443", "a b", "pypi.org,0", "pypi.org,http", "10.0.0.1/8", "1.2.3.4,icmp,80", "mirror:cargo", "mirror:", "mirror:npm,443"} {
		if r := parseRules([]string{s})[0]; r.Validate() == nil {
			t.Errorf("%q is accepted as %+v", s, r)
		}
	}
}

func TestWhatASandboxReachedIsShown(t *testing.T) {
	var b strings.Builder
	n := network{NetworkState: dsec.NetworkState{NetworkPolicy: dsec.NetworkPolicy{Mode: dsec.NetworkAllow}, Generation: 3}, Egress: &dsec.Egress{PacketsOut: 12, BytesOut: 2048, PacketsIn: 3, PacketsRefused: 1,
		Rows: []dsec.EgressRow{{Name: "good.example", Address: "203.0.113.7", Port: 443, Connections: 2, BytesOut: 517, BytesIn: 1 << 20},
			{Name: "bad\x1b.example", Address: "203.0.113.7", Port: 443, Connections: 1, Refused: "it is no allowed name"}, {Refused: "it says no name", Connections: 9}}}}
	if err := describeNetwork(&b, n); err != nil {
		t.Fatal(err)
	}
	want := `allow-list, generation 3
packets: 12 sent (2.0 KiB), 3 received, 1 refused
NAME          ADDRESS          CONNECTIONS  SENT   RECEIVED  VERDICT
good.example  203.0.113.7:443  2            517 B  1.0 MiB   let through
bad?.example  203.0.113.7:443  1            0 B    0 B       refused: it is no allowed name
-             others           9            0 B    0 B       refused: it says no name
`
	if b.String() != want {
		t.Errorf("%s\nwant\n%s", b.String(), want)
	}
}

func TestCutoffsOfTheCommandLine(t *testing.T) {
	for s, want := range map[string]string{"2025-01-31": "2025-01-31T00:00:00Z", "2025-01-31T01:30:00+01:00": "2025-01-31T00:30:00Z", "2025-01-31T00:00:00.5Z": "2025-01-31T00:00:00.5Z"} {
		f := specFlags{tier: "container", network: "mirror-only", cutoff: s}
		f.spec.MirrorDeny = []string{"npm:left-pad"}
		if p, err := f.build("base:1"); err != nil || p.Cutoff.Format(time.RFC3339Nano) != want {
			t.Errorf("%s is %v, %v", s, p.Cutoff, err)
		}
	}
	for _, s := range []string{"2025", "31.1.2025", "2025-01-31 12:00", "yesterday"} {
		if c, err := parseCutoff(s); dsec.ClassOf(err) != dsec.Invalid {
			t.Errorf("%s is %v, %v", s, c, err)
		}
	}
}
