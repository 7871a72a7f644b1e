package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/gateway"
	"github.com/opendsec/dsec/internal/supervise"
)

// self is this program for children of any uid, wherever it is: a path below
// somebody's home would be closed to the gateway.
const self = "/proc/self/exe"

// How long the children may take.
const (
	readyWithin = 2 * time.Minute
	gatewayEnds = 15 * time.Second
	nodeEnds    = 30 * time.Second
)

// Up is the verb that serves one machine.
func Up() *cobra.Command {
	var s settings
	c := &cobra.Command{
		Use:   "up",
		Short: "Serve sandboxes on this machine",
		Long: `Starts gateway and node agent of this machine, each with the privileges it needs,
and keeps them running until it is asked to end. Sandboxes run on when it ends:
start it again to find them, or end them with "dsec down".

The first start prints an admin key and writes it to the context of the user who
started it.`,
		Example: "  sudo dsec up\n  sudo dsec up --data /srv/dsec --config /etc/dsec/dsec.yaml",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := s.load(); err != nil {
				return err
			}
			ctx, stop := signal.NotifyContext(c.Context(), syscall.SIGTERM, syscall.SIGINT)
			defer stop()
			return up(ctx, &s)
		},
	}
	s.register(c)
	return c
}

func up(ctx context.Context, s *settings) error {
	if err := needRoot("start dsec"); err != nil {
		return err
	}
	slog.SetDefault(logger(os.Stderr))
	s.credentials = takeCredentials()
	gid := groupID(s.Gateway.Group)
	if err := s.foreign(); err != nil {
		return err
	}
	if err := makeDirs(s); err != nil {
		return err
	}
	if err := s.makeBlobDir(ctx); err != nil {
		return err
	}
	if err := errors.Join(reachable(s.gatewayDir()), reachable(filepath.Dir(s.dataSocket()))); err != nil {
		return err
	}
	held, err := lock(s.lockFile())
	if err != nil {
		return err
	}
	defer held.Close()
	children, closeFiles, err := s.children(gid)
	if err != nil {
		return err
	}
	defer closeFiles()
	err = supervise.Run(ctx, children, func() {
		if err := awaitNode(ctx, s); err != nil {
			slog.Error("wait for the node", "err", err)
		}
		if err := firstKey(ctx, s); err != nil {
			slog.Error("make the first admin key", "err", err)
		}
		tellSystemd()
		slog.Info("dsec is up", "socket", s.socket(), "listen", s.Gateway.Listen)
	})
	_ = os.Remove(s.socket())
	return err
}

// makeDirs makes the directories and gives each to the process that uses it.
func makeDirs(s *settings) error {
	for _, d := range []struct {
		path string
		mode os.FileMode
		gid  int
		uid  int
	}{
		{s.Data, 0o711, 0, 0}, {s.Run, 0o755, 0, 0},
		{s.gatewayDir(), 0o700, s.Gateway.UID, s.Gateway.UID},
		{s.packagesDir(), 0o700, s.Node.Packages.UID, s.Node.Packages.UID},
		{filepath.Dir(s.dataSocket()), 0o750, s.Gateway.UID, 0},
		{filepath.Dir(s.holdSocket()), 0o700, 0, 0},
		{s.nodeDir(), 0o700, 0, 0}, {s.layerDir(), 0o700, 0, 0}, {s.sandboxDir(), 0o700, 0, 0}, {s.poolDir(), 0o700, 0, 0},
	} {
		if err := os.MkdirAll(d.path, d.mode); err != nil {
			return dsec.E(dsec.Internal, "make directory", d.path, err)
		}
		if err := os.Chown(d.path, d.uid, d.gid); err != nil {
			return dsec.E(dsec.Internal, "make directory", d.path, err)
		}
		if err := os.Chmod(d.path, d.mode); err != nil {
			return dsec.E(dsec.Internal, "make directory", d.path, err)
		}
	}
	return nil
}

