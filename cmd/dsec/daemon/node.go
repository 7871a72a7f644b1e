package daemon

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/audit/detect"
	"github.com/opendsec/dsec/blob/stack"
	"github.com/opendsec/dsec/cluster"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/image/worker"
	"github.com/opendsec/dsec/internal/config"
	"github.com/opendsec/dsec/internal/lifecycle"
	"github.com/opendsec/dsec/internal/version"
	"github.com/opendsec/dsec/layer/store"
	"github.com/opendsec/dsec/netpolicy"
	"github.com/opendsec/dsec/netpolicy/egress"
	"github.com/opendsec/dsec/node"
	"github.com/opendsec/dsec/node/nodeapi"
	"github.com/opendsec/dsec/runtime"
)

// Node is the hidden verb of the agent.
func Node() *cobra.Command {
	return role{name: "node", short: "Run the agent of this machine", open: openNode}.verb()
}

// agent is everything of a node but its connection to the gateway.
type agent struct {
	machine
	id     dsec.NodeID
	store  *store.Store
	layers *layers
	blobs  *stack.Store
	node   *node.Node

	opened  chan struct{} // closed when store and node are
	begun   time.Time     // that was; set before
	closing chan struct{} // closed before they are closed
	shorts  chan bool     // the loader found no room; true: the disk is full

	counts *prometheus.Registry
}

func (a *agent) open(ctx context.Context, s *settings, log *slog.Logger) (*lifecycle.Stack, error) {
	var err error
	if a.id, err = s.nodeID(); err != nil {
		return nil, err
	}
	// First, because the hold must not inherit the credentials.
	a.onDemand, a.opened, a.closing, a.shorts = true, make(chan struct{}), make(chan struct{}), make(chan bool, 1)
	a.whole, a.failed, a.ended, a.short = a.promote, a.noteFailure, a.noteEnd, a.noteShort
	a.order, a.read = a.ahead, a.record
	a.refused = func(r egress.Refusal) {
		select {
		case <-a.opened:
			a.node.NetworkRefused(r.Sandbox, r.String(), "", r.Generation, r.Refused)
		default: // it is counted
		}
	}
	a.unnamed = func(id dsec.SandboxID, name string, generation uint64, questions int64) {
		select {
		case <-a.opened:
			a.node.NetworkRefused(id, "dns "+strings.TrimSuffix(name, "."), "", generation, questions)
		default:
		}
	}
	steps := append([]lifecycle.Step{a.openBlobs(s, log)}, a.steps(s, log)...)
	steps = append(steps,
		lifecycle.Step{Name: "layers", Do: func(context.Context) (err error) {
			w := worker.New(worker.Options{Exe: self, Cgroups: a.groups, Log: log})
			if a.store, err = store.Open(s.layerDir(), store.Options{Convert: w.Convert, Grace: layerGrace, Blobs: a.blobs, OnDemand: s.Node.OnDemand != "off", Log: log, Name: string(a.id),
				References: &store.EnsureOptions{Image: imageOptions(s), MaxAge: time.Duration(s.Node.ImageAge) * time.Hour}}); err != nil {
				return err
			}
			a.layers = &layers{store: a.store, spool: s.layerDir(), options: imageOptions(s), demand: demand{a.loader, a.mounts}}
			return nil
		}, Undo: func(context.Context) error { return a.store.Close() }},
		lifecycle.Step{Name: "node", Do: func(context.Context) (err error) {
			c, err := a.config(s, log)
			if err != nil {
				return err
			}
			a.node, err = node.New(c)
			return err
		}, Undo: func(context.Context) error { return a.node.Close() }},
		a.tellRefusals(),
		a.evidence.start(),
		lifecycle.Step{Name: "listen", Do: func(ctx context.Context) error {
			a.blameLost(ctx)
			a.begun = time.Now()
			close(a.opened)
			return nil
		}, Undo: func(context.Context) error { close(a.closing); return nil }},
	)
	return lifecycle.Open(ctx, "agent", steps...)
}

// tellRefusals makes events of what policies of networks refuse.
func (a *agent) tellRefusals() lifecycle.Step {
	stop := func() {}
	return lifecycle.Step{Name: "refusals", Do: func(context.Context) (err error) {
		if a.network == nil {
			return nil
		}
		stop, err = a.network.Refusals(func(id dsec.SandboxID, r netpolicy.Refusal, refused int64) {
			a.node.NetworkRefused(id, r.String(), r.Program, r.Generation, refused)
		})
		return err
	}, Undo: func(context.Context) error { stop(); return nil }}
}

