package gateway_test

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/gateway"
	"github.com/opendsec/dsec/iam"
)

// Who may call a method.
const (
	owner    = "owner"    // of the sandbox it names; to others there is none
	admins   = "admins"   // only
	project  = "project"  // acts on or shows what belongs to the caller's project only
	session  = "session"  // of the caller; to others there is none
	tagging  = "tagging"  // a tag of the caller's project
	everyone = "everyone" // with a key: it tells of the machine, of no project
)

// authorization of everything that the gateway answers to a key. A method that
// is not here fails the test: say who may call it.
var authorization = map[string]string{
	"Functions/Call": project, "Sandboxes/Create": project, "Sandboxes/CreateMany": project, "Sandboxes/List": project,
	"Sandboxes/Get": owner, "Sandboxes/Start": owner, "Sandboxes/Stop": owner, "Sandboxes/Delete": owner, "Sandboxes/Pause": owner,
	"Sandboxes/Resume": owner, "Sandboxes/Fork": owner, "Sandboxes/Checkpoint": owner, "Sandboxes/FindCheckpoint": project, "Sandboxes/Renew": owner, "Sandboxes/SetNetwork": owner, "Sandboxes/SetPhase": owner, "Sandboxes/Egress": owner, "Sandboxes/Commit": owner, "Sandboxes/Changes": owner, "Sandboxes/Stats": owner, "Sandboxes/Audit": owner, "Sandboxes/Findings": owner, "Sandboxes/Grade": owner,
	"Commands/Exec": owner, "Commands/WriteStdin": owner, "Commands/CloseStdin": owner, "Commands/Signal": owner,
	"Commands/Kill": owner, "Commands/Resize": owner, "Commands/Wait": owner, "Commands/Output": owner, "Commands/Kept": owner,
	"Commands/Release": owner,
	"Files/Stat":       owner, "Files/List": owner, "Files/Mkdir": owner, "Files/Move": owner, "Files/Remove": owner,
	"Files/SetAttr": owner, "Files/Watch": owner,
	"Events/Open": project, "Events/Subscribe": session, "Events/Unsubscribe": session, "Events/Ack": session,
	"Layers/Import": tagging, "Layers/Build": tagging, "Layers/Tag": tagging, "Layers/Remove": admins,
	"Layers/List": project, "Layers/Inspect": project, "Layers/Ensure": everyone, "Layers/CreateTemplate": tagging, "Layers/Merge": admins,
	"Layers/Trace": project, "Layers/Repack": tagging, "Layers/Evict": admins, "Layers/OnDemand": project,
	"Screens/Screenshot": owner, "Screens/Act": owner, "Screens/Console": owner, "Screens/Power": owner, "Screens/Mark": owner, "Screens/Revert": owner, "Screens/Marks": owner,
	"System/Info": everyone, "System/Nodes": everyone, "System/Doctor": everyone,
	"Keys/Create": admins, "Keys/List": admins, "Keys/Revoke": admins,

	"GET /v1/sandboxes/{id}/files": owner, "PUT /v1/sandboxes/{id}/files": owner, "GET /v1/sandboxes/{id}/tree": owner,
	"PUT /v1/sandboxes/{id}/tree": owner, "PUT /v1/sandboxes/{id}/execs/{exec}/stdin": owner,
	"GET /v1/sandboxes/{id}/tunnel/{port}": owner, "/v1/sandboxes/{id}/ports/{port}/{rest...}": owner,
	"POST /v1/layers/upload": tagging, "GET /v1/layers/export": project, "GET /v1/nodes/{node}/metrics": everyone, "GET /metrics": everyone,
}

// endpoint is one method or route, with a request to try it.
type endpoint struct {
	name, method, path string
	stream             bool
}

