package mirror

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
)

// TestNoWayToWhatIsNewer tries what an agent can ask for to get the release with
// the answer. None of it is upstream's index, so upstream is not asked for files.
func TestNoWayToWhatIsNewer(t *testing.T) {
	w := newWorld(t)
	wheels := w.up.pypi(t, "demo", release{"1.0", before}, release{"2.0", after})
	w.up.npm(t, "demo", map[string]string{"latest": "2.0.0"}, release{"1.0.0", before}, release{"2.0.0", after})
	w.up.gomod(t, "example.com/demo", release{"v1.0.0", before}, release{"v2.0.0", after})
	newer := "demo-2.0-py3-none-any.whl"
	hash := sum256(wheels[newer])
	for _, c := range []struct{ service, path string }{
		{"pypi", "/files/demo/" + newer}, {"pypi", "/files/demo/" + newer + ".metadata"}, {"pypi", "/files/Demo/" + newer},
		{"pypi", "/files/demo/DEMO-2.0-py3-none-any.whl"}, {"pypi", "/packages/" + hash + "/" + newer}, {"pypi", "/files/demo/" + hash},
		{"pypi", "/files/other/" + newer}, {"pypi", "/files/demo/" + newer + "?x=demo-1.0-py3-none-any.whl"}, {"pypi", "/files/demo/" + newer + "#sha256=" + hash},
		{"pypi", "/files/demo/demo-1.0-py3-none-any.whl/../" + newer}, {"pypi", "/files/demo/%2e%2e/demo/" + newer}, {"pypi", "/files/demo/demo-1.0-py3-none-any.whl%00" + newer},
		{"pypi", "/files/demo%2f" + newer}, {"pypi", "/files/demo/%2564emo"}, {"pypi", "/files//demo/" + newer}, {"pypi", "//packages/" + hash + "/" + newer},
		{"pypi", "/simple/demo/2.0/"}, {"pypi", "/simple/demo/../../packages/" + hash + "/" + newer}, {"pypi", "/simple/../pypi/demo/json"}, {"pypi", "/pypi/demo/json"},
		{"pypi", "/simple/demo%0d%0aX-Y:%20z/"}, {"pypi", "/simple/demo\\..\\x/"}, {"pypi", w.up.URL + "/packages/" + hash + "/" + newer},
		{"npm", "/demo/-/demo-2.0.0.tgz"}, {"npm", "/demo/2.0.0"}, {"npm", "/DEMO/-/demo-2.0.0.tgz"}, {"npm", "/demo/-/demo-2.0.0.tgz?a=1"}, {"npm", "/demo/-/../-/demo-2.0.0.tgz"},
		{"npm", "/other/-/demo-2.0.0.tgz"}, {"npm", "/demo/-/demo-1.0.0.tgz/../demo-2.0.0.tgz"}, {"npm", "/demo%2f-%2fdemo-2.0.0.tgz"}, {"npm", "/demo/next"}, {"npm", "/demo/>=2"},
		{"go", "/example.com/demo/@v/v2.0.0.zip"}, {"go", "/example.com/demo/@v/v2.0.0.mod"}, {"go", "/example.com/demo/@v/V2.0.0.zip"}, {"go", "/example.com/demo/@v/v2.0.0.zip/../v1.0.0.info"},
		{"go", "/example.com/demo/@v/@v/v2.0.0.zip"}, {"go", "/example.com/demo/@v/../@v/v2.0.0.zip"}, {"go", "/example.com/Demo/@v/v2.0.0.zip"}, {"go", "/example.com/demo/@v/v2.zip"},
		{"debian", "/debian/../simple/demo/"}, {"debian", "/debian/pool/../../packages/" + hash + "/" + newer}, {"debian", "/debian/pool/%2e%2e/x"},
	} {
		for _, head := range []string{"Accept: " + pypiJSON, "Range: bytes=0-10", "Accept: " + npmShort, "X-Original-URL: /packages/x"} {
			got := w.raw(c.service, c.path, head)
			status := strings.SplitN(got, "\r\n", 2)[0]
			if strings.Contains(status, " 200 ") || strings.Contains(status, " 206 ") || strings.Contains(strings.SplitN(got, "\r\n\r\n", 2)[0], "X-Y") {
				t.Errorf("%s %s with %q: %.200s", c.service, c.path, head, got)
			}
			if strings.Contains(status, " 50") {
				t.Errorf("%s %s with %q: %.200s", c.service, c.path, head, got)
			}
		}
	}
	w.up.mu.Lock()
	defer w.up.mu.Unlock()
	for path := range w.up.asked {
		if strings.Contains(path, ".whl") || strings.Contains(path, ".tgz") || strings.Contains(path, ".zip") || strings.Contains(path, "..") {
			t.Errorf("upstream was asked for %s", path)
		}
	}
}

