package gateway_test

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/cluster"
	"github.com/opendsec/dsec/files"
	"github.com/opendsec/dsec/gateway"
	"github.com/opendsec/dsec/iam"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/node"
	"github.com/opendsec/dsec/node/nodeapi"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/runtimetest"
)

const secret = "a secret of at least sixteen bytes"

// thinNode is a node without ledger or admission, over the fake tier.
type thinNode struct {
	rt *runtimetest.Fake

	mu     sync.Mutex
	boxes  map[dsec.SandboxID]*node.Sandbox
	byKey  map[string]dsec.SandboxID
	events []dsec.Event
	grew   chan struct{} // closed and replaced when events grew
	full   bool          // refuse to create

	web string   // address that port 8000 of every sandbox leads to
	fs  files.FS // of every sandbox, if a test has its own
}

func newThinNode() *thinNode {
	return &thinNode{rt: runtimetest.NewFake(), boxes: map[dsec.SandboxID]*node.Sandbox{}, byKey: map[string]dsec.SandboxID{},
		grew: make(chan struct{})}
}

// moveLocked changes a state and says so.
func (n *thinNode) moveLocked(sb *node.Sandbox, to dsec.State) {
	n.events = append(n.events, dsec.Event{Sandbox: sb.ID, Seq: uint64(len(n.events) + 1), Time: time.Now(),
		Type: dsec.EventState, From: sb.State, To: to})
	sb.State = to
	close(n.grew)
	n.grew = make(chan struct{})
}

