package daemon

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/cluster"
	"github.com/opendsec/dsec/gateway"
	"github.com/opendsec/dsec/iam"
	"github.com/opendsec/dsec/internal/lifecycle"
	"github.com/opendsec/dsec/internal/supervise"
	"github.com/opendsec/dsec/internal/version"
)

// keysPrefix is where the API keys are in the cluster's configuration.
const keysPrefix = "key"

// gatewaySocketFD is the socket of local callers.
const gatewaySocketFD = supervise.FirstFD + 1

// Gateway is the hidden verb of the front door.
func Gateway() *cobra.Command {
	return role{name: "gateway", short: "Serve the API", open: openGateway}.verb()
}

func openGateway(ctx context.Context, o orders, log *slog.Logger) (*serving, error) {
	s := &settings{Config: o.Config}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return nil, dsec.E(dsec.Internal, "give up new privileges", "", err)
	}
	local, err := net.FileListener(os.NewFile(gatewaySocketFD, "gateway.sock"))
	if err != nil {
		return nil, dsec.E(dsec.Internal, "listen", s.socket(), err)
	}
	listeners := []net.Listener{local}
	var (
		server *cluster.Server
		nodes  *cluster.Cluster
		keys   *iam.Keys
		front  *gateway.Gateway
	)
	stack, err := lifecycle.Open(ctx, "gateway",
		lifecycle.Step{Name: "nats", Do: func(context.Context) (err error) {
			server, err = cluster.StartServer(cluster.ServerConfig{Dir: filepath.Join(s.gatewayDir(), "nats"),
				Listen: net.JoinHostPort("127.0.0.1", o.NATS), Secret: o.Secret, Log: log})
			return err
		}, Undo: func(context.Context) error { return server.Close() }},
		lifecycle.Step{Name: "cluster", Do: func(ctx context.Context) (err error) {
			nodes, err = cluster.Open(ctx, cluster.Config{Server: server, Log: log})
			return err
		}, Undo: func(context.Context) error { return nodes.Close() }},
		lifecycle.Step{Name: "keys", Do: func(ctx context.Context) (err error) {
			keys, err = iam.NewKeys(ctx, nodes.Config(keysPrefix))
			return err
		}},
		lifecycle.Step{Name: "tcp", Do: func(context.Context) error {
			if s.Config.Gateway.Listen == "" {
				return nil
			}
			l, err := gateway.ListenTCP(s.Config.Gateway.Listen, s.Config.Gateway.TLSCert, s.Config.Gateway.TLSKey)
			if err == nil {
				listeners = append(listeners, l)
			}
			return err
		}},
		lifecycle.Step{Name: "front", Do: func(context.Context) error {
			front = gateway.New(gateway.Config{Cluster: nodes, Keys: keys, Local: iam.Local{Group: groupID(s.Config.Gateway.Group)},
				MaxLive: s.Config.Gateway.MaxLive, MaxInFlight: s.Config.Gateway.MaxInFlight, Version: version.Version, Log: log, Access: accessLog(s, log)})
			return nil
		}, Undo: func(context.Context) error { return front.Close() }},
	)
	if err != nil {
		return nil, err
	}
	var fronts errgroup.Group
	for _, l := range listeners {
		fronts.Go(func() error { return front.Serve(l) })
	}
	return &serving{close: func(ctx context.Context) error {
		err := stack.Close(ctx)
		return errors.Join(err, fronts.Wait())
	}}, nil
}

// accessLog is marked, so that it can be told from what the gateway itself says.
func accessLog(s *settings, log *slog.Logger) *slog.Logger {
	if !s.Config.Gateway.AccessLog {
		return nil
	}
	return log.With("log", "access")
}
