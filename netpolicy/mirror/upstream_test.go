package mirror

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/netpolicy"
)

// The cut-off of the tests, and times on both sides of it.
var (
	cutoff = time.Date(2025, 1, 31, 0, 0, 0, 0, time.UTC)
	before = "2024-06-01T10:00:00.123456Z"
	after  = "2025-06-01T10:00:00.123456Z"
)

// upstream is a server with what registries have.
type upstream struct {
	*httptest.Server
	mu    sync.Mutex
	asked map[string]int
	serve map[string]http.HandlerFunc // by path, as it is written
	all   http.HandlerFunc            // in place of all, if set
	heads []http.Header               // of all requests
}

func newUpstream(t *testing.T) *upstream {
	u := &upstream{asked: map[string]int{}, serve: map[string]http.HandlerFunc{}}
	u.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		u.mu.Lock()
		path := r.URL.EscapedPath()
		u.asked[path]++
		u.heads = append(u.heads, r.Header.Clone())
		f, all := u.serve[path], u.all
		u.mu.Unlock()
		switch {
		case all != nil:
			all(w, r)
		case f != nil:
			f(w, r)
		default:
			http.NotFound(w, r)
		}
	}))
	t.Cleanup(u.Close)
	return u
}

func (u *upstream) set(path string, f http.HandlerFunc) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.serve[path] = f
}

func (u *upstream) replace(f http.HandlerFunc) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.all = f
}

func (u *upstream) times(path string) int {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.asked[path]
}

// bytes serves a body with an ETag.
func (u *upstream) bytes(path, contentType string, body []byte) {
	etag := fmt.Sprintf(`"%x"`, sha256.Sum256(body))
	u.set(path, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", contentType)
		w.Header().Set("ETag", etag)
		if r.Header.Get("If-None-Match") == etag {
			w.WriteHeader(http.StatusNotModified)
			return
		}
		_, _ = w.Write(body)
	})
}

// release is a version of a package of the tests.
type release struct{ version, time string }

// pypi serves a project with a wheel of each release.
func (u *upstream) pypi(t *testing.T, name string, releases ...release) (wheels map[string][]byte) {
	t.Helper()
	wheels = map[string][]byte{}
	var files []map[string]any
	var versions []string
	for _, r := range releases {
		file := fmt.Sprintf("%s-%s-py3-none-any.whl", strings.ReplaceAll(name, "-", "_"), r.version)
		body, meta := wheel(t, name, r.version)
		wheels[file] = body
		versions = append(versions, r.version)
		at := fmt.Sprintf("/packages/%x/%s", sha256.Sum256(body), file)
		u.bytes(at, "application/octet-stream", body)
		u.bytes(at+".metadata", "application/octet-stream", meta)
		f := map[string]any{"filename": file, "url": u.URL + at, "hashes": map[string]string{"sha256": sum256(body), "md5": "x"}, "size": len(body),
			"requires-python": ">=3.8", "yanked": false, "core-metadata": map[string]string{"sha256": sum256(meta)}, "provenance": "https://secret.example/" + r.version}
		if r.time != "" {
			f["upload-time"] = r.time
		}
		files = append(files, f)
	}
	u.index(name, map[string]any{"meta": map[string]any{"api-version": "1.3", "_last-serial": 42}, "name": name, "versions": versions, "files": files})
	return wheels
}

func (u *upstream) index(name string, doc any) {
	b, _ := json.Marshal(doc)
	u.bytes("/simple/"+NormalPyPI(name)+"/", pypiJSON, b)
}

func wheel(t *testing.T, name, version string) (body, meta []byte) {
	t.Helper()
	module := strings.ReplaceAll(name, "-", "_")
	info := module + "-" + version + ".dist-info/"
	meta = fmt.Appendf(nil, "Metadata-Version: 2.1\nName: %s\nVersion: %s\n", name, version)
	body = zipped(t, map[string]string{module + ".py": "version = '" + version + "'\n", info + "METADATA": string(meta),
		info + "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n", info + "RECORD": ""})
	return body, meta
}

