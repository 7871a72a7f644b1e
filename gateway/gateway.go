// Package gateway is the front door: it knows who a caller is, whether it may,
// and how much; everything else it hands to the cluster. It keeps no table of
// sandboxes, because an id names its node, and can be restarted at any time:
// streams break with an error then, and clients go on from their offsets.
//
// It serves the Connect services of api/dsec/v1, the raw endpoints for bytes,
// ports and tunnels (docs/formats/api.md), /healthz, /readyz and /metrics. A
// caller on the unix socket is known by its uid, everyone may show an API key.
// Nothing is routed by the Host header, and one that names another machine is
// refused.
package gateway

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
	"github.com/opendsec/dsec/iam"
	"github.com/opendsec/dsec/internal/crew"
)

// Cluster is what the gateway needs of the nodes; package cluster has it.
// project "" acts for every project.
type Cluster interface {
	// Create places a sandbox and has it made.
	Create(ctx context.Context, project string, spec *dsecv1.Spec) (*dsecv1.Sandbox, error)
	// CallFunction has some node make a stateless call.
	CallFunction(ctx context.Context, project string, req *dsecv1.CallRequest, resp *dsecv1.CallResponse) error
	// Call does one control call on a node; resp may be nil.
	Call(ctx context.Context, node dsec.NodeID, verb, project string, req, resp proto.Message) error
	// Stream opens a stream of frames from a node.
	Stream(ctx context.Context, node dsec.NodeID, path, project string, m proto.Message) (*wire.FrameReader, io.Closer, error)
	// Do sends a request over a node's data connection; errors of the node are errors.
	Do(ctx context.Context, node dsec.NodeID, r wire.Request) (*http.Response, error)
	// Tunnel opens a byte stream to a port of a sandbox.
	Tunnel(ctx context.Context, project, sandbox string, port uint16) (net.Conn, error)
	// List asks all nodes, and names those that did not answer.
	List(ctx context.Context, project string, q *dsecv1.NodeList) (list []*dsecv1.Sandbox, unreachable []string)
	Nodes() []*dsecv1.Node
	// Live counts the live sandboxes of a project.
	Live(project string) int
	// Saw takes in what an answer said about a sandbox.
	Saw(s *dsecv1.Sandbox)
}

// Config of a Gateway. Log, Access and Hosts may be nil.
type Config struct {
	Cluster Cluster
	Keys    *iam.Keys
	Local   iam.Local // who is known on the unix socket
	Hosts   []string  // names of this machine accepted in Host, beside loopback
	MaxLive int       // sandboxes of a project; 0: no limit
	// MaxInFlight requests at once, streams among them; 0: no limit. The health
	// endpoints are always answered.
	MaxInFlight int
	Version     string
	Log         *slog.Logger
	Access      *slog.Logger // one line for each request, without secrets; nil: none
}

// Sizes and times that bound what a caller can make the gateway hold.
const (
	maxMessage    = 4 << 20  // of a request message
	maxBatch      = 32 << 20 // of a CreateMany
	maxHeader     = 64 << 10
	headerWithin  = 10 * time.Second
	idleTimeout   = 2 * time.Minute
	stall         = 60 * time.Second // a client that takes or gives nothing for so long is gone
	closeWithin   = 5 * time.Second
	maxSessions   = 4096
	createWithin  = 5 * time.Minute
	commitWithin  = 30 * time.Minute
	phaseWithin   = 10 * time.Minute
	aliveEvery    = 10 * time.Second
	nodeSilence   = 3 * aliveEvery // a node's stream without a sign of life is dead
	batchAtOnce   = 64             // creates of one CreateMany at work
	maxBatchItems = dsec.MaxBatch
	maxSpelled    = 64 << 20 // of the specs of a CreateMany, each by itself
)

var errClosed = dsec.Errorf(dsec.Unavailable, "serve", "", "gateway is closing")

// Gateway serves until Close.
type Gateway struct {
	cfg     Config
	log     *slog.Logger
	http    *http.Server
	metrics *metrics
	quota   quota
	calls   callQuota
	atWork  atomic.Int64 // requests
	streams sessions
	ports   *http.Transport

	ctx     context.Context
	cancel  context.CancelCauseFunc
	tunnels crew.Crew // Shutdown does not wait for hijacked connections
}

// New makes a gateway; Serve gives it listeners.
func New(cfg Config) *Gateway {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	g := &Gateway{cfg: cfg, log: cfg.Log}
	g.ctx, g.cancel = context.WithCancelCause(context.Background())
	g.metrics = newMetrics(cfg.Cluster)
	g.quota.reserved = map[string]int{}
	g.streams.open = map[string]*session{}
	g.ports = g.portTransport()
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true)
	protocols.SetUnencryptedHTTP2(true)
	g.http = &http.Server{
		Handler: g.handler(), ConnContext: withPeer, Protocols: protocols,
		ReadHeaderTimeout: headerWithin, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeader,
		BaseContext: func(net.Listener) context.Context { return g.ctx },
		ErrorLog:    slog.NewLogLogger(g.log.Handler(), slog.LevelDebug),
	}
	return g
}

// Serve accepts on a listener until Close; it may be called for several.
func (g *Gateway) Serve(l net.Listener) error {
	err := g.http.Serve(l)
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return dsec.E(dsec.Internal, "serve", l.Addr().String(), err)
}

// Close ends the streams with an error, lets short calls finish, and waits.
func (g *Gateway) Close() error {
	g.tunnels.Close()
	g.cancel(errClosed)
	ctx, stop := context.WithTimeout(context.Background(), closeWithin)
	defer stop()
	err := g.http.Shutdown(ctx)
	if err != nil {
		err = g.http.Close()
	}
	g.tunnels.Wait()
	g.ports.CloseIdleConnections()
	return err
}