// TestAFileOfTheCacheIsHiddenAsWell: another sandbox, without a cut-off, has had it.
func TestAFileOfTheCacheIsHiddenAsWell(t *testing.T) {
	w := newWorld(t)
	w.up.pypi(t, "demo", release{"2.0", after})
	w.up.gomod(t, "example.com/demo", release{"v2.0.0", after})
	w.let(Access{Services: dsec.Mirrors})
	w.get("pypi", "/files/demo/demo-2.0-py3-none-any.whl").want(t, 200)
	w.get("go", "/example.com/demo/@v/v2.0.0.zip").want(t, 200)
	w.let(Access{Services: dsec.Mirrors, Cutoff: cutoff})
	w.get("pypi", "/files/demo/demo-2.0-py3-none-any.whl").want(t, 404)
	w.get("go", "/example.com/demo/@v/v2.0.0.zip").want(t, 404)
}

// TestTheCutoffItselfIsSeen, and one microsecond after it is not.
func TestTheCutoffItselfIsSeen(t *testing.T) {
	w := newWorld(t)
	w.up.pypi(t, "edge", release{"1.0", "2025-01-31T00:00:00Z"}, release{"1.1", "2025-01-31T00:00:00.000001Z"}, release{"1.2", "2025-01-30T23:30:00-01:00"}, release{"1.3", "yesterday"})
	w.get("pypi", "/simple/edge/", "Accept: "+pypiJSON).want(t, 200, `"versions":["1.0"]`)
}

// TestAFileThatIsNotWhatTheIndexSays is no success for anybody, and is not kept.
func TestAFileThatIsNotWhatTheIndexSays(t *testing.T) {
	for _, room := range []int64{10 << 20, 1} { // by the cache, past it
		w := newWorld(t, func(c *Config) { c.MaxBytes = room })
		name := "demo-1.0-py3-none-any.whl"
		wheels := w.up.pypi(t, "demo", release{"1.0", before})
		at := "/packages/" + sum256(wheels[name]) + "/" + name
		lie := bytes.Repeat([]byte("x"), 300_000)
		for _, body := range [][]byte{lie, {}, wheels[name][:len(wheels[name])-1], append(slices.Clone(wheels[name]), 'x')} {
			for _, chunked := range []bool{false, true} {
				w.up.set(at, func(rw http.ResponseWriter, _ *http.Request) {
					if !chunked {
						rw.Header().Set("Content-Length", fmt.Sprint(len(body)))
					}
					rw.(http.Flusher).Flush()
					_, _ = rw.Write(body)
				})
				for _, head := range []string{"A: b", "Range: bytes=0-3"} {
					if a := w.get("pypi", "/files/demo/"+name, head); a.err == nil && a.status < 400 {
						t.Errorf("room %d, %d bytes, chunked %v, %s: success, status %d", room, len(body), chunked, head, a.status)
					}
				}
			}
		}
		w.up.bytes(at, "", wheels[name])
		if a := w.get("pypi", "/files/demo/"+name).want(t, 200); a.body != string(wheels[name]) {
			t.Errorf("the true file is another")
		}
	}
}

// TestRedirectsStayAmongKnownHosts: a registry, or what it is fooled by, cannot send
// us anywhere.
func TestRedirectsStayAmongKnownHosts(t *testing.T) {
	w := newWorld(t)
	wheels := w.up.pypi(t, "demo", release{"1.0", before})
	name := "demo-1.0-py3-none-any.whl"
	at := "/packages/" + sum256(wheels[name]) + "/" + name
	reached := false
	other := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) { reached = true; _, _ = rw.Write(wheels[name]) }))
	defer other.Close()
	w.up.set(at, func(rw http.ResponseWriter, r *http.Request) { http.Redirect(rw, r, other.URL+"/x", http.StatusFound) })
	w.get("pypi", "/files/demo/"+name).want(t, 502, "not one of the hosts of this mirror")
	w.up.set(at, func(rw http.ResponseWriter, r *http.Request) { http.Redirect(rw, r, at+"?again", http.StatusFound) })
	w.get("pypi", "/files/demo/"+name).want(t, 502, "redirects")
	w.up.index("far", map[string]any{"name": "far", "files": []any{map[string]any{"filename": "far-1.tar.gz", "url": other.URL + "/far", "hashes": map[string]string{"sha256": sum256(wheels[name])}, "upload-time": before}}})
	w.get("pypi", "/files/far/far-1.tar.gz").want(t, 502, "not one of the hosts of this mirror")
	if reached {
		t.Error("the other host was asked")
	}
	w.up.bytes("/moved", "", wheels[name])
	w.up.set(at, func(rw http.ResponseWriter, r *http.Request) { http.Redirect(rw, r, "/moved", http.StatusFound) })
	w.get("pypi", "/files/demo/"+name).want(t, 200)
}

