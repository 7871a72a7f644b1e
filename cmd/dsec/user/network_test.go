package user

import (
	"reflect"
	"testing"

	"github.com/opendsec/dsec"
)

func TestRulesOfTheCommandLine(t *testing.T) {
	for s, want := range map[string]dsec.NetworkRule{
		"pypi.org":                   {Domain: "pypi.org"},
		"*.pypi.org,443":             {Domain: "*.pypi.org", Ports: []string{"443"}},
		"10.1.2.0/24,5432,8000-8999": {CIDR: "10.1.2.0/24", Ports: []string{"5432", "8000-8999"}},
		"9.9.9.9,udp,53":             {CIDR: "9.9.9.9", Protocol: "udp", Ports: []string{"53"}},
		"192.0.2.1,icmp":             {CIDR: "192.0.2.1", Protocol: "icmp"},
	} {
		got := parseRules([]string{s})
		if len(got) != 1 || !reflect.DeepEqual(got[0], want) || got[0].Validate() != nil || ruleText(got[0]) != s {
			t.Errorf("%s is %+v, again %s, %v", s, got, ruleText(got[0]), got[0].Validate())
		}
	}
	for _, s := range []string{"", ",443", "a b", "pypi.org,0", "pypi.org,http", "10.0.0.1/8", "1.2.3.4,icmp,80"} {
		if r := parseRules([]string{s})[0]; r.Validate() == nil {
			t.Errorf("%q is accepted as %+v", s, r)
		}
	}
}
