package daemon

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"runtime"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/supervise"
	"github.com/opendsec/dsec/netpolicy/egress"
)

// egressSocketFD is where the agent connects to egress.
const egressSocketFD = supervise.FirstFD

// insideRouter says to the verb that it is where sandboxes connect to.
const insideRouter = "inside"

// Egress is the hidden verb of the process that looks at names in TLS and HTTP. It begins
// with the one capability to enter the router's network namespace, which the agent
// gives it, and starts itself again in there with none.
func Egress() *cobra.Command {
	return &cobra.Command{
		Use: "egress", Short: "Look at the names that sandboxes ask for (started by up)", Hidden: true, Args: cobra.MaximumNArgs(1),
		Example: "  dsec up   # starts it",
		RunE: func(c *cobra.Command, args []string) error {
			ctx, stop := signal.NotifyContext(c.Context(), syscall.SIGTERM)
			defer stop()
			ctx, ready := supervise.Join(ctx)
			log := roleLog("egress")
			slog.SetDefault(log)
			// The descriptor stays for this program's next start.
			l, err := net.FileListener(os.NewFile(egressSocketFD, "egress.sock"))
			if err != nil {
				return dsec.E(dsec.Internal, "listen", "egress.sock", err)
			}
			if len(args) == 1 && args[0] == insideRouter {
				return serveEgress(ctx, l.(*net.UnixListener), log)
			}
			if err := ready(); err != nil {
				return err
			}
			return enterRouter(ctx, l.(*net.UnixListener), log)
		},
	}
}

// egressChild is egress as a process of its own.
func (s *settings) egressChild(socket *os.File) supervise.Child {
	return supervise.Child{Name: "egress", Argv: []string{self, "egress"}, Files: []*os.File{socket}, UID: s.Node.EgressUID, GID: s.Node.EgressUID,
		Caps: []uintptr{unix.CAP_SYS_ADMIN}, Ready: readyWithin, Grace: gatewayEnds}
}

// enterRouter waits for an agent, and becomes a process in its router. The agent
// finds its connection closed, and comes again.
func enterRouter(ctx context.Context, l *net.UnixListener, log *slog.Logger) error {
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()
	for {
		c, err := l.AcceptUnix()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return dsec.E(dsec.Internal, "wait for the agent", "", err)
		}
		router, _, err := egress.Greeted(c)
		if err != nil {
			log.Warn("greeting of an agent not understood", "err", err)
			_ = c.Close()
			continue
		}
		return becomeInside(router)
	}
}

// becomeInside does not return but with an error.
func becomeInside(router *os.File) error {
	const op = "enter the router"
	runtime.LockOSThread() // whose namespace and rights the new program has
	if err := unix.Setns(int(router.Fd()), unix.CLONE_NEWNET); err != nil {
		return dsec.E(dsec.Internal, op, "", err)
	}
	nothing, err := unix.Open(os.DevNull, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return dsec.E(dsec.Internal, op, os.DevNull, err)
	}
	header, none := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, [2]unix.CapUserData{}
	err = errors.Join(
		unix.Dup3(nothing, supervise.ReadyFD, 0), // it was told
		unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0),
		unix.Capset(&header, &none[0]),
		unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
	if err == nil {
		err = unix.Exec(self, []string{"dsec", "egress", insideRouter}, os.Environ())
	}
	return dsec.E(dsec.Internal, op, "", err)
}

// serveEgress ends when another process is to take its place.
func serveEgress(ctx context.Context, l *net.UnixListener, log *slog.Logger) error {
	s := egress.New(egress.Config{Log: log})
	over := make(chan error, 1)
	go func() { over <- s.Run(l) }()
	var err error
	select {
	case err = <-over:
	case <-ctx.Done():
	}
	return errors.Join(err, s.Close())
}

// openEgress has names looked at, whoever does it now or later.
func (m *machine) openEgress(ctx context.Context, s *settings, log *slog.Logger) error {
	router, err := m.network.Router()
	if err != nil {
		return err
	}
	defer func() { _ = router.Close() }()
	if m.egress, err = egress.Open(ctx, egress.Agent{Socket: s.egressSocket(), Router: router, Listen: m.network.NamesAt(), Conns: s.Node.OpenConns, Log: log, Refused: m.refused}); err != nil {
		return err
	}
	return m.network.LookAt(m.egress)
}
