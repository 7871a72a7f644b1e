package adversary

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/files"
	"github.com/opendsec/dsec/process"
)

// key makes one of a project.
func (h *host) key(t *testing.T, project string) string {
	t.Helper()
	_, secret, err := h.CreateKey(t.Context(), "test", "user", project, 0)
	if err != nil {
		t.Fatal(err)
	}
	return secret
}

// raw asks the gateway as curl does, with a path that no client would make.
func (h *host) raw(t *testing.T, key, method, path, hostName string) (int, string) {
	t.Helper()
	c, err := net.Dial("unix", filepath.Join(h.Dir, "run", "gateway.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	fmt.Fprintf(c, "%s %s HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\nX-Forwarded-Host: 169.254.169.254\r\nConnection: close\r\n\r\n", method, path, hostName, key)
	text, _ := io.ReadAll(io.LimitReader(c, 1<<20)) // a reset is an answer, too
	var code int
	if _, err := fmt.Sscanf(string(text), "HTTP/1.1 %d", &code); err != nil {
		code = http.StatusBadRequest
	}
	return code, string(text)
}

// theGatewayReachesNothingForOthers: a user's key of another project reaches no
// port, file or command of a sandbox, nor anything else through the gateway, whatever
// is written where an id, a port or a host belongs.
func theGatewayReachesNothingForOthers(t *testing.T, h *host) {
	mine, theirs := h.key(t, "p1"), h.key(t, "p2")
	as := func(key string) *client.Client {
		c, err := client.New(client.Config{URL: "unix://" + filepath.Join(h.Dir, "run", "gateway.sock"), Key: key})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	owner, other := as(mine), as(theirs)
	sb, err := owner.Create(t.Context(), dsec.Spec{Tier: dsec.TierContainer, Image: "hostile", Limits: dsec.Limits{Memory: 64 << 20, Disk: 64 << 20}})
	if err != nil {
		t.Fatal(err)
	}
	page := "printf 'HTTP/1.0 200 OK\\r\\nContent-Length: 6\\r\\n\\r\\nsecret'"
	p, err := owner.Exec(t.Context(), sb.ID, process.Spec{Argv: []string{"/bin/sh", "-c", "while true; do " + page + " | nc -l -p 80; done"}})
	if err != nil {
		t.Fatal(err)
	}
	path := "/v1/sandboxes/" + string(sb.ID) + "/ports/80/"
	eventually(t, "its owner reaches the port", func() bool {
		code, text := h.raw(t, mine, "GET", path, "localhost")
		return code == http.StatusOK && strings.HasSuffix(text, "secret")
	})
	id := string(sb.ID)
	node := id[strings.LastIndexAny(id, "-.")+1:]
	for _, path := range []string{path, "/v1/sandboxes/" + id + "/tunnel/80", "/v1/sandboxes/" + id + "/files?path=/etc/passwd",
		"/v1/sandboxes/x/../" + id + "/ports/80/", "/v1/sandboxes/" + id + "%2f..%2f" + id + "/ports/80/", "/v1/sandboxes/169.254.169.254/ports/80/",
		"/v1/sandboxes/*/ports/80/", "/v1/sandboxes/>/ports/80/", "/v1/sandboxes/" + id + ".>/ports/80/", "/v1/sandboxes/" + strings.Replace(id, node, "*", 1) + "/ports/80/",
		"/v1/sandboxes/" + id + "/ports/80@169.254.169.254/", "/v1/sandboxes/" + id + "/ports/0/", "/v1/sandboxes/" + id + "/ports/65616/", "/v1/sandboxes/" + id + "/ports/80%00/",
		"http://169.254.169.254/latest/meta-data/", "//169.254.169.254/latest/", "/v1/sandboxes/" + id + "/ports/80/..;/..%2f..%2fmetrics"} {
		for _, host := range []string{"localhost", "169.254.169.254", id, "80." + id, "localhost:4222"} {
			if code, text := h.raw(t, theirs, "GET", path, host); code < 300 || strings.Contains(text, "secret") {
				t.Errorf("GET %s of host %s: %d\n%s", path, host, code, text)
			}
		}
	}
	for what, err := range map[string]error{
		"get":    second(other.Get(t.Context(), sb.ID)),
		"exec":   second(other.Exec(t.Context(), sb.ID, process.Spec{Argv: []string{"true"}})),
		"wait":   second(other.Attach(sb.ID, p.ID).Wait(t.Context())),
		"read":   second(other.Files(sb.ID, "").Read(t.Context(), "/etc/passwd", 0, 0, io.Discard)),
		"write":  second(other.Files(sb.ID, "").Write(t.Context(), "/x", bytes.NewReader(nil), files.WriteOptions{})),
		"dial":   second(other.Dial(t.Context(), sb.ID, 80)),
		"stop":   second(other.Stop(t.Context(), sb.ID, "")),
		"commit": second(other.Commit(t.Context(), sb.ID, client.CommitOptions{Tag: "stolen"})),
	} {
		if dsec.ClassOf(err) != dsec.NotFound {
			t.Errorf("%s by another project: %v", what, err)
		}
	}
	if killed, err := other.Attach(sb.ID, p.ID).Kill(t.Context()); killed {
		t.Errorf("another project kills its command: %v", err)
	}
	if existed, err := other.Delete(context.WithoutCancel(t.Context()), sb.ID); existed {
		t.Errorf("another project deletes it: %v", err)
	}
	if sb, err := owner.Get(t.Context(), sb.ID); err != nil || sb.State != dsec.Running {
		t.Errorf("it is %s, %v", sb.State, err)
	}
}

func second[T any](_ T, err error) error { return err }
