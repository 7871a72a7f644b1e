package cluster_test

import (
	"context"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
	"github.com/opendsec/dsec/cluster"
	"github.com/opendsec/dsec/node"
	"github.com/opendsec/dsec/node/nodeapi"
)

const secret = "a secret of at least sixteen bytes"

var quiet = slog.New(slog.DiscardHandler)

// bookNode is a node that keeps books and nothing else.
type bookNode struct {
	node.Service
	node.Inside
	id    dsec.NodeID
	max   int
	alien bool // it goes on from no checkpoint

	asked chan struct{} // if not nil, Get says that it was called and answers when this is closed

	mu   sync.Mutex
	list []node.Sandbox
}

func (n *bookNode) Create(_ context.Context, project string, s dsec.Spec) (node.Sandbox, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.alien && s.Checkpoint != "" {
		return node.Sandbox{}, dsec.Errorf(dsec.Unsupported, "create sandbox", "", "node %s has another kernel", n.id)
	}
	if len(n.list) >= n.max {
		return node.Sandbox{}, dsec.Errorf(dsec.ResourceExhausted, "create sandbox", "", "node %s is full", n.id)
	}
	sb := node.Sandbox{ID: dsec.NewSandboxID(n.id), Project: project, Spec: s, State: dsec.Running}
	n.list = append(n.list, sb)
	return sb, nil
}

func (n *bookNode) List(context.Context, node.Filter) ([]node.Sandbox, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.list), nil
}

func (n *bookNode) Get(ctx context.Context, id dsec.SandboxID) (node.Sandbox, error) {
	if n.asked != nil {
		n.asked <- struct{}{}
		<-n.asked
	}
	if id[len(id)-1] == 'a' { // hangs
		<-ctx.Done()
		return node.Sandbox{}, ctx.Err()
	}
	return node.Sandbox{ID: id, Project: "p", State: dsec.Running, Spec: dsec.Spec{Command: make([]string, 1<<20)}}, nil
}

func (n *bookNode) Events(ctx context.Context, _ node.Filter, _ time.Time, _ func(dsec.Event) error, _ func() error) error {
	<-ctx.Done()
	return ctx.Err()
}

func (n *bookNode) Load() node.Load {
	n.mu.Lock()
	defer n.mu.Unlock()
	return node.Load{Live: len(n.list), MaxLive: 1000, Tiers: []dsec.Tier{dsec.TierContainer}}
}

