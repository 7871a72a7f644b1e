// Command testserver is a gateway, a cluster of one and a node over the fake
// tier in one process, for the tests of libdsec. It prints one line of JSON
// with where it listens, and ends when its stdin does.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/audit"
	"github.com/opendsec/dsec/audit/detect"
	"github.com/opendsec/dsec/cluster"
	"github.com/opendsec/dsec/gateway"
	"github.com/opendsec/dsec/iam"
	"github.com/opendsec/dsec/internal/lifecycle"
	"github.com/opendsec/dsec/node"
	"github.com/opendsec/dsec/node/nodeapi"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/runtimetest"
)

const (
	nodeName = "nodea"
	secret   = "a secret of at least sixteen bytes"
)

// ready is the line that is printed.
type ready struct {
	Socket string `json:"socket"`
	URL    string `json:"url"`
	Key    string `json:"api_key"`
	Image  string `json:"image"`
	Kind   string `json:"kind"` // of the sandboxes: fake, container
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "testserver:", err)
		os.Exit(1)
	}
}

func run() (err error) {
	dir, err := os.MkdirTemp("", "dsec-ts-") // short: a socket path has 108 bytes
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	s := &server{dir: dir, log: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))}
	stack, err := lifecycle.Open(context.Background(), "testserver", s.steps()...)
	if err != nil {
		return err
	}
	if err := s.waitForNode(); err != nil {
		return err
	}
	line, err := json.Marshal(s.ready)
	if err != nil {
		return err
	}
	fmt.Println(string(line))
	_, _ = io.Copy(io.Discard, os.Stdin)
	return stack.Close(context.Background())
}

type server struct {
	dir     string
	log     *slog.Logger
	nats    *cluster.Server
	cluster *cluster.Cluster
	node    *node.Node
	api     *nodeapi.Server
	front   *gateway.Gateway
	ready   ready
}

func (s *server) waitForNode() error {
	for begun := time.Now(); time.Since(begun) < 15*time.Second; time.Sleep(5 * time.Millisecond) {
		if n := s.cluster.Nodes(); len(n) == 1 && n[0].Alive && n[0].Epoch > 0 {
			return nil
		}
	}
	return dsec.Errorf(dsec.Unavailable, "start", "node", "is not alive after 15 s")
}

func (s *server) steps() []lifecycle.Step {
	return []lifecycle.Step{
		{Name: "nats", Do: func(context.Context) (err error) {
			s.nats, err = cluster.StartServer(cluster.ServerConfig{Dir: filepath.Join(s.dir, "js"), Listen: "127.0.0.1:0", Secret: secret, Log: s.log})
			return err
		}, Undo: func(context.Context) error { return s.nats.Close() }},
		{Name: "cluster", Do: func(ctx context.Context) (err error) {
			s.cluster, err = cluster.Open(ctx, cluster.Config{Server: s.nats, Log: s.log})
			return err
		}, Undo: func(context.Context) error { return s.cluster.Close() }},
		{Name: "node", Do: func(context.Context) (err error) {
			evidence, err := audit.Open(audit.Config{Dir: filepath.Join(s.dir, "audit"), Log: s.log})
			if err != nil {
				return err
			}
			s.node, err = node.New(node.Config{ID: nodeName, Dir: filepath.Join(s.dir, "node"),
				Runtimes: map[dsec.Tier]runtime.Runtime{dsec.TierContainer: runtimetest.NewFake()}, Store: runtimetest.NewStore(),
				Budgets: node.Budgets{CPU: 1e6, Memory: 1 << 50, Disk: 1 << 50}, Audit: evidence, Judge: detect.Judge{}, Log: s.log})
			return err
		}, Undo: func(context.Context) error { return s.node.Close() }},
		{Name: "node api", Do: func(context.Context) error {
			path := filepath.Join(s.dir, "node.sock")
			l, err := nodeapi.ListenUnix(path, -1)
			if err != nil {
				return err
			}
			s.api, err = nodeapi.Open(nodeapi.Config{Node: nodeName, Service: s.node, Inside: s.node, Watcher: s.node, Auditor: s.node,
				NATS: s.nats.URL(), User: cluster.NodeUser(nodeName), Password: cluster.NodePassword(secret, nodeName),
				Listener: l, Address: "unix:" + path, Version: "test", Every: 100 * time.Millisecond, Log: s.log})
			return err
		}, Undo: func(context.Context) error { return s.api.Close() }},
		{Name: "front", Do: s.openFront, Undo: func(context.Context) error { return s.front.Close() }},
	}
}

func (s *server) openFront(ctx context.Context) error {
	keys, err := iam.NewKeys(ctx, s.cluster.Config("keys"))
	if err != nil {
		return err
	}
	_, key, err := keys.Create(ctx, iam.Request{Role: iam.Admin, Project: "default"})
	if err != nil {
		return err
	}
	s.front = gateway.New(gateway.Config{Cluster: s.cluster, Keys: keys, Local: iam.Local{Group: -1}, Version: "test", Log: s.log})
	socket := filepath.Join(s.dir, "gateway.sock")
	u, err := gateway.ListenUnix(socket, -1)
	if err != nil {
		return err
	}
	tcp, err := gateway.ListenTCP("127.0.0.1:0", "", "")
	if err != nil {
		return err
	}
	go func() { _ = s.front.Serve(u) }()
	go func() { _ = s.front.Serve(tcp) }()
	s.ready = ready{Socket: socket, URL: "http://" + tcp.Addr().String(), Key: key, Image: "base:1", Kind: "fake"}
	return nil
}