// TestUpstreamThatMisbehaves: each has an answer that says what, and soon.
func TestUpstreamThatMisbehaves(t *testing.T) {
	bomb := func() []byte {
		var b bytes.Buffer
		z := gzip.NewWriter(&b)
		_, _ = io.CopyN(z, zeros{}, 64<<20)
		_ = z.Close()
		return b.Bytes()
	}()
	hang := func(rw http.ResponseWriter, r *http.Request) { <-r.Context().Done() }
	for name, c := range map[string]struct {
		do     http.HandlerFunc
		status int
		text   string
	}{
		"huge": {func(rw http.ResponseWriter, _ *http.Request) { _, _ = io.CopyN(rw, zeros{}, 2<<20) }, 502, "more than 1048576 bytes"},
		"bomb": {func(rw http.ResponseWriter, _ *http.Request) {
			rw.Header().Set("Content-Encoding", "gzip")
			_, _ = rw.Write(bomb)
		}, 502, "more than 1048576 bytes"},
		"silent":  {hang, 504, ""},
		"stalls":  {func(rw http.ResponseWriter, r *http.Request) { rw.(http.Flusher).Flush(); hang(rw, r) }, 504, "no byte for too long"},
		"no json": {func(rw http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(rw, "<html>") }, 502, ""},
		"other name": {func(rw http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(rw, `{"name":"other","Version":""}`)
		}, 502, ""},
		"500":  {func(rw http.ResponseWriter, _ *http.Request) { rw.WriteHeader(500) }, 502, "status 500"},
		"401":  {func(rw http.ResponseWriter, _ *http.Request) { rw.WriteHeader(401) }, 502, "status 401"},
		"gone": {func(rw http.ResponseWriter, _ *http.Request) { rw.WriteHeader(410) }, 404, "it has none"},
		"cut": {func(rw http.ResponseWriter, _ *http.Request) {
			rw.Header().Set("Content-Length", "100")
			_, _ = io.WriteString(rw, `{"name":`)
		}, 502, "EOF"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, func(c *Config) {
				c.MaxIndex, c.HeaderWait, c.BodyWait = 1<<20, 300*time.Millisecond, 300*time.Millisecond
			})
			w.up.replace(c.do)
			w.get("pypi", "/simple/demo/").want(t, c.status, c.text)
			w.get("npm", "/demo").want(t, c.status, c.text)
			w.get("go", "/example.com/demo/@v/v1.0.0.info").want(t, c.status, c.text)
		})
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// TestOneSandboxTakesOnlyItsShare of requests, and of connections.
func TestOneSandboxTakesOnlyItsShare(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.PerSandbox = 2 })
	in, out := make(chan bool, 2), make(chan bool)
	w.up.replace(func(rw http.ResponseWriter, r *http.Request) { in <- true; <-out; http.NotFound(rw, r) })
	done := make(chan answer, 2)
	for i := range 2 {
		go func() { done <- w.get("pypi", fmt.Sprintf("/simple/p%d/", i)) }()
		<-in
	}
	w.get("pypi", "/simple/p3/").want(t, 429, "more than 2")
	close(out)
	for range 2 {
		(<-done).want(t, 404)
	}
	var conns []net.Conn
	defer func() {
		for _, c := range conns {
			_ = c.Close()
		}
	}()
	closed := 0
	for range connsPerSandbox + 5 {
		c, err := net.Dial("tcp4", w.front.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
	}
	for _, c := range slices.Backward(conns) {
		_ = c.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
		if _, err := c.Read(make([]byte, 1)); err == io.EOF || strings.Contains(fmt.Sprint(err), "reset") {
			closed++
		}
		if closed >= 5 {
			break
		}
	}
	if closed < 5 {
		t.Errorf("%d connections beyond the share were closed, want 5", closed)
	}
}

