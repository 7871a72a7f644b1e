package daemon

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/config"
	"github.com/opendsec/dsec/internal/supervise"
	"github.com/opendsec/dsec/netpolicy/mirror"
)

// packagesSocketFD is where the agent connects to the mirror of packages.
const packagesSocketFD = supervise.FirstFD + 1

// Packages is the hidden verb of the process that serves the mirror of packages.
func Packages() *cobra.Command {
	return role{name: "packages", short: "Serve packages to sandboxes", open: openPackages}.verb()
}

func openPackages(_ context.Context, o orders, log *slog.Logger) (*serving, error) {
	s := &settings{Config: o.Config}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return nil, dsec.E(dsec.Internal, "give up new privileges", "", err)
	}
	f := os.NewFile(packagesSocketFD, "packages.sock")
	l, err := net.FileListener(f)
	_ = f.Close()
	if err != nil {
		return nil, dsec.E(dsec.Internal, "listen", s.packagesSocket(), err)
	}
	link := &mirror.Link{Log: log}
	c, err := s.mirrorConfig(link.Lookup, log)
	var m *mirror.Mirror
	if err == nil {
		m, err = mirror.New(c)
	}
	if err != nil {
		return nil, errors.Join(err, l.Close())
	}
	ended, failed := make(chan struct{}), error(nil)
	out := &serving{ended: ended, why: dsec.Errorf(dsec.Unavailable, "serve packages", s.packagesSocket(), "the mirror has ended"),
		close: func(context.Context) error {
			err := l.Close()
			<-ended
			return errors.Join(err, failed, m.Close())
		}}
	go func() {
		failed = link.Run(l.(*net.UnixListener), m)
		close(ended)
	}()
	return out, nil
}

// packagesChild is the mirror as a process of its own, with no right but to its
// cache: what it reads is not ours.
func (s *settings) packagesChild(order, socket *os.File) supervise.Child {
	return supervise.Child{Name: "packages", Argv: []string{self, "packages"}, Files: []*os.File{order, socket}, UID: s.Node.Packages.UID, GID: s.Node.Packages.UID,
		Ready: readyWithin, Grace: gatewayEnds}
}

// attend tells the mirror who asks it.
func (m *machine) attend(s *settings, log *slog.Logger) {
	m.packages = mirror.Attend(mirror.Agent{Socket: s.packagesSocket(), Listen: m.network.ListenMirror, Log: log,
		Lookup: func(a netip.Addr) (mirror.Access, bool) {
			p, known := m.network.Policy(a)
			access, some := mirror.AccessOf(p)
			return access, known && some
		}})
}

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