func endpoints(sandbox string) (all []endpoint) {
	protoregistry.GlobalFiles.RangeFiles(func(f protoreflect.FileDescriptor) bool {
		for i := range f.Services().Len() {
			s := f.Services().Get(i)
			for j := range s.Methods().Len() {
				m := s.Methods().Get(j)
				if f.Package() == "dsec.v1" {
					all = append(all, endpoint{name: string(s.Name()) + "/" + string(m.Name()), method: http.MethodPost,
						path: "/" + string(s.FullName()) + "/" + string(m.Name()), stream: m.IsStreamingServer()})
				}
			}
		}
		return true
	})
	fill := strings.NewReplacer("{id}", sandbox, "{exec}", "x1", "{port}", "8000", "{rest...}", "", "{node}", "nodea")
	for _, p := range gateway.RawPatterns() {
		method, path, ok := strings.Cut(p, " ")
		if !ok {
			method, path = http.MethodGet, p
		}
		path = fill.Replace(path)
		if strings.Contains(path, "files") || strings.Contains(path, "tree") {
			path += "?path=/root/f"
		}
		if strings.HasSuffix(path, "upload") {
			path += "?kind=build&tag=taken:1"
		}
		all = append(all, endpoint{name: p, method: method, path: path})
	}
	return all
}

// enveloped is the one message of a request to a stream.
func enveloped(body []byte) []byte {
	return append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(body))), body...)
}

// call tries an endpoint with a key and returns the class of the answer.
func (e *env) call(t *testing.T, p endpoint, key, sandbox string) dsec.Class {
	t.Helper()
	body, _ := json.Marshal(map[string]any{"id": sandbox, "sandbox": sandbox, "exec": "x1", "path": "/root/f", "from": "/root/f",
		"to": "/root/g", "signal": 9, "session": "0123456789abcdefghij", "source": "registry/base:1", "tag": "taken:1",
		"ref": "taken:1", "name": "k", "project": "p1", "specs": []any{map[string]any{"image": "missing"}}})
	kind := "application/json"
	switch {
	case p.name == "Commands/Exec":
		body, _ = json.Marshal(map[string]any{"sandbox": sandbox, "spec": map[string]any{"argv": []string{"true"}}})
	case p.name == "Events/Open": // its session is not the one that others are asked for
		body, kind = enveloped([]byte("{}")), "application/connect+json"
	case p.stream:
		body, kind = enveloped(body), "application/connect+json"
	case !strings.HasPrefix(p.path, "/dsec."):
		body, kind = []byte("x"), "application/octet-stream"
	}
	return e.answer(t, p, key, kind, body)
}

// answer sends a request and returns the class of the answer.
func (e *env) answer(t *testing.T, p endpoint, key, kind string, body []byte) dsec.Class {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), p.method, "http://"+e.tcp+p.path, bytes.NewReader(body))
	must(t, err)
	req.Header.Set("Content-Type", kind)
	if strings.Contains(p.path, "tunnel") {
		req.Header.Set("Connection", "Upgrade")
		req.Header.Set("Upgrade", "dsec-tunnel")
	}
	if key != "" {
		req.Header.Set("Authorization", "Bearer "+key)
	}
	resp, err := http.DefaultTransport.RoundTrip(req)
	must(t, err)
	defer resp.Body.Close()
	head := make([]byte, 5)
	n, _ := io.ReadFull(resp.Body, head)
	if p.name == "Events/Open" && n == 5 && head[0] == 0 {
		return "" // a frame, and it stays open
	}
	text, err := io.ReadAll(io.MultiReader(bytes.NewReader(head[:n]), resp.Body))
	must(t, err)
	for _, c := range dsec.Classes {
		if strings.Contains(string(text), `"class":"`+string(c)+`"`) {
			return c
		}
	}
	if resp.StatusCode == http.StatusUnauthorized {
		return dsec.Unauthenticated
	}
	if resp.StatusCode >= 300 {
		t.Errorf("%s: HTTP %d %s", p.name, resp.StatusCode, text)
	}
	return ""
}