func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "dsec-cl-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func startServer(t *testing.T, dir, listen string) *cluster.Server {
	t.Helper()
	s, err := cluster.StartServer(cluster.ServerConfig{Dir: dir, Listen: listen, Secret: secret, Log: quiet})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func open(t *testing.T, cfg cluster.Config) *cluster.Cluster {
	t.Helper()
	cfg.DeadAfter, cfg.Log = 3*time.Second, quiet
	c, err := cluster.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func startNode(t *testing.T, url string, n *bookNode) *nodeapi.Server {
	t.Helper()
	path := filepath.Join(shortDir(t), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	s, err := nodeapi.Open(nodeapi.Config{Node: n.id, Service: n, Inside: n, Watcher: n, NATS: url,
		User: cluster.NodeUser(n.id), Password: cluster.NodePassword(secret, n.id), Listener: l, Address: "unix:" + path,
		Every: 100 * time.Millisecond, Log: quiet})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("not within 20 s: %s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func alive(c *cluster.Cluster) (n int) {
	for _, x := range c.Nodes() {
		if x.Alive && x.Epoch > 0 {
			n++
		}
	}
	return n
}

var spec = &dsecv1.Spec{Tier: "container", Image: "i"}

func TestCreatesSpreadAndPassOverNodesThatRefuse(t *testing.T) {
	s := startServer(t, t.TempDir(), "127.0.0.1:0")
	c := open(t, cluster.Config{Server: s})
	a, b := &bookNode{id: "a", max: 0}, &bookNode{id: "b", max: 7}
	startNode(t, s.URL(), a)
	startNode(t, s.URL(), b)
	eventually(t, "both are alive", func() bool { return alive(c) == 2 })
	for range 7 {
		sb, err := c.Create(t.Context(), "p", spec)
		if err != nil || sb.Node != "b" {
			t.Fatal(sb, err)
		}
	}
	if _, err := c.Create(t.Context(), "p", spec); dsec.ClassOf(err) != dsec.ResourceExhausted {
		t.Fatal(err)
	}
	if c.Live("p") != 7 || c.Live("q") != 0 {
		t.Fatal(c.Live("p"))
	}
}

// A node that cannot go on from a checkpoint is passed over; if none can that is the answer.
func TestCheckpointsPassOverNodesThatCannot(t *testing.T) {
	s := startServer(t, t.TempDir(), "127.0.0.1:0")
	c := open(t, cluster.Config{Server: s})
	a, b := &bookNode{id: "a", max: 9, alien: true}, &bookNode{id: "b", max: 5}
	startNode(t, s.URL(), a)
	startNode(t, s.URL(), b)
	eventually(t, "both are alive", func() bool { return alive(c) == 2 })
	from := &dsecv1.Spec{Tier: "container", Image: "i", Checkpoint: "sha256:c"}
	for range 5 {
		sb, err := c.Create(t.Context(), "p", from)
		if err != nil || sb.Node != "b" {
			t.Fatal(sb, err)
		}
	}
	if _, err := c.Create(t.Context(), "p", from); err == nil {
		t.Fatal("made where it cannot be")
	}
	if sb, err := c.Create(t.Context(), "p", spec); err != nil || sb.Node != "a" {
		t.Error("a node that cannot go on from checkpoints is full for others", sb, err)
	}
}

// The same code works on a server that is not inside the process.
func TestExternalServer(t *testing.T) {
	s := startServer(t, t.TempDir(), "127.0.0.1:0")
	inside := open(t, cluster.Config{Server: s})
	outside := open(t, cluster.Config{URL: s.URL(), User: "gateway", Password: cluster.Password(secret, "gateway")})
	startNode(t, s.URL(), &bookNode{id: "a", max: 9})
	eventually(t, "both gateways see it", func() bool { return alive(inside) == 1 && alive(outside) == 1 })
	sb, err := outside.Create(t.Context(), "p", spec)
	if err != nil {
		t.Fatal(err)
	}
	list, unreachable := inside.List(t.Context(), "p", &dsecv1.NodeList{})
	if len(list) != 1 || list[0].Id != sb.Id || len(unreachable) != 0 {
		t.Fatal(list, unreachable)
	}
	if err := outside.Config("keys").Put(t.Context(), "k", []byte("v")); err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	if err := inside.Config("keys").Load(t.Context(), func(id string, v []byte) { got[id] = string(v) }); err != nil || got["k"] != "v" {
		t.Fatal(got, err)
	}
}

// Deleting everything JetStream has loses no sandbox: registration and index
// come back from the node.
func TestIndexIsRebuiltAfterTheControlPlaneLostItsDisk(t *testing.T) {
	dir := t.TempDir()
	first, err := cluster.StartServer(cluster.ServerConfig{Dir: dir, Listen: "127.0.0.1:0", Secret: secret, Log: quiet})
	if err != nil {
		t.Fatal(err)
	}
	c := open(t, cluster.Config{Server: first})
	startNode(t, first.URL(), &bookNode{id: "a", max: 9})
	eventually(t, "it is alive", func() bool { return alive(c) == 1 })
	for range 3 {
		if _, err := c.Create(t.Context(), "p", spec); err != nil {
			t.Fatal(err)
		}
	}
	_ = c.Close()
	_ = first.Close()
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	again := startServer(t, dir, first.URL()[len("nats://"):])
	c = open(t, cluster.Config{Server: again})
	eventually(t, "the node is back", func() bool { return alive(c) == 1 })
	eventually(t, "the index is back", func() bool { return c.Live("p") == 3 })
	if list, _ := c.List(t.Context(), "p", &dsecv1.NodeList{}); len(list) != 3 {
		t.Fatal(list)
	}
	if e := c.Nodes()[0].Epoch; e != 1 {
		t.Fatalf("epoch %d, want the one the agent has", e)
	}
}

func TestNodesReachTheirOwnSubjectsOnly(t *testing.T) {
	s := startServer(t, t.TempDir(), "127.0.0.1:0")
	open(t, cluster.Config{Server: s})
	if _, err := nats.Connect(s.URL(), nats.UserInfo("node-a", "guess")); err == nil {
		t.Fatal("a wrong password works")
	}
	if _, err := nats.Connect(s.URL(), nats.UserInfo(cluster.NodeUser("b"), cluster.NodePassword(secret, "a"))); err == nil {
		t.Fatal("the password of another node works")
	}
	denied := make(chan error, 10)
	nc, err := nats.Connect(s.URL(), nats.UserInfo(cluster.NodeUser("a"), cluster.NodePassword(secret, "a")),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { denied <- err }))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	try := func(what string, fn func() error) {
		t.Helper()
		if err := fn(); err != nil {
			t.Fatal(err)
		}
		select {
		case <-denied:
		case <-time.After(5 * time.Second):
			t.Errorf("%s was not refused", what)
		}
	}
	try("a heartbeat of another node", func() error { return nc.Publish("$KV.hb.b", nil) })
	try("a key", func() error { return nc.Publish("$KV.cfg.keys.x", nil) })
	try("a call to another node", func() error { return nc.Publish(wire.Subject("b", "delete"), nil) })
	try("listening to another node", func() error { _, err := nc.SubscribeSync(wire.Subject("b", ">")); return err })
	try("listening to all answers", func() error { _, err := nc.SubscribeSync("_INBOX.>"); return err })
	try("deleting a stream", func() error { return nc.Publish("$JS.API.STREAM.DELETE.KV_cfg", nil) })
}

func TestServerRefusesWhatOthersReach(t *testing.T) {
	for _, listen := range []string{"0.0.0.0:0", ":0", "10.0.0.1:0"} {
		if _, err := cluster.StartServer(cluster.ServerConfig{Dir: t.TempDir(), Listen: listen, Secret: secret, Log: quiet}); dsec.ClassOf(err) != dsec.Invalid {
			t.Errorf("%s: %v", listen, err)
		}
	}
}

func id(last string) string {
	id := string(dsec.NewSandboxID("a"))
	return id[:len(id)-1] + last
}

func TestCallsEndByTheirDeadline(t *testing.T) {
	s := startServer(t, t.TempDir(), "127.0.0.1:0")
	c := open(t, cluster.Config{Server: s})
	startNode(t, s.URL(), &bookNode{id: "a"})
	eventually(t, "it is alive", func() bool { return alive(c) == 1 })
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	err := c.Call(ctx, "a", wire.VerbGet, "", &dsecv1.GetRequest{Id: id("a")}, nil)
	if dsec.ClassOf(err) != dsec.Timeout {
		t.Fatal(err)
	}
}

func TestCallInFlightEndsWithItsNode(t *testing.T) {
	s := startServer(t, t.TempDir(), "127.0.0.1:0")
	c := open(t, cluster.Config{Server: s})
	api := startNode(t, s.URL(), &bookNode{id: "a"})
	eventually(t, "it is alive", func() bool { return alive(c) == 1 })
	done := make(chan error, 1)
	go func() { done <- c.Call(t.Context(), "a", wire.VerbGet, "", &dsecv1.GetRequest{Id: id("a")}, nil) }()
	time.AfterFunc(100*time.Millisecond, func() { _ = api.Close() })
	select {
	case err := <-done:
		if dsec.ClassOf(err) != dsec.Unavailable {
			t.Fatal(err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("the call hangs")
	}
	err := c.Call(t.Context(), "a", wire.VerbGet, "", &dsecv1.GetRequest{Id: id("b")}, nil)
	if dsec.ClassOf(err) != dsec.Unavailable {
		t.Fatal(err)
	}
}

// An answer that is too large for a control message comes over the data
// connection.
func TestLargeAnswers(t *testing.T) {
	s := startServer(t, t.TempDir(), "127.0.0.1:0")
	c := open(t, cluster.Config{Server: s})
	startNode(t, s.URL(), &bookNode{id: "a"})
	eventually(t, "it is alive", func() bool { return alive(c) == 1 })
	resp := &dsecv1.GetResponse{}
	if err := c.Call(t.Context(), "a", wire.VerbGet, "", &dsecv1.GetRequest{Id: id("b")}, resp); err != nil || len(resp.Sandbox.Spec.Command) != 1<<20 {
		t.Fatal(err)
	}
}

func TestDataConnectionNeedsTheToken(t *testing.T) {
	s := startServer(t, t.TempDir(), "127.0.0.1:0")
	c := open(t, cluster.Config{Server: s})
	path := filepath.Join(shortDir(t), "s")
	n := &bookNode{id: "a"}
	l, err := nodeapi.ListenUnix(path, -1)
	if err != nil {
		t.Fatal(err)
	}
	api, err := nodeapi.Open(nodeapi.Config{Node: "a", Service: n, Inside: n, Watcher: n, NATS: s.URL(), User: cluster.NodeUser("a"),
		Password: cluster.NodePassword(secret, "a"), Listener: l, Address: "unix:" + path, Every: 100 * time.Millisecond, Log: quiet})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = api.Close() })
	eventually(t, "it is alive", func() bool { return alive(c) == 1 })
	if st, _ := os.Stat(path); st.Mode().Perm() != 0o600 {
		t.Fatalf("mode %v", st.Mode())
	}
	status := rawGet(t, path, "/sandbox/"+id("b")+"/files?path=/etc/passwd", "Bearer wrong")
	if status != 401 {
		t.Fatalf("status %d", status)
	}
}

// TestANodeThatStartsAgainAnswersNobodyWhoAsked: who waits for an answer of the
// agent before is told, and need not wait until it gives up.
func TestANodeThatStartsAgainAnswersNobodyWhoAsked(t *testing.T) {
	s := startServer(t, t.TempDir(), "127.0.0.1:0")
	c := open(t, cluster.Config{Server: s})
	silent := &bookNode{id: "a", asked: make(chan struct{})}
	startNode(t, s.URL(), silent)
	eventually(t, "it is alive", func() bool { return alive(c) == 1 })
	failed := make(chan error, 1)
	go func() {
		failed <- c.Call(t.Context(), "a", wire.VerbGet, "", &dsecv1.GetRequest{Id: id("a")}, &dsecv1.GetResponse{})
	}()
	<-silent.asked
	startNode(t, s.URL(), &bookNode{id: "a"})
	if err := <-failed; dsec.ClassOf(err) != dsec.Unavailable {
		t.Errorf("who had asked: %v", err)
	}
	close(silent.asked)
}
