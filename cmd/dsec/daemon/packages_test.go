package daemon

import (
	"net/netip"
	"testing"

	"github.com/opendsec/dsec/internal/config"
	"github.com/opendsec/dsec/netpolicy/mirror"
)

// TestTheDefaultsMakeAMirror that asks the public registries and nobody else.
func TestTheDefaultsMakeAMirror(t *testing.T) {
	s := &settings{Config: config.Default()}
	s.Data = t.TempDir()
	c, err := s.mirrorConfig(func(netip.Addr) (mirror.Access, bool) { return mirror.Access{}, false }, nil)
	if err != nil || c.MaxBytes != 10<<30 || c.Upstreams.PyPI != "https://pypi.org" || len(c.Hosts) != 1 {
		t.Fatalf("%+v %v", c, err)
	}
	m, err := mirror.New(c)
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
}