func TestEveryMethodSaysWhoMayCallIt(t *testing.T) {
	n := newThinNode()
	t.Cleanup(func() { _ = n.rt.Close() })
	shelf := newShelf()
	e := (&env{t: t, node: n, service: n, layers: shelf}).start()
	_, err := e.local().Import(t.Context(), "registry/base:1", "taken:1", nil)
	must(t, err)
	sb := e.sandbox(e.remote(iam.User, "p1"))
	_, err = e.remote(iam.User, "p1").Exec(t.Context(), sb.ID, sh("sleep 100"))
	must(t, err)
	made, stranger := shelf.made, e.newKey("p2")
	seen := map[string]bool{}
	for _, p := range endpoints(string(sb.ID)) {
		seen[p.name] = true
		if got := e.call(t, p, "", string(sb.ID)); got != dsec.Unauthenticated {
			t.Errorf("%s without a key: class %q", p.name, got)
		}
		got := e.call(t, p, stranger, string(sb.ID))
		switch rule := authorization[p.name]; rule {
		case owner, session:
			none := got == "" && (p.name == "Commands/Kill" || p.name == "Commands/Release") // which have nothing to do
			if got != dsec.NotFound && !none {
				t.Errorf("%s of another project: class %q, want not_found", p.name, got)
			}
		case admins, tagging:
			if got != dsec.PermissionDenied {
				t.Errorf("%s: class %q, want permission_denied", p.name, got)
			}
		case project, everyone:
		default:
			t.Errorf("%s: nobody said who may call it (%q)", p.name, rule)
		}
	}
	for name := range authorization {
		if !seen[name] {
			t.Errorf("%s does not exist", name)
		}
	}
	if got, err := e.local().Get(t.Context(), sb.ID); err != nil || got.State != dsec.Running || shelf.made != made {
		t.Errorf("a stranger changed something: %s, %d layers made, %v", got.State, shelf.made-made, err)
	}
	list, _, err := e.client(stranger).List(t.Context(), client.ListOptions{All: true})
	must(t, err)
	for _, other := range list {
		if other.Project != "p2" {
			t.Errorf("a sandbox of %s is listed", other.Project)
		}
	}
}

func TestUsersMoveOnlyTagsOfTheirProject(t *testing.T) {
	n := newThinNode()
	t.Cleanup(func() { _ = n.rt.Close() })
	shelf := newShelf()
	e := (&env{t: t, node: n, service: n, layers: shelf}).start()
	ctx, user := t.Context(), e.remote(iam.User, "p2")
	_, err := e.local().Import(ctx, "registry/base:1", "base:1", nil)
	must(t, err)
	_, err = e.remote(iam.User, "p1").Import(ctx, "registry/base:1", "theirs:1", nil)
	must(t, err)
	_, err = user.Import(ctx, "registry/base:1", "mine:1", nil)
	must(t, err)
	sb, made := e.sandbox(user), shelf.made
	set := func(tag string) map[string]error {
		all := map[string]error{}
		_, all["import"] = user.Import(ctx, "registry/other:1", tag, nil)
		_, all["build"] = user.Build(ctx, "registry/other:1", client.BuildOptions{Tag: tag}, nil)
		_, all["upload"] = user.UploadTree(ctx, strings.NewReader("x"), client.BuildOptions{Tag: tag})
		all["tag"] = user.TagLayer(ctx, "mine:1", dsec.LayerRef(tag))
		_, all["repack"] = user.RepackLayer(ctx, "mine:1", tag, nil)
		_, all["commit"] = user.Commit(ctx, sb.ID, client.CommitOptions{Tag: tag})
		return all
	}
	for _, tag := range []string{"base:1", "theirs:1"} {
		for how, err := range set(tag) {
			if dsec.ClassOf(err) != dsec.PermissionDenied {
				t.Errorf("%s moves %s: %v", how, tag, err)
			}
		}
	}
	if got, err := user.Get(ctx, sb.ID); err != nil || got.State != dsec.Running || shelf.made != made {
		t.Errorf("work was done for a tag that was refused: %s, %d layers, %v", got.State, shelf.made-made, err)
	}
	for _, tag := range []string{"mine:1", "new:1"} {
		for how, err := range set(tag) {
			if err != nil {
				t.Errorf("%s of %s: %v", how, tag, err)
			}
		}
	}
}
