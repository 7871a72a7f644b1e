package gateway_test

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/gateway"
	"github.com/opendsec/dsec/iam"
)

var quiet = slog.New(slog.DiscardHandler)

func TestMain(m *testing.M) {
	if os.Getenv("DSEC_TEST_LOG") != "" {
		quiet = slog.New(slog.NewTextHandler(os.Stderr, nil))
	}
	os.Exit(m.Run())
}

func TestSandboxLivesThroughTheWholeAPI(t *testing.T) {
	e := start(t)
	c, ctx := e.local(), t.Context()
	sb, err := c.Create(ctx, dsec.Spec{Tier: dsec.TierContainer, Image: "base:1", Labels: map[string]string{"k": "v"},
		Lifetimes: dsec.Lifetimes{Idle: 90 * time.Second}, CallID: "once"})
	must(t, err)
	if sb.State != dsec.Running || sb.Project != "default" || sb.Spec.Labels["k"] != "v" || sb.Spec.Lifetimes.Idle != 90*time.Second {
		t.Fatalf("%+v", sb)
	}
	again, err := c.Create(ctx, dsec.Spec{Tier: dsec.TierContainer, Image: "base:1", CallID: "once"})
	if err != nil || again.ID != sb.ID {
		t.Fatalf("the same key made %s and %s (%v)", sb.ID, again.ID, err)
	}
	for _, step := range []struct {
		do   func(context.Context, dsec.SandboxID) (client.Sandbox, error)
		want dsec.State
	}{
		{c.Pause, dsec.Paused},
		{c.Resume, dsec.Running},
		{func(ctx context.Context, id dsec.SandboxID) (client.Sandbox, error) {
			return c.Stop(ctx, id, dsec.CauseAgentError)
		}, dsec.Stopped},
		{c.Start, dsec.Running},
	} {
		got, err := step.do(ctx, sb.ID)
		if err != nil || got.State != step.want {
			t.Fatalf("%+v, %v; want %s", got, err, step.want)
		}
	}
	if st, err := c.Stats(ctx, sb.ID); err != nil || st.MemoryLimit < 0 {
		t.Fatal(st, err)
	}
	list, _, err := c.List(ctx, client.ListOptions{})
	if err != nil || len(list) != 1 || list[0].ID != sb.ID {
		t.Fatal(list, err)
	}
	if existed, err := c.Delete(ctx, sb.ID); err != nil || !existed {
		t.Fatal(existed, err)
	}
	if existed, err := c.Delete(ctx, sb.ID); err != nil || existed {
		t.Fatal("a second delete", existed, err)
	}
	got, err := c.Get(ctx, sb.ID)
	if err != nil || got.State != dsec.Deleted || got.Result.Cause != dsec.CauseAgentError {
		t.Fatalf("%+v, %v", got, err)
	}
}

func TestCreateManyGivesEachItsOwnOutcome(t *testing.T) {
	e := start(t)
	specs := make([]dsec.Spec, 200)
	for i := range specs {
		specs[i] = spec
	}
	specs[17].Image = "missing"
	specs[40].Limits.CPU = -1
	errs, ids := map[int]error{}, map[dsec.SandboxID]bool{}
	err := e.local().CreateMany(t.Context(), specs, "burst", func(r client.Created) error {
		if r.Err != nil {
			errs[r.Index] = r.Err
		} else {
			ids[r.Sandbox.ID] = true
		}
		return nil
	})
	must(t, err)
	if len(ids) != 198 || dsec.ClassOf(errs[17]) != dsec.NotFound || dsec.ClassOf(errs[40]) != dsec.Invalid || len(errs) != 2 {
		t.Fatalf("%d ids, errors %v", len(ids), errs)
	}
	if !strings.Contains(errs[40].Error(), "limits.cpu") {
		t.Fatalf("the error does not name the field: %v", errs[40])
	}
	again := 0
	must(t, e.local().CreateMany(t.Context(), specs[:10], "burst", func(r client.Created) error {
		if ids[r.Sandbox.ID] {
			again++
		}
		return nil
	}))
	if again != 10 {
		t.Fatalf("a retry found %d of 10", again)
	}
}