func imageOptions(s *settings) image.Options {
	var o image.Options
	if s.Node.Mirror != "" {
		o.Mirrors = map[string][]string{"*": {s.Node.Mirror}}
	}
	return o
}

func (a *agent) config(s *settings, log *slog.Logger) (node.Config, error) {
	records, err := config.Bytes(s.Node.RecordBytes, 0)
	if err != nil {
		return node.Config{}, dsec.E(dsec.Invalid, "read size", "node.record_bytes", err)
	}
	metrics := node.NewMetrics()
	a.counts = prometheus.NewRegistry()
	if err := metrics.Register(a.counts); err != nil {
		return node.Config{}, err
	}
	if err := a.evidence.register(a.counts); err != nil {
		return node.Config{}, err
	}
	if err := a.registerCounts(); err != nil {
		return node.Config{}, err
	}
	return node.Config{ID: a.id, Metrics: metrics, Dir: s.nodeDir(), Runtimes: a.runtimes(),
		Isolated: map[dsec.Isolation]runtime.Runtime{dsec.IsolationGVisor: a.gvisor}, Store: a.store,
		Functions: a.functions(s.emptyDir(), log), Add: a.store.Add, Checkpoints: a.store, Audit: a.evidence.store, Judge: detect.Judge{}, MountRoots: s.Node.MountRoots,
		Budgets: node.Budgets{MaxLive: s.Node.MaxLive, CPUFactor: s.Node.CPUOvercommit, MemoryFactor: s.Node.MemOvercommit},
		Records: node.Retention{Age: time.Duration(s.Node.KeepRecords) * 24 * time.Hour, Bytes: records}, Log: log}, nil
}

func openNode(ctx context.Context, o orders, log *slog.Logger) (*serving, error) {
	s := &settings{Config: o.Config}
	var a agent
	stack, err := a.open(ctx, s, log)
	if err != nil {
		return nil, err
	}
	server, err := a.serve(s, o, log)
	if err != nil {
		return nil, errors.Join(err, stack.Close(context.WithoutCancel(ctx)))
	}
	stop := collecting(a.store, collectEvery, log)
	stopTrimming := a.trimming(s, log)
	stopGVisor := collectGVisor(a.gvisor, collectEvery, log)
	stopKeeping := keeping(a.store.Renew, store.RenewEvery, log)
	return &serving{
		ended: a.hold.Done(), why: dsec.Errorf(dsec.Unavailable, "serve node", string(a.id), "the hold has ended"),
		close: func(ctx context.Context) error {
			stop()
			stopTrimming()
			stopGVisor()
			stopKeeping()
			return errors.Join(server.Close(), stack.Close(ctx))
		},
	}, nil
}

// examine adds the object storage, with the connections that layers use.
func (a *agent) examine(ctx context.Context, s *settings) []runtime.Report {
	all := a.machine.examine(ctx, s)
	all[0].Checks = append(all[0].Checks, blobCheck(ctx, s, a.blobs), a.demandCheck(ctx, s))
	return all
}

// serve connects the agent to the gateway.
func (a *agent) serve(s *settings, o orders, log *slog.Logger) (*nodeapi.Server, error) {
	l, err := nodeapi.ListenUnix(s.dataSocket(), s.Gateway.UID)
	if err != nil {
		return nil, err
	}
	return nodeapi.Open(nodeapi.Config{Node: a.id, Service: a.node, Inside: a.node, Watcher: a.node, Auditor: a.node, Layers: a.layers, Caller: a.node,
		Doctor:  func(ctx context.Context) []runtime.Report { return a.examine(ctx, s) },
		Metrics: promhttp.HandlerFor(a.counts, promhttp.HandlerOpts{}),
		NATS:    "nats://" + net.JoinHostPort("127.0.0.1", o.NATS), User: cluster.NodeUser(a.id), Password: cluster.NodePassword(o.Secret, a.id),
		PortConns: s.Node.PortConns, Listener: l, Address: "unix:" + s.dataSocket(), Version: version.Version, Log: log})
}
