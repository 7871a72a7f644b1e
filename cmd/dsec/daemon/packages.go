package daemon

import (
	"log/slog"
	"net/netip"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/config"
	"github.com/opendsec/dsec/netpolicy/mirror"
)

// packagesDir is where the mirror of packages keeps what it has fetched.
func (s *settings) packagesDir() string { return filepath.Join(s.Data, "packages") }

// mirrorConfig is the mirror of packages as node.packages says.
func (s *settings) mirrorConfig(lookup func(netip.Addr) (mirror.Access, bool), log *slog.Logger) (mirror.Config, error) {
	p := s.Node.Packages
	var fs unix.Statfs_t
	if err := unix.Statfs(s.Data, &fs); err != nil {
		return mirror.Config{}, dsec.E(dsec.Internal, "measure", s.Data, err)
	}
	most, err := config.Bytes(p.Cache, int64(fs.Blocks)*fs.Bsize)
	if err != nil {
		return mirror.Config{}, dsec.E(dsec.Invalid, "read configuration", "node.packages.cache", err)
	}
	return mirror.Config{Dir: s.packagesDir(), MaxBytes: max(most, 1), Hosts: p.Hosts, Lookup: lookup, Log: log,
		Upstreams: mirror.Upstreams{PyPI: p.PyPI, NPM: p.NPM, Go: p.Go, SumDB: p.SumDB, Debian: p.Debian, DebianSecurity: p.DebianSecurity}}, nil
}