func TestQuotaIsOfTheProject(t *testing.T) {
	e := start(t, func(c *gateway.Config) { c.MaxLive = 3 })
	c, ctx := e.remote(iam.User, "small"), t.Context()
	var mu sync.Mutex
	made, refused := []dsec.SandboxID{}, 0
	must(t, c.CreateMany(ctx, []dsec.Spec{spec, spec, spec, spec, spec, spec}, "", func(r client.Created) error {
		mu.Lock()
		defer mu.Unlock()
		if r.Err == nil {
			made = append(made, r.Sandbox.ID)
		} else if dsec.ClassOf(r.Err) == dsec.ResourceExhausted {
			refused++
		}
		return nil
	}))
	if len(made) != 3 || refused != 3 {
		t.Fatalf("%d made, %d refused", len(made), refused)
	}
	_ = e.sandbox(e.remote(iam.User, "other"))
	_, err := c.Delete(ctx, made[0])
	must(t, err)
	_ = e.sandbox(c)
}

func TestProjectsDoNotSeeEachOther(t *testing.T) {
	e := start(t)
	a, b, ctx := e.remote(iam.User, "a"), e.remote(iam.User, "b"), t.Context()
	sb := e.sandbox(a)
	_, err := b.Get(ctx, sb.ID)
	wantClass(t, err, dsec.NotFound)
	_, err = b.Exec(ctx, sb.ID, sh("true"))
	wantClass(t, err, dsec.NotFound)
	_, err = b.Files(sb.ID, "").Read(ctx, "/etc/passwd", 0, -1, io.Discard)
	wantClass(t, err, dsec.NotFound)
	_, err = b.Dial(ctx, sb.ID, 80)
	wantClass(t, err, dsec.NotFound)
	_, err = b.Delete(ctx, sb.ID)
	wantClass(t, err, dsec.NotFound)
	if list, _, _ := b.List(ctx, client.ListOptions{}); len(list) != 0 {
		t.Fatal(list)
	}
	_, _, err = b.List(ctx, client.ListOptions{Project: "a"})
	wantClass(t, err, dsec.PermissionDenied)
	if list, _, err := e.local().List(ctx, client.ListOptions{Project: "*"}); err != nil || len(list) != 1 {
		t.Fatal(list, err)
	}
	if _, err := e.local().Get(ctx, sb.ID); err != nil {
		t.Fatal("an admin", err)
	}
}

func TestKeysDecideWhoOneIs(t *testing.T) {
	e := start(t)
	ctx := t.Context()
	anon, err := client.New(client.Config{URL: "http://" + e.tcp})
	must(t, err)
	_, err = anon.Info(ctx)
	wantClass(t, err, dsec.Unauthenticated)
	wrong, _ := client.New(client.Config{URL: "unix://" + e.socket, Key: iam.NewSecret()})
	_, err = wrong.Info(ctx)
	wantClass(t, err, dsec.Unauthenticated)

	admin := e.local()
	info, err := admin.Info(ctx)
	if err != nil || info.Role != "admin" || !strings.HasPrefix(info.Principal, "uid:") {
		t.Fatal(info, err)
	}
	key, secret, err := admin.CreateKey(ctx, "ci", "user", "p1", time.Hour)
	must(t, err)
	user, _ := client.New(client.Config{URL: "http://" + e.tcp, Key: secret})
	if info, err = user.Info(ctx); err != nil || info.Project != "p1" || info.Role != "user" {
		t.Fatal(info, err)
	}
	_, _, err = user.CreateKey(ctx, "more", "admin", "p1", 0)
	wantClass(t, err, dsec.PermissionDenied)
	if existed, err := admin.RevokeKey(ctx, key.ID); err != nil || !existed {
		t.Fatal(existed, err)
	}
	_, err = user.Info(ctx)
	wantClass(t, err, dsec.Unauthenticated)
	list, err := admin.Keys(ctx)
	if err != nil || len(list) != 1 || !list[0].Revoked {
		t.Fatal(list, err)
	}
}

