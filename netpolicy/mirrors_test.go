package netpolicy

import (
	"testing"

	"github.com/opendsec/dsec"
)

func TestTheEnvironmentIsThatOfWhatIsOpen(t *testing.T) {
	for mode, want := range map[dsec.NetworkMode]int{dsec.NetworkMirror: 10, dsec.NetworkOpen: 0, dsec.NetworkNone: 0, dsec.NetworkAllow: 0} {
		if env := MirrorEnvironment(dsec.NetworkPolicy{Mode: mode}); len(env) != want {
			t.Errorf("%s: %v", mode, env)
		}
	}
	env := MirrorEnvironment(dsec.NetworkPolicy{Mode: dsec.NetworkAllow, Allow: []dsec.NetworkRule{{Mirror: "go"}, {Domain: "a.b"}}})
	if len(env) != 2 || env["GOPROXY"] != "http://go.mirror.dsec" {
		t.Errorf("%v", env)
	}
}
