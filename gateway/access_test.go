package gateway_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/gateway"
	"github.com/opendsec/dsec/iam"
)

// logged collects lines that many goroutines write.
type logged struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logged) text() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

type accessLine struct {
	Msg, Request, Who, Method, Code, Sandbox string
	Status                                   int
	Took                                     float64
	Bytes                                    int64
}

// line waits for that of a request, which is written after its answer.
func (l *logged) line(t *testing.T, request string) (found accessLine) {
	t.Helper()
	eventually(t, "request "+request+" is logged", func() bool {
		for _, text := range strings.Split(l.text(), "\n") {
			var a accessLine
			if text != "" && json.Unmarshal([]byte(text), &a) == nil && a.Request == request {
				found = a
				return true
			}
		}
		return false
	})
	return found
}

func TestAccessLogSaysWhoDidWhatAndNoSecret(t *testing.T) {
	l := &logged{}
	e := start(t, func(c *gateway.Config) { c.Access = slog.New(slog.NewJSONHandler(l, nil)) })
	k, secret, err := e.keys.Create(t.Context(), iam.Request{Project: "p"})
	must(t, err)
	c := e.client(secret)
	sb := e.sandbox(c)
	asked := func(method, path, id string, header http.Header) *http.Response {
		req, err := http.NewRequest(method, "http://"+e.tcp+path, strings.NewReader("{}"))
		must(t, err)
		req.Header = header
		req.Header.Set("X-Request-Id", id)
		resp, err := http.DefaultClient.Do(req)
		must(t, err)
		_, _ = io.Copy(io.Discard, resp.Body)
		_ = resp.Body.Close()
		return resp
	}
	key := func() http.Header {
		return http.Header{"Authorization": {"Bearer " + secret}, "Content-Type": {"application/json"}}
	}
	who, files, ports := "key:"+k.ID, "/v1/sandboxes/"+string(sb.ID)+"/files", "/v1/sandboxes/"+string(sb.ID)+"/ports/81/"
	for i, r := range []struct {
		method, path string
		header       http.Header
		want         accessLine
	}{
		{"POST", "/dsec.v1.System/Info", key(), accessLine{Who: who, Method: "/dsec.v1.System/Info", Code: "ok", Status: 200}},
		{"POST", "/dsec.v1.Sandboxes/Get", key(), accessLine{Who: who, Method: "/dsec.v1.Sandboxes/Get", Code: "invalid", Status: 400}},
		{"POST", "/dsec.v1.System/Info", http.Header{"Authorization": {"Bearer dsec_guessed"}, "Content-Type": {"application/json"}},
			accessLine{Method: "/dsec.v1.System/Info", Code: "unauthenticated", Status: 401}},
		{"GET", files + "?path=/private/hidden", key(),
			accessLine{Who: who, Method: "GET /v1/sandboxes/{id}/files", Code: "file_not_found", Status: 404, Sandbox: string(sb.ID)}},
		{"DELETE", ports + "hidden/path?token=hidden", key(),
			accessLine{Who: who, Method: "DELETE /v1/sandboxes/{id}/ports/{port}/{rest...}", Code: "unavailable", Status: 503, Sandbox: string(sb.ID)}},
		{"GET", "/hidden", key(), accessLine{Method: "GET /", Code: "not_found", Status: 404}},
	} {
		r.want.Msg, r.want.Request = "request", fmt.Sprint("my.request-", i)
		resp := asked(r.method, r.path, r.want.Request, r.header)
		if got := resp.Header.Get("X-Request-Id"); got != r.want.Request {
			t.Errorf("%s %s: the answer has request id %q", r.method, r.path, got)
		}
		got := l.line(t, r.want.Request)
		if got.Took <= 0 || got.Took > 15 || got.Bytes <= 0 {
			t.Errorf("%s %s: took %g, %d bytes", r.method, r.path, got.Took, got.Bytes)
		}
		got.Took, got.Bytes = 0, 0
		if got != r.want {
			t.Errorf("%s %s:\n%+v, want\n%+v", r.method, r.path, got, r.want)
		}
	}
	bad := asked("GET", "/v1/none", "not\tan id "+strings.Repeat("x", 100), key())
	if id := bad.Header.Get("X-Request-Id"); len(id) != 20 || l.line(t, id).Code != string(dsec.NotFound) {
		t.Errorf("request id %q", id)
	}
	_ = asked("GET", "/healthz", "quiet", http.Header{})
	_ = asked("GET", "/none", "after", http.Header{})
	l.line(t, "after")
	for _, never := range []string{secret, strings.TrimPrefix(secret, "dsec_"), "dsec_guessed", "hidden", "quiet"} {
		if strings.Contains(l.text(), never) {
			t.Errorf("the log says %q:\n%s", never, l.text())
		}
	}
}

func TestAccessLogOfAStreamSaysHowItEnded(t *testing.T) {
	l := &logged{}
	e := start(t, func(c *gateway.Config) { c.Access = slog.New(slog.NewJSONHandler(l, nil)) })
	s, err := e.local().OpenSession(t.Context(), nil, nil)
	must(t, err)
	must(t, s.Close())
	eventually(t, "the end of the stream is logged", func() bool {
		return strings.Contains(l.text(), `"method":"/dsec.v1.Events/Open","code":"canceled"`)
	})
	if !strings.Contains(l.text(), `"who":"uid:`) {
		t.Error(l.text())
	}
}