// reachable checks that the gateway's uid can come to its directory.
func reachable(path string) error {
	for dir := filepath.Dir(path); ; dir = filepath.Dir(dir) {
		st, err := os.Stat(dir)
		if err != nil {
			return dsec.E(dsec.Internal, "look at directory", dir, err)
		}
		if st.Mode().Perm()&0o001 == 0 {
			return dsec.Errorf(dsec.Invalid, "look at directory", dir,
				"mode %v keeps the gateway, which is not root, from %s: chmod o+x it, or choose another --data", st.Mode().Perm(), path)
		}
		if dir == filepath.Dir(dir) {
			return nil
		}
	}
}

// children of a machine, in boot order.
func (s *settings) children(gid int) (children []supervise.Child, closeFiles func(), err error) {
	var files []*os.File
	closeFiles = func() {
		for _, f := range files {
			f.Close()
		}
	}
	defer func() {
		if err != nil {
			closeFiles()
		}
	}()
	natsPort, err := freePort()
	if err != nil {
		return nil, nil, err
	}
	order, err := s.orders(natsPort)
	if err != nil {
		return nil, nil, err
	}
	files = append(files, order)
	socket, err := s.socketFile(gid)
	if err != nil {
		return nil, nil, err
	}
	files = append(files, socket)
	loaderSocket, err := s.loaderListen()
	if err != nil {
		return nil, nil, err
	}
	files = append(files, loaderSocket)
	egressSocket, err := listenOwn("unix", s.egressSocket())
	if err != nil {
		return nil, nil, err
	}
	files = append(files, egressSocket)
	packagesSocket, err := listenOwn("unix", s.packagesSocket())
	if err != nil {
		return nil, nil, err
	}
	files = append(files, packagesSocket)
	return []supervise.Child{
		{Name: "gateway", Argv: []string{self, "gateway"}, Files: []*os.File{order, socket}, UID: s.Gateway.UID, GID: s.Gateway.UID,
			Ready: readyWithin, Grace: gatewayEnds},
		s.loaderChild(order, loaderSocket),
		s.egressChild(egressSocket),
		s.packagesChild(order, packagesSocket),
		{Name: "node", Argv: []string{self, "node"}, Env: s.credentials, Files: []*os.File{order}, Ready: readyWithin, Grace: nodeEnds},
	}, closeFiles, nil
}

// socketFile listens for local callers and hands the socket to the gateway,
// whose uid may not make files in the run directory.
func (s *settings) socketFile(gid int) (*os.File, error) {
	l, err := gateway.ListenUnix(s.socket(), gid)
	if err != nil {
		return nil, err
	}
	defer l.Close()
	u := l.(*net.UnixListener)
	u.SetUnlinkOnClose(false)
	f, err := u.File()
	if err != nil {
		return nil, dsec.E(dsec.Internal, "listen", s.socket(), err)
	}
	return f, nil
}

// freePort finds a loopback port for NATS; both children use it for the life
// of this supervisor.
func freePort() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", dsec.E(dsec.Unavailable, "find a port", "127.0.0.1", err)
	}
	defer l.Close()
	return strconv.Itoa(l.Addr().(*net.TCPAddr).Port), nil
}

// groupID of a name; -1 if there is no such group.
func groupID(name string) int {
	g, err := user.LookupGroup(name)
	if err != nil {
		return -1
	}
	gid, err := strconv.Atoi(g.Gid)
	if err != nil {
		return -1
	}
	return gid
}

// tellSystemd that the service is up, if it asked.
func tellSystemd() {
	path := os.Getenv("NOTIFY_SOCKET")
	if path == "" {
		return
	}
	c, err := net.Dial("unixgram", path)
	if err != nil {
		slog.Error("notify systemd", "err", err)
		return
	}
	defer c.Close()
	if _, err := fmt.Fprint(c, "READY=1"); err != nil {
		slog.Error("notify systemd", "err", err)
	}
}
