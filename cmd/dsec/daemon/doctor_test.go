package daemon

import (
	"errors"
	"strings"
	"testing"

	"github.com/opendsec/dsec/netpolicy/veth"
)

func TestTheDoctorSaysWhatToDoAboutAFirewall(t *testing.T) {
	wall := veth.Wall{Chain: "ip filter FORWARD", Why: "policy drop", Remedy: "iptables -I FORWARD -i dsec-x -j ACCEPT"}
	for _, c := range []struct {
		walls []veth.Wall
		err   error
		ok    bool
		want  []string
	}{
		{nil, nil, true, []string{"no chain"}},
		{[]veth.Wall{wall}, nil, false, []string{wall.Chain, wall.Why, wall.Remedy}},
		{nil, errors.New("nft is not installed"), false, []string{"nft is not installed"}},
	} {
		got := firewall(c.walls, c.err)
		if got.OK != c.ok || got.Fatal {
			t.Errorf("%+v", got)
		}
		for _, w := range c.want {
			if !strings.Contains(got.Detail, w) {
				t.Errorf("%q lacks %q", got.Detail, w)
			}
		}
	}
}