// plain sends a hand-written request over TCP.
func (e *env) plain(req string) *http.Response {
	e.t.Helper()
	conn, err := net.Dial("tcp", e.tcp)
	must(e.t, err)
	e.t.Cleanup(func() { _ = conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
	_, err = io.WriteString(conn, req)
	must(e.t, err)
	resp, err := http.ReadResponse(bufioReader(conn), nil)
	must(e.t, err)
	return resp
}

func TestF20_GatewayIsNoProxy(t *testing.T) {
	e := start(t)
	for _, req := range []string{
		"GET /healthz HTTP/1.1\r\nHost: 169.254.169.254\r\n\r\n",
		"GET http://169.254.169.254/latest/meta-data HTTP/1.1\r\nHost: 169.254.169.254\r\n\r\n",
		"GET /healthz HTTP/1.1\r\nHost: rebound.example.com\r\n\r\n",
		"CONNECT 10.0.0.1:80 HTTP/1.1\r\nHost: 10.0.0.1:80\r\n\r\n",
	} {
		if resp := e.plain(req); resp.StatusCode != http.StatusForbidden {
			t.Errorf("%q: status %d", req, resp.StatusCode)
		}
	}
	if resp := e.plain("GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"); resp.StatusCode != http.StatusOK {
		t.Errorf("our own name: status %d", resp.StatusCode)
	}
}

func TestListenersThatOthersReachNeedTLS(t *testing.T) {
	for _, a := range []string{"0.0.0.0:0", ":0", "[::]:0", "example.com:0"} {
		if l, err := gateway.ListenTCP(a, "", ""); dsec.ClassOf(err) != dsec.Invalid {
			t.Errorf("%s: %v %v", a, l, err)
		}
	}
}

// post does a Connect-JSON call by hand, as libdsec does.
func (e *env) post(key, method string, body any) (int, map[string]any) {
	e.t.Helper()
	b, ok := body.([]byte)
	if !ok {
		b, _ = json.Marshal(body)
	}
	req, err := http.NewRequest(http.MethodPost, "http://"+e.tcp+"/dsec.v1."+method, bytes.NewReader(b))
	must(e.t, err)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", "Bearer "+key)
	resp, err := http.DefaultClient.Do(req)
	must(e.t, err)
	defer resp.Body.Close()
	out := map[string]any{}
	must(e.t, json.NewDecoder(resp.Body).Decode(&out))
	return resp.StatusCode, out
}

func TestJSONHasStableNames(t *testing.T) {
	e := start(t)
	_, key, err := e.keys.Create(t.Context(), iam.Request{Project: "p"})
	must(t, err)
	status, got := e.post(key, "Sandboxes/Create", map[string]any{"spec": map[string]any{"image": "base:1", "rollout_key": "r",
		"lifetimes": map[string]any{"idle": 30.5}, "limits": map[string]any{"memory": 64 << 20}}})
	if status != http.StatusOK {
		t.Fatal(status, got)
	}
	sb := got["sandbox"].(map[string]any)
	sp := sb["spec"].(map[string]any)
	if sp["rollout_key"] != "r" || sp["limits"].(map[string]any)["memory"] != "67108864" || sp["lifetimes"].(map[string]any)["idle"] != 30.5 || sp["tier"] != "container" {
		t.Fatalf("%v", got)
	}
	status, got = e.post(key, "Sandboxes/Get", map[string]any{"id": dsec.NewSandboxID("nodea")})
	d := got["details"].([]any)[0].(map[string]any)
	if status != http.StatusNotFound || got["code"] != "not_found" || d["type"] != "dsec.v1.ErrorDetail" {
		t.Fatal(status, got)
	}
	if debug := d["debug"].(map[string]any); debug["class"] != "not_found" || debug["op"] == nil || debug["object"] == nil {
		t.Fatalf("%v", debug)
	}
}

func TestSizeCaps(t *testing.T) {
	e := start(t)
	_, key, err := e.keys.Create(t.Context(), iam.Request{Project: "p"})
	must(t, err)
	big := []byte(`{"sandbox":"` + strings.Repeat("x", 5<<20) + `"}`)
	status, got := e.post(key, "Commands/Exec", big)
	if status < 400 || status >= 500 {
		t.Fatal(status, got)
	}
	env := map[string]string{"BIG": strings.Repeat("x", dsec.MaxEnvBytes)}
	s := spec
	s.Env = env
	_, err = e.remote(iam.User, "p").Create(t.Context(), s)
	wantClass(t, err, dsec.Invalid)
	resp := e.plain("GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + strings.Repeat("x", 200<<10) + "\r\n\r\n")
	if resp.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
		t.Fatal(resp.StatusCode)
	}
}

func TestUnknownSandboxesAreNotFound(t *testing.T) {
	e := start(t)
	c := e.local()
	for _, id := range []dsec.SandboxID{dsec.NewSandboxID("nodea"), dsec.NewSandboxID("elsewhere")} {
		_, err := c.Get(t.Context(), id)
		wantClass(t, err, dsec.NotFound)
		if !strings.Contains(err.Error(), string(id)) {
			t.Errorf("%v does not name %s", err, id)
		}
	}
	_, err := c.Get(t.Context(), "s../../etc")
	wantClass(t, err, dsec.Invalid)
}

func TestNodeThatRefusesSaysWhy(t *testing.T) {
	e := start(t)
	e.node.mu.Lock()
	e.node.full = true
	e.node.mu.Unlock()
	_, err := e.local().Create(t.Context(), spec)
	wantClass(t, err, dsec.ResourceExhausted)
	if !strings.Contains(err.Error(), "the node is full") {
		t.Fatal(err)
	}
}

func TestMetricsNameNoSandbox(t *testing.T) {
	e := start(t)
	c := e.local()
	sb := e.sandbox(c)
	_, _ = c.Get(t.Context(), sb.ID)
	req, _ := http.NewRequest(http.MethodGet, "http://"+e.tcp+"/metrics", nil)
	_, key, _ := e.keys.Create(t.Context(), iam.Request{})
	req.Header.Set("X-Api-Key", key)
	resp, err := http.DefaultClient.Do(req)
	must(t, err)
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	for _, want := range []string{`dsec_requests_total{route="/dsec.v1.Sandboxes/Get",status="200"} 1`, `dsec_creates_total{class="ok"} 1`,
		`dsec_node_alive{node="nodea"} 1`} {
		if !strings.Contains(string(b), want) {
			t.Errorf("no %s", want)
		}
	}
	if strings.Contains(string(b), string(sb.ID)) {
		t.Error("a metric names a sandbox")
	}
}

func TestDeadNodeIsUnavailableNeverAHang(t *testing.T) {
	e := start(t)
	c := e.local()
	sb := e.sandbox(c)
	must(t, e.api.Close())
	begun := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	_, err := c.Get(ctx, sb.ID)
	wantClass(t, err, dsec.Unavailable)
	_, err = c.Create(ctx, spec)
	wantClass(t, err, dsec.Unavailable)
	if took := time.Since(begun); took > 15*time.Second {
		t.Fatalf("took %v", took)
	}
	e.startNode()
	eventually(t, "the node answers again, in its second epoch", func() bool {
		_, err := c.Get(t.Context(), sb.ID)
		return err == nil && e.cluster.Nodes()[0].Epoch == 2
	})
}

func TestEventsOfSandboxes(t *testing.T) {
	e := start(t)
	c := e.remote(iam.User, "mine")
	events := make(chan dsec.Event, 100)
	s, err := c.OpenSession(t.Context(), &client.Events{}, func(ev dsec.Event) { events <- ev })
	must(t, err)
	defer s.Close()
	_ = e.sandbox(e.remote(iam.User, "theirs"))
	sb := e.sandbox(c)
	_, err = c.Delete(t.Context(), sb.ID)
	must(t, err)
	for _, want := range []dsec.State{dsec.Running, dsec.Deleted} {
		select {
		case ev := <-events:
			if ev.Sandbox != sb.ID || ev.To != want {
				t.Fatalf("%+v, want %s of %s", ev, want, sb.ID)
			}
		case <-time.After(10 * time.Second):
			t.Fatal("no event")
		}
	}
}

func TestSessionBelongsToItsCaller(t *testing.T) {
	e := start(t)
	a, b := e.remote(iam.User, "a"), e.remote(iam.User, "b")
	s, err := a.OpenSession(t.Context(), nil, nil)
	must(t, err)
	defer s.Close()
	status, got := e.post("", "Events/Ack", map[string]any{})
	if status != http.StatusUnauthorized {
		t.Fatal(status, got)
	}
	sb := e.sandbox(b)
	_, err = s.Exec(t.Context(), sb.ID, sh("true"), client.ModeExit, nil)
	wantClass(t, err, dsec.NotFound)
}

func TestTooMuchAtOnceIsRefusedAndHealthIsAnswered(t *testing.T) {
	e := start(t, func(c *gateway.Config) { c.MaxInFlight = 2 })
	c := e.local()
	var open []*client.Session
	for range 2 {
		s, err := c.OpenSession(t.Context(), nil, nil)
		must(t, err)
		open = append(open, s)
	}
	_, err := c.Info(t.Context())
	wantClass(t, err, dsec.ResourceExhausted)
	resp, err := http.Get("http://" + e.tcp + "/healthz")
	must(t, err)
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Errorf("healthz: %d", resp.StatusCode)
	}
	must(t, open[0].Close())
	eventually(t, "there is room again", func() bool { _, err := c.Info(t.Context()); return err == nil })
	must(t, open[1].Close())
}