func zipped(t *testing.T, files map[string]string) []byte {
	t.Helper()
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	for name, text := range files {
		w, err := z.Create(name)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, text); err != nil {
			t.Fatal(err)
		}
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// npm serves a package with a file of each release.
func (u *upstream) npm(t *testing.T, name string, tags map[string]string, releases ...release) {
	t.Helper()
	versions, times := map[string]any{}, map[string]any{"created": "2020-01-01T00:00:00.000Z", "modified": after}
	for _, r := range releases {
		body := tarball(t, name, r.version)
		sum := sha512.Sum512(body)
		file := name[strings.LastIndexByte(name, '/')+1:] + "-" + r.version + ".tgz"
		u.bytes("/"+name+"/-/"+file, "application/octet-stream", body)
		versions[r.version] = map[string]any{"name": name, "version": r.version, "description": "what " + r.version + " does", "scripts": map[string]string{"x": "y"},
			"dist": map[string]any{"tarball": u.URL + "/" + name + "/-/" + file, "integrity": "sha512-" + base64.StdEncoding.EncodeToString(sum[:])}}
		if r.time != "" {
			times[r.version] = r.time
		}
	}
	b, _ := json.Marshal(map[string]any{"_id": name, "name": name, "dist-tags": tags, "versions": versions, "time": times,
		"readme": "the secret of the newest release", "description": "the secret of the newest release"})
	u.bytes("/"+strings.ReplaceAll(name, "/", "%2F"), "application/json", b)
}

func tarball(t *testing.T, name, version string) []byte {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	w := tar.NewWriter(z)
	text := fmt.Sprintf(`{"name":%q,"version":%q}`, name, version)
	if err := w.WriteHeader(&tar.Header{Name: "package/package.json", Mode: 0o644, Size: int64(len(text))}); err != nil {
		t.Fatal(err)
	}
	_, _ = io.WriteString(w, text)
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// gomod serves a module. Versions that are no releases are not in its list.
func (u *upstream) gomod(t *testing.T, path string, releases ...release) {
	t.Helper()
	at := "/go/" + escapeGo(path) + "/@v/"
	var list []string
	for _, r := range releases {
		if !strings.Contains(r.version, "-0.") && !strings.HasPrefix(r.version, "v0.0.0-") {
			list = append(list, r.version)
		}
		v, mod := escapeGo(r.version), "module "+path+"\n\ngo 1.20\n"
		u.bytes(at+v+".info", "application/json", fmt.Appendf(nil, `{"Version":%q,"Time":%q,"Origin":{"VCS":"git","URL":"https://secret.example"}}`, r.version, r.time))
		u.bytes(at+v+".mod", "text/plain", []byte(mod))
		u.bytes(at+v+".zip", "application/zip", zipped(t, map[string]string{path + "@" + r.version + "/go.mod": mod, path + "@" + r.version + "/a.go": "package a // " + r.version + "\n"}))
	}
	u.bytes(at+"list", "text/plain", []byte(strings.Join(list, "\n")+"\n"))
}

func sum256(b []byte) string {
	s := sha256.Sum256(b)
	return hex.EncodeToString(s[:])
}

// world is a mirror between a sandbox at 127.0.0.1 and an upstream.
type world struct {
	t     *testing.T
	up    *upstream
	m     *Mirror
	front *httptest.Server

	mu     sync.Mutex
	access Access
	known  bool
}

func newWorld(t *testing.T, change ...func(*Config)) *world {
	t.Helper()
	w := &world{t: t, up: newUpstream(t), known: true, access: Access{Services: dsec.Mirrors, Cutoff: cutoff}}
	c := w.config()
	for _, f := range change {
		f(&c)
	}
	w.open(c)
	return w
}

func (w *world) config() Config {
	u := w.up.URL
	return Config{Dir: w.t.TempDir() + "/cache", Upstreams: Upstreams{PyPI: u, NPM: u, Go: u + "/go", SumDB: u, Debian: u + "/debian", DebianSecurity: u + "/sec"},
		HeaderWait: 5 * time.Second, BodyWait: 5 * time.Second,
		Lookup: func(a netip.Addr) (Access, bool) {
			w.mu.Lock()
			defer w.mu.Unlock()
			return w.access, w.known && a == netip.MustParseAddr("127.0.0.1")
		}}
}

func (w *world) open(c Config) {
	w.t.Helper()
	m, err := New(c)
	if err != nil {
		w.t.Fatal(err)
	}
	w.m = m
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		w.t.Fatal(err)
	}
	w.front = &httptest.Server{Listener: Listen(l), Config: Server(m)}
	w.front.Start()
	w.t.Cleanup(w.close)
}

func (w *world) close() {
	w.front.Close()
	if err := w.m.Close(); err != nil {
		w.t.Error(err)
	}
}

func (w *world) let(a Access) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.access = a
}

// answer is what came.
type answer struct {
	status int
	header http.Header
	body   string
	err    error // of the body
}

// get asks a service; headers are "Name: value".
func (w *world) get(service, path string, headers ...string) answer {
	w.t.Helper()
	return w.do(http.MethodGet, service, path, headers...)
}

func (w *world) do(method, service, path string, headers ...string) answer {
	w.t.Helper()
	r, err := http.NewRequest(method, w.front.URL+path, nil)
	if err != nil {
		w.t.Fatal(err)
	}
	r.Host = service
	if !strings.Contains(service, ".") {
		r.Host = netpolicy.MirrorHost(service)
	}
	for _, h := range headers {
		k, v, _ := strings.Cut(h, ": ")
		r.Header.Add(k, v)
	}
	c := http.Client{Transport: &http.Transport{DisableCompression: true, DisableKeepAlives: true}, Timeout: time.Minute,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	resp, err := c.Do(r)
	if err != nil {
		return answer{err: err}
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	return answer{resp.StatusCode, resp.Header, string(b), err}
}

// raw sends a request line as it is.
func (w *world) raw(service, target string, lines ...string) string {
	w.t.Helper()
	c, err := net.Dial("tcp4", w.front.Listener.Addr().String())
	if err != nil {
		w.t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(30 * time.Second))
	_, _ = fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n%s\r\n", target, netpolicy.MirrorHost(service), strings.Join(append(lines, ""), "\r\n"))
	b, _ := io.ReadAll(c)
	return string(b)
}

// want fails unless the answer has a status, and all of the texts.
func (a answer) want(t *testing.T, status int, texts ...string) answer {
	t.Helper()
	if a.err != nil || a.status != status {
		t.Fatalf("status %d, want %d; %v: %.300s", a.status, status, a.err, a.body)
	}
	for _, s := range texts {
		if !strings.Contains(a.body, s) {
			t.Fatalf("no %q in %.600s", s, a.body)
		}
	}
	return a
}

// lacks fails if a text is there, anywhere.
func (a answer) lacks(t *testing.T, texts ...string) answer {
	t.Helper()
	for _, s := range texts {
		if strings.Contains(a.body, s) || strings.Contains(fmt.Sprint(a.header), s) {
			t.Fatalf("%q is in %.600s", s, a.body)
		}
	}
	return a
}