func (n *thinNode) Create(ctx context.Context, project string, s dsec.Spec) (node.Sandbox, error) {
	n.mu.Lock()
	if n.full {
		n.mu.Unlock()
		return node.Sandbox{}, dsec.Errorf(dsec.ResourceExhausted, "create sandbox", "", "the node is full")
	}
	if id, ok := n.byKey[project+s.CallID]; ok {
		defer n.mu.Unlock()
		return *n.boxes[id], nil
	}
	id := dsec.NewSandboxID("nodea")
	n.byKey[project+s.CallID] = id
	sb := &node.Sandbox{ID: id, Project: project, Spec: s, State: dsec.Creating, Created: time.Now(), Starts: 1}
	n.boxes[id] = sb
	n.mu.Unlock()
	if s.Image == "missing" {
		return node.Sandbox{}, dsec.Errorf(dsec.NotFound, "acquire layer", string(s.Image), "no such tag")
	}
	steps, err := n.rt.Create(ctx, runtime.Request{ID: id, Spec: s, Layers: layer.Set{Lease: string(id)}})
	if err != nil {
		return node.Sandbox{}, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	sb.Steps = steps
	n.moveLocked(sb, dsec.Running)
	return *sb, nil
}

func (n *thinNode) Get(_ context.Context, id dsec.SandboxID) (node.Sandbox, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if sb := n.boxes[id]; sb != nil {
		return *sb, nil
	}
	return node.Sandbox{}, dsec.Errorf(dsec.NotFound, "find sandbox", string(id), "no such sandbox")
}

func (n *thinNode) List(_ context.Context, f node.Filter) (out []node.Sandbox, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, sb := range n.boxes {
		if (f.Project == "" || f.Project == sb.Project) && (f.All || sb.State.Live()) {
			out = append(out, *sb)
		}
	}
	return out, nil
}

func (n *thinNode) change(id dsec.SandboxID, to dsec.State, fn func() error) (node.Sandbox, error) {
	if err := fn(); err != nil {
		return node.Sandbox{}, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.moveLocked(n.boxes[id], to)
	return *n.boxes[id], nil
}

func (n *thinNode) Start(ctx context.Context, id dsec.SandboxID, _ string) (node.Sandbox, error) {
	return n.change(id, dsec.Running, func() error { _, err := n.rt.Start(ctx, id); return err })
}

func (n *thinNode) Stop(ctx context.Context, id dsec.SandboxID, c dsec.Cause, _ string) (node.Sandbox, error) {
	n.mu.Lock()
	n.boxes[id].Result = dsec.NewResult(c, "stop", dsec.InducedBySelf)
	n.mu.Unlock()
	return n.change(id, dsec.Stopped, func() error { return n.rt.Stop(ctx, id, 0) })
}

func (n *thinNode) Delete(ctx context.Context, id dsec.SandboxID, _ string) (bool, error) {
	n.mu.Lock()
	existed := n.boxes[id].State != dsec.Deleted
	n.mu.Unlock()
	_, err := n.change(id, dsec.Deleted, func() error { return n.rt.Destroy(ctx, id) })
	return existed, err
}

func (n *thinNode) Pause(ctx context.Context, id dsec.SandboxID, _ string) (node.Sandbox, error) {
	return n.change(id, dsec.Paused, func() error { return n.rt.Pause(ctx, id) })
}

func (n *thinNode) Resume(ctx context.Context, id dsec.SandboxID, _ string) (node.Sandbox, error) {
	return n.change(id, dsec.Running, func() error { return n.rt.Resume(ctx, id) })
}

func (n *thinNode) Suspend(_ context.Context, id dsec.SandboxID, _ string) (node.Sandbox, error) {
	return node.Sandbox{}, dsec.Errorf(dsec.Unsupported, "suspend sandbox", string(id), "it has no memory of its own")
}

func (n *thinNode) Fork(_ context.Context, id dsec.SandboxID, count int, _ string) ([]node.Sandbox, error) {
	return nil, dsec.Errorf(dsec.Unsupported, "fork sandbox", string(id), "%d copies of one without memory of its own", count)
}

func (n *thinNode) Checkpoint(_ context.Context, id dsec.SandboxID, keep time.Duration, _ string) (dsec.Checkpoint, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	spec := n.boxes[id].Spec
	spec.Name, spec.CallID, spec.Image = "", "", dsec.LayerRef(checkpointBase)
	return dsec.Checkpoint{Digest: checkpointDigest, Sandbox: id, Spec: spec, Disk: 2, Memory: 1, Until: time.Unix(int64(keep/time.Second), 0).UTC()}, nil
}

func (n *thinNode) FindCheckpoint(_ context.Context, project, digest string) (dsec.Checkpoint, error) {
	if project != checkpointProject || digest != checkpointDigest {
		return dsec.Checkpoint{}, dsec.Errorf(dsec.NotFound, "find checkpoint", digest, "there is none")
	}
	return dsec.Checkpoint{Digest: digest, Spec: dsec.Spec{Tier: dsec.TierContainer, Image: dsec.LayerRef(checkpointBase),
		Network: dsec.NetworkNone, User: "1000", Limits: dsec.Limits{CPU: 2, Memory: 64 << 20}}}, nil
}

func (n *thinNode) Renew(ctx context.Context, id dsec.SandboxID, _ time.Duration, _ string) (node.Sandbox, error) {
	return n.Get(ctx, id)
}

func (n *thinNode) Egress(context.Context, dsec.SandboxID) (dsec.Egress, error) {
	return dsec.Egress{}, nil
}

func (n *thinNode) SetNetwork(_ context.Context, id dsec.SandboxID, p dsec.NetworkPolicy, _ string) (node.Sandbox, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.boxes[id].Network = &dsec.NetworkState{NetworkPolicy: p, Generation: 2}
	return *n.boxes[id], nil
}

func (n *thinNode) SetPhase(_ context.Context, id dsec.SandboxID, name, _ string) (node.Sandbox, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.boxes[id].Phase = &dsec.PhaseState{Name: name, Generation: 2}
	return *n.boxes[id], nil
}

func (n *thinNode) Commit(context.Context, dsec.SandboxID, layer.Tag, dsec.Scrub, string) (dsec.Packed, error) {
	return dsec.Packed{Digest: "sha256:0"}, nil
}

func (n *thinNode) Grade(_ context.Context, id dsec.SandboxID, s dsec.GradeSpec, _ string) (dsec.GradeResult, error) {
	reward := 0.5
	return dsec.GradeResult{Reward: &reward, Cause: dsec.CauseCompleted, Where: s.Where, Sandbox: id}, nil
}

func (n *thinNode) Changes(ctx context.Context, id dsec.SandboxID, most int) (dsec.Changes, error) {
	return n.rt.Changes(ctx, id, most)
}

func (n *thinNode) Exec(ctx context.Context, id dsec.SandboxID, s process.Spec) (process.Process, error) {
	return n.rt.Exec(ctx, id, s)
}

func (n *thinNode) Process(ctx context.Context, id dsec.SandboxID, exec string) (process.Process, error) {
	return n.rt.Process(ctx, id, exec)
}

func (n *thinNode) Files(ctx context.Context, id dsec.SandboxID, user string) (files.FS, error) {
	if n.fs != nil {
		return n.fs, nil
	}
	return n.rt.Files(ctx, id, user)
}

func (n *thinNode) Dial(ctx context.Context, id dsec.SandboxID, port uint16) (net.Conn, error) {
	if port == 8000 && n.web != "" {
		return (&net.Dialer{}).DialContext(ctx, "tcp", n.web)
	}
	return n.rt.Dial(ctx, id, port)
}

func (n *thinNode) Stats(ctx context.Context, id dsec.SandboxID) (runtime.Stats, error) {
	return n.rt.Stats(ctx, id)
}

func (n *thinNode) Attach(dsec.SandboxID) func() { return func() {} }

func (n *thinNode) Events(ctx context.Context, f node.Filter, since time.Time, fn func(dsec.Event) error, live func() error) error {
	for at := 0; ; {
		n.mu.Lock()
		news, grew := n.events[at:], n.grew
		at = len(n.events)
		n.mu.Unlock()
		for _, e := range news {
			sb, _ := n.Get(ctx, e.Sandbox)
			if !e.Time.After(since) || f.Project != "" && f.Project != sb.Project {
				continue
			}
			if err := fn(e); err != nil {
				return err
			}
		}
		if live != nil {
			if err := live(); err != nil {
				return err
			}
			live = nil
		}
		select {
		case <-grew:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (n *thinNode) Load() node.Load {
	n.mu.Lock()
	defer n.mu.Unlock()
	live := 0
	for _, sb := range n.boxes {
		if sb.State.Live() {
			live++
		}
	}
	return node.Load{Live: live, MaxLive: 10_000, Tiers: []dsec.Tier{dsec.TierContainer}}
}

// env is a cluster of one in this process.
type env struct {
	t       testing.TB
	dir     string
	node    *thinNode
	service served // what the agent serves: node, unless a test has its own
	layers  nodeapi.Layers
	conns   int // most to ports of one sandbox; 0: the default
	nats    *cluster.Server
	cluster *cluster.Cluster
	api     *nodeapi.Server
	keys    *iam.Keys
	gw      *gateway.Gateway
	socket  string
	tcp     string // host:port
}

// served is all a node offers.
type served interface {
	node.Service
	node.Inside
	node.Watcher
}

type option func(*gateway.Config)

func start(t *testing.T, opts ...option) *env {
	t.Helper()
	n := newThinNode()
	t.Cleanup(func() { _ = n.rt.Close() })
	e := &env{t: t, node: n, service: n}
	return e.start(opts...)
}

func (e *env) start(opts ...option) *env {
	t := e.t
	t.Helper()
	dir, err := os.MkdirTemp("", "dsec-gw-") // short: a socket path has 108 bytes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	e.dir = dir
	e.nats, err = cluster.StartServer(cluster.ServerConfig{Dir: filepath.Join(dir, "js"), Listen: "127.0.0.1:0", Secret: secret, Log: quiet})
	must(t, err)
	t.Cleanup(func() { _ = e.nats.Close() })
	e.cluster, err = cluster.Open(t.Context(), cluster.Config{Server: e.nats, DeadAfter: 5 * time.Second, Log: quiet})
	must(t, err)
	t.Cleanup(func() { _ = e.cluster.Close() })
	e.startNode()
	t.Cleanup(func() { _ = e.api.Close() })
	e.keys, err = iam.NewKeys(t.Context(), e.cluster.Config("keys"))
	must(t, err)
	cfg := gateway.Config{Cluster: e.cluster, Keys: e.keys, Local: iam.Local{Group: -1}, Version: "test", Log: quiet}
	for _, o := range opts {
		o(&cfg)
	}
	e.gw = gateway.New(cfg)
	e.serve()
	t.Cleanup(func() { _ = e.gw.Close() })
	eventually(t, "the node is alive", func() bool {
		n := e.cluster.Nodes()
		return len(n) == 1 && n[0].Alive && n[0].Epoch > 0
	})
	return e
}

func (e *env) startNode() {
	e.t.Helper()
	path := filepath.Join(e.dir, "node.sock")
	l, err := nodeapi.ListenUnix(path, -1)
	must(e.t, err)
	e.api, err = nodeapi.Open(nodeapi.Config{Node: "nodea", Service: e.service, Inside: e.service, Watcher: e.service,
		Layers: e.layers, PortConns: e.conns, Doctor: func(context.Context) []runtime.Report {
			return []runtime.Report{runtimetest.NewFake().Probe(e.t.Context())}
		},
		NATS: e.nats.URL(), User: cluster.NodeUser("nodea"), Password: cluster.NodePassword(secret, "nodea"),
		Listener: l, Address: "unix:" + path, Version: "test", Every: 100 * time.Millisecond, Log: quiet})
	must(e.t, err)
}

func (e *env) serve() {
	e.t.Helper()
	e.socket = filepath.Join(e.dir, "dsec.sock")
	u, err := gateway.ListenUnix(e.socket, -1)
	must(e.t, err)
	tcp, err := gateway.ListenTCP("127.0.0.1:0", "", "")
	must(e.t, err)
	e.tcp = tcp.Addr().String()
	for _, l := range []net.Listener{u, tcp} {
		go func() { _ = e.gw.Serve(l) }()
	}
}

// local is a client on the unix socket.
func (e *env) local() *client.Client {
	e.t.Helper()
	c, err := client.New(client.Config{URL: "unix://" + e.socket})
	must(e.t, err)
	e.t.Cleanup(func() { _ = c.Close() })
	return c
}

// newKey makes a user's key.
func (e *env) newKey(project string) string {
	e.t.Helper()
	_, key, err := e.keys.Create(e.t.Context(), iam.Request{Project: project})
	must(e.t, err)
	return key
}

// remote is a client on TCP with a new key.
func (e *env) remote(role iam.Role, project string) *client.Client {
	e.t.Helper()
	_, key, err := e.keys.Create(e.t.Context(), iam.Request{Role: role, Project: project})
	must(e.t, err)
	return e.client(key)
}

// client is one on TCP with a key.
func (e *env) client(key string) *client.Client {
	e.t.Helper()
	c, err := client.New(client.Config{URL: "http://" + e.tcp, Key: key})
	must(e.t, err)
	e.t.Cleanup(func() { _ = c.Close() })
	return c
}

var spec = dsec.Spec{Tier: dsec.TierContainer, Image: "base:1"}

func (e *env) sandbox(c *client.Client) client.Sandbox {
	e.t.Helper()
	sb, err := c.Create(e.t.Context(), spec)
	must(e.t, err)
	return sb
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantClass(t *testing.T, err error, c dsec.Class) {
	t.Helper()
	if dsec.ClassOf(err) != c {
		t.Fatalf("%v: class %q, want %q", err, dsec.ClassOf(err), c)
	}
}

// eventually polls a condition that something else brings about.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(15 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("not within 15 s: %s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func sh(script string) process.Spec { return process.Spec{Argv: []string{"/bin/sh", "-c", script}} }
