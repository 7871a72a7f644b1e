// Package cluster is the truth about nodes, on NATS: who is registered, who is
// alive, how to reach them, and where a new sandbox goes. On one machine the
// NATS server is inside this process (StartServer); with more it is an
// external JetStream cluster, and nothing else changes.
//
// What it may be relied on for: a node that stops its heartbeats is dead after
// Config.DeadAfter, control calls in flight to it then end with Unavailable,
// and no call is without a deadline. What not: the index of sandboxes is a
// projection of what the nodes say, at most a few seconds old; the nodes'
// ledgers are the truth, and List asks them.
//
// Control calls are NATS requests; what is large, long or a stream takes the
// node's data connection, HTTP on the address and with the token the node
// registered.
package cluster

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/api/wire"
)

// Config of a gateway's view of the cluster.
type Config struct {
	Server    *Server       // embedded; nil: URL
	URL       string        // of an external cluster
	User      string        // for URL; Server knows its own
	Password  string        // for URL
	Creds     string        // file, for URL, instead of user and password
	Replicas  int           // of durable buckets; 0 is 1
	DeadAfter time.Duration // without a heartbeat; 0 is 5 s
	Log       *slog.Logger
}

// heartbeatTTL bounds what a gateway that starts finds of dead nodes.
const (
	heartbeatTTL = 5 * time.Second
	openWithin   = 15 * time.Second
)

// Cluster is a gateway's connection to the nodes. Methods may be called
// concurrently.
type Cluster struct {
	cfg   Config
	log   *slog.Logger
	nc    *nats.Conn
	hb    jetstream.KeyValue
	nodes jetstream.KeyValue
	conf  jetstream.KeyValue

	ctx    context.Context // ends with Close
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup

	reg   registry
	index index
	place placement
}

// Open connects, makes the buckets that are missing and follows the nodes.
func Open(ctx context.Context, cfg Config) (*Cluster, error) {
	if cfg.DeadAfter == 0 {
		cfg.DeadAfter = heartbeatTTL
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	ctx, stop := context.WithTimeout(ctx, openWithin)
	defer stop()
	c := &Cluster{cfg: cfg, log: cfg.Log}
	c.reg.nodes = map[dsec.NodeID]*member{}
	c.index.byNode = map[dsec.NodeID]map[string]entry{}
	c.place.init(rand.Uint64())
	c.ctx, c.cancel = context.WithCancelCause(context.Background())
	if err := c.connect(ctx); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

func (c *Cluster) connect(ctx context.Context) error {
	opts := []nats.Option{nats.Name("dsec gateway"), nats.MaxReconnects(-1), nats.ReconnectWait(250 * time.Millisecond)}
	url := c.cfg.URL
	switch s := c.cfg.Server; {
	case s != nil:
		url = ""
		opts = append(opts, nats.InProcessServer(s.ns), nats.UserInfo(gatewayUser, derive(s.secret, gatewayUser)))
	case c.cfg.Creds != "":
		opts = append(opts, nats.UserCredentials(c.cfg.Creds))
	case c.cfg.User != "":
		opts = append(opts, nats.UserInfo(c.cfg.User, c.cfg.Password))
	}
	var err error
	if c.nc, err = nats.Connect(url, opts...); err != nil {
		return dsec.E(dsec.Unavailable, "connect to nats", c.cfg.URL, err)
	}
	js, err := jetstream.New(c.nc)
	if err != nil {
		return dsec.E(dsec.Internal, "open jetstream", "", err)
	}
	replicas := max(c.cfg.Replicas, 1)
	for _, b := range []struct {
		kv  *jetstream.KeyValue
		cfg jetstream.KeyValueConfig
	}{
		{&c.hb, jetstream.KeyValueConfig{Bucket: wire.BucketHeartbeats, Storage: jetstream.MemoryStorage, TTL: heartbeatTTL}},
		{&c.nodes, jetstream.KeyValueConfig{Bucket: wire.BucketNodes, Replicas: replicas}},
		{&c.conf, jetstream.KeyValueConfig{Bucket: wire.BucketConfig, Replicas: replicas}},
	} {
		if *b.kv, err = js.CreateOrUpdateKeyValue(ctx, b.cfg); err != nil {
			return dsec.E(dsec.Unavailable, "make bucket", b.cfg.Bucket, err)
		}
	}
	return c.follow()
}

// Close ends every call in flight.
func (c *Cluster) Close() error {
	c.cancel(errClosed)
	c.wg.Wait()
	if c.nc != nil {
		c.nc.Close()
	}
	c.reg.closeAll()
	return nil
}

func sprintf(format string, a []any) string { return fmt.Sprintf(format, a...) }