// FuzzFilters: whatever an index says, what is shown is dated at or before the
// cut-off, has a digest, and its page and document can be read.
// TestWhoGoesAwayBeginsNothingWithoutEnd: what a sandbox has asked for goes on when
// it is gone, in as many places as it has.
func TestWhoGoesAwayBeginsNothingWithoutEnd(t *testing.T) {
	w := newWorld(t)
	arrived, open := make(chan struct{}, 200), make(chan struct{})
	w.up.replace(func(http.ResponseWriter, *http.Request) {
		arrived <- struct{}{}
		<-open
	})
	defer close(open)
	ask := func(service, path string) {
		r := httptest.NewRequest("GET", "http://"+service+".mirror.dsec"+path, nil)
		r.RemoteAddr = "127.0.0.1:1"
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
		defer cancel()
		w.m.ServeHTTP(httptest.NewRecorder(), r.WithContext(ctx))
	}
	for i := range 100 {
		ask("pypi", fmt.Sprintf("/simple/p%d/", i))
	}
	for i := range 100 {
		ask("debian", fmt.Sprintf("/debian/pool/main/p/p%d.deb", i))
	}
	for range indexesAtOnce + filesAtOnce {
		<-arrived
	}
	if n := len(arrived); n > 0 {
		t.Errorf("%d questions more for one sandbox that was gone than %d and %d", n, indexesAtOnce, filesAtOnce)
	}
}

func FuzzFilters(f *testing.F) {
	f.Add([]byte(`{"name":"demo","versions":["1"],"files":[{"filename":"demo-1.tar.gz","url":"https://h/x","hashes":{"sha256":"` + strings.Repeat("a", 64) + `"},"upload-time":"2024-01-01T00:00:00Z"}]}`))
	f.Add([]byte(`{"name":"demo","dist-tags":{"latest":"1.0.0"},"time":{"1.0.0":"2024-01-01T00:00:00Z"},"versions":{"1.0.0":{"dist":{"tarball":"https://h/x","shasum":"` + strings.Repeat("a", 40) + `"}}}}`))
	f.Add([]byte(`{"Version":"v1.0.0","Time":"2024-01-01T00:00:00Z"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		a := Access{Cutoff: cutoff}
		if x, err := filterPyPI(b, "demo", &a); err == nil {
			for _, e := range x.Files {
				at, err := time.Parse(time.RFC3339, e.Uploaded)
				if err != nil || at.After(cutoff) || !hexSHA256.MatchString(e.Hashes["sha256"]) || strings.ContainsAny(e.URL, "\"<>\r\n ") {
					t.Fatalf("shown: %+v", e)
				}
			}
			if !json.Valid(x.json()) || bytes.Contains(x.html(), []byte("<script")) {
				t.Fatal("no document")
			}
		}
		if p, err := filterNPM(b, "demo", &a); err == nil {
			for v, r := range p.versions {
				at, err := time.Parse(time.RFC3339, r.time)
				if err != nil || at.After(cutoff) || r.digest.kind == "" {
					t.Fatalf("shown: %s %+v", v, r)
				}
			}
			for tag, v := range p.tags {
				if _, ok := p.versions[v]; !ok {
					t.Fatalf("tag %s leads to %s", tag, v)
				}
			}
			for _, short := range []bool{true, false} {
				if doc, err := p.render("", "h", short); err != nil || !json.Valid(doc) {
					t.Fatalf("no document: %v", err)
				}
			}
		}
		_, _ = readGoInfo(b)
	})
}

// TestTheLastByteIsHeldBack until it is known that all are right, and no longer.
func TestTheLastByteIsHeldBack(t *testing.T) {
	d := &download{more: make(chan struct{}), readers: 2}
	d.grow(10)
	if n, ended, err := d.available(t.Context(), 0); n != 9 || ended || err != nil {
		t.Errorf("%d bytes, %v, %v", n, ended, err)
	}
	d.end(nil)
	if n, ended, err := d.available(t.Context(), 9); n != 1 || !ended || err != nil {
		t.Errorf("%d bytes, %v, %v", n, ended, err)
	}
}

// TestAModuleWithoutReleases is what its newest commit was: upstream's word for it
// counts if it is not too new.
func TestAModuleWithoutReleases(t *testing.T) {
	w := newWorld(t)
	for at, status := range map[string]int{before: 200, after: 404} {
		module := "example.com/" + at[:4]
		w.up.bytes("/go/"+module+"/@v/list", "", nil)
		w.up.bytes("/go/"+module+"/@latest", "", fmt.Appendf(nil, `{"Version":"v0.0.0-20240101000000-0123456789ab","Time":%q}`, at))
		w.get("go", "/"+module+"/@latest").want(t, status)
	}
}
