package image

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"github.com/opendsec/dsec"
)

func indexOf(items ...mutate.IndexAddendum) v1.ImageIndex {
	return mutate.AppendManifests(empty.Index, items...)
}

func platform(os, arch string) v1.Descriptor {
	return v1.Descriptor{Platform: &v1.Platform{OS: os, Architecture: arch}}
}

func TestE15_NestedIndex(t *testing.T) {
	ours := makeImage(t, makeTar(t, file("ours", "1")))
	foreign := makeImage(t, makeTar(t, file("foreign", "1")))
	attest := mutate.MediaType(makeImage(t, makeTar(t, file("attestation", "1"))), types.OCIManifestSchema1)
	inner := indexOf(mutate.IndexAddendum{Add: attest, Descriptor: platform("unknown", "unknown")},
		mutate.IndexAddendum{Add: foreign, Descriptor: platform("linux", "s390x")},
		mutate.IndexAddendum{Add: ours, Descriptor: platform("linux", goarch())})
	outer := indexOf(mutate.IndexAddendum{Add: indexOf(mutate.IndexAddendum{Add: foreign, Descriptor: platform("linux", "s390x")})},
		mutate.IndexAddendum{Add: inner})
	ref := newRegistry(t) + "/multi:1"
	r, err := name.ParseReference(ref)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.WriteIndex(r, outer); err != nil {
		t.Fatal(err)
	}
	c := mustConvert(t, "docker://"+ref, Options{})
	EachWay(t, func(t testing.TB) { expect(t, mount(t, c), map[string]string{"ours": "1"}) })
	if c.Config == nil || c.Config.User != "1000" || c.Config.Workdir != "/work" || len(c.Config.Env) != 2 || c.Config.Cmd[0] != "sh" {
		t.Errorf("config: %+v", c.Config)
	}
	if _, err := tryConvert(t, "docker://"+ref, Options{Platform: "linux/riscv64"}); !errors.Is(err, dsec.Invalid.Err()) || !strings.Contains(err.Error(), "riscv64") {
		t.Errorf("a platform that is not there: %v", err)
	}
}

// front is a registry with something in front of it.
func front(t testing.TB, wrap func(http.ResponseWriter, *http.Request, http.Handler)) string {
	t.Helper()
	inner := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { wrap(w, r, inner) }))
	t.Cleanup(srv.Close)
	return strings.TrimPrefix(srv.URL, "http://")
}

// TestE18_BothAcceptSets: a registry that answers 404 unless the OCI types are
// accepted, and one that wants docker's, both serve us.
func TestE18_BothAcceptSets(t *testing.T) {
	for _, want := range []types.MediaType{types.OCIManifestSchema1, types.OCIImageIndex, types.DockerManifestSchema2, types.DockerManifestList} {
		host := front(t, func(w http.ResponseWriter, r *http.Request, inner http.Handler) {
			if r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/manifests/") && !strings.Contains(r.Header.Get("Accept"), string(want)) {
				http.NotFound(w, r)
				return
			}
			inner.ServeHTTP(w, r)
		})
		mustConvert(t, push(t, host+"/x:1", makeImage(t, makeTar(t, file("a", "1")))), Options{})
	}
}

func TestE28_RateLimitWaitsThenMirror(t *testing.T) {
	var refused atomic.Int32
	var closed atomic.Bool
	host := front(t, func(w http.ResponseWriter, r *http.Request, inner http.Handler) {
		if closed.Load() && r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/blobs/") && refused.Add(1) <= 2 {
			w.Header().Set("Retry-After", "1")
			http.Error(w, "slow down", http.StatusTooManyRequests)
			return
		}
		inner.ServeHTTP(w, r)
	})
	img := makeImage(t, makeTar(t, file("a", "1")))
	src := push(t, host+"/x:1", img)
	closed.Store(true)
	start := time.Now()
	mustConvert(t, src, Options{})
	if took := time.Since(start); took < time.Second || refused.Load() < 2 {
		t.Errorf("%d refusals, took %v: did not wait", refused.Load(), took)
	}
	// A registry that asks for an hour is not waited for; its mirror serves.
	shut := front(t, func(w http.ResponseWriter, r *http.Request, _ http.Handler) {
		if r.URL.Path == "/v2/" {
			return
		}
		w.Header().Set("Retry-After", "3600")
		http.Error(w, "come back", http.StatusTooManyRequests)
	})
	mustConvert(t, "docker://"+host+"/x:1", Options{Mirrors: map[string][]string{host: {shut}}})
	mustConvert(t, "docker://"+shut+"/x:1", Options{Mirrors: map[string][]string{"*": {host}}})
}

func TestRegistryErrorsHaveClasses(t *testing.T) {
	host := newRegistry(t)
	if _, err := tryConvert(t, "docker://"+host+"/no:1", Options{}); !errors.Is(err, dsec.NotFound.Err()) {
		t.Errorf("missing image: %v", err)
	}
	if _, err := tryConvert(t, "docker://Not A Reference", Options{}); !errors.Is(err, dsec.Invalid.Err()) {
		t.Errorf("bad reference: %v", err)
	}
	if _, err := tryConvert(t, "/no/such/path", Options{}); !errors.Is(err, dsec.NotFound.Err()) {
		t.Errorf("missing path: %v", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	dead := front(t, func(_ http.ResponseWriter, r *http.Request, _ http.Handler) { <-r.Context().Done() })
	_, err := openRegistry(ctx, dead+"/x:1", Options{})
	if class := dsec.ClassOf(err); class != dsec.Timeout {
		t.Errorf("a registry that hangs: %s: %v", class, err)
	}
}

func TestCredentialsComeFromDockerConfig(t *testing.T) {
	host := front(t, func(w http.ResponseWriter, r *http.Request, inner http.Handler) {
		if user, pass, ok := r.BasicAuth(); r.Method == http.MethodGet && (!ok || user != "alice" || pass != "secret") {
			w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		inner.ServeHTTP(w, r)
	})
	dir := t.TempDir()
	t.Setenv("DOCKER_CONFIG", dir)
	auth := base64.StdEncoding.EncodeToString([]byte("alice:secret"))
	if err := os.WriteFile(filepath.Join(dir, "config.json"), fmt.Appendf(nil, `{"auths":{%q:{"auth":%q}}}`, host, auth), 0o600); err != nil {
		t.Fatal(err)
	}
	ref, err := name.ParseReference(host + "/x:1")
	if err != nil {
		t.Fatal(err)
	}
	opts := Options{Credentials: FindCredentials("docker://"+host+"/x:1", Options{})}
	c := opts.Credentials[host]
	if c.Username != "alice" || c.Password != "secret" {
		t.Fatalf("found %+v", opts.Credentials)
	}
	r := repository{ref: ref, opts: opts}
	if err := remote.Write(ref, makeImage(t, makeTar(t, file("a", "1"))), r.options(context.Background())...); err != nil {
		t.Fatal(err)
	}
	if _, err := tryConvert(t, "docker://"+host+"/x:1", Options{}); !errors.Is(err, dsec.PermissionDenied.Err()) {
		t.Errorf("without credentials: %v", err)
	}
	mustConvert(t, "docker://"+host+"/x:1", opts)
}

// TestCorruptLayerIsRefused: a registry that serves other bytes than it says.
func TestCorruptLayerIsRefused(t *testing.T) {
	img := makeImage(t, makeTar(t, file("a", "1")))
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	d, err := layers[0].Digest()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if _, err := layout.Write(dir, indexOf(mutate.IndexAddendum{Add: img})); err != nil {
		t.Fatal(err)
	}
	blob := filepath.Join(dir, "blobs/sha256", d.Hex)
	b, err := os.ReadFile(blob)
	if err != nil {
		t.Fatal(err)
	}
	for what, bad := range map[string][]byte{"changed": append(bytes.Clone(b[:len(b)-1]), b[len(b)-1]^1), "short": b[:len(b)-4], "long": append(bytes.Clone(b), 0)} {
		if err := os.WriteFile(blob, bad, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := tryConvert(t, dir, Options{}); err == nil {
			t.Errorf("%s: accepted", what)
		}
	}
}

// TestE16_DigestsAreNames: what is no digest never becomes a path.
func TestE16_DigestsAreNames(t *testing.T) {
	for _, digest := range []string{"sha256:../../escape", "sha256:" + strings.Repeat("A", 64), "md5:d41d8cd98f00b204e9800998ecf8427e", "../x", ""} {
		dir := t.TempDir()
		index := fmt.Sprintf(`{"schemaVersion":2,"manifests":[{"mediaType":%q,"digest":%q,"size":3}]}`, types.OCIManifestSchema1, digest)
		for name, body := range map[string]string{"oci-layout": `{"imageLayoutVersion":"1.0.0"}`, "index.json": index} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(body), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.WriteFile(filepath.Join(dir, "escape"), []byte("{}\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := tryConvert(t, dir, Options{}); !errors.Is(err, dsec.Invalid.Err()) {
			t.Errorf("%q: %v", digest, err)
		}
	}
}

func TestForeignLayersAreRefused(t *testing.T) {
	l := static.NewLayer([]byte("x"), types.DockerForeignLayer)
	img, err := mutate.Append(makeImage(t), mutate.Addendum{Layer: l, URLs: []string{"http://169.254.169.254/"}})
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if _, err := layout.Write(dir, indexOf(mutate.IndexAddendum{Add: img})); err != nil {
		t.Fatal(err)
	}
	if _, err := tryConvert(t, dir, Options{}); !errors.Is(err, dsec.Invalid.Err()) {
		t.Errorf("got %v", err)
	}
}

func compress(t testing.TB, kind string, b []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	var w io.WriteCloser
	switch kind {
	case "gzip":
		w = gzip.NewWriter(&out)
	case "zstd":
		z, err := zstd.NewWriter(&out)
		if err != nil {
			t.Fatal(err)
		}
		w = z
	default:
		return b
	}
	if _, err := w.Write(b); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// packedLayer is a layer of bytes that are a plain tar compressed.
type packedLayer struct {
	v1.Layer
	plain []byte
}

func (l packedLayer) DiffID() (v1.Hash, error) {
	h, _, err := v1.SHA256(bytes.NewReader(l.plain))
	return h, err
}

// TestSourcesGiveOneTree converts one image from every kind of source.
func TestSourcesGiveOneTree(t *testing.T) {
	low, top := makeTar(t, file("a", "1"), file("b", "1")), makeTar(t, file(".wh.a", ""), file("c", "2"))
	img := makeImage(t, low, top)
	dir := t.TempDir()
	if _, err := layout.Write(dir, indexOf(mutate.IndexAddendum{Add: img})); err != nil {
		t.Fatal(err)
	}
	saved := filepath.Join(t.TempDir(), "saved.tar")
	tag, err := name.NewTag("example.com/x:1")
	if err != nil {
		t.Fatal(err)
	}
	if err := tarball.WriteToFile(saved, tag, img); err != nil {
		t.Fatal(err)
	}
	savedBytes, err := os.ReadFile(saved)
	if err != nil {
		t.Fatal(err)
	}
	ociTar := tarOfDir(t, dir)
	sources := map[string]string{
		"registry": push(t, newRegistry(t)+"/x:1", img), "layout": dir, "layout by scheme": "oci:" + dir,
		"docker archive": saved, "docker archive by tag": "docker-archive:" + saved + ":example.com/x:1",
		"docker archive gz": writeFile(t, compress(t, "gzip", savedBytes)),
		"layout tar":        writeFile(t, ociTar), "layout tar zst": writeFile(t, compress(t, "zstd", ociTar)),
	}
	for _, kind := range []string{"gzip", "zstd", "plain"} {
		l := packedLayer{static.NewLayer(compress(t, kind, low), types.OCILayer), low}
		l2 := packedLayer{static.NewLayer(compress(t, kind, top), types.OCILayerZStd), top} // the type lies; the content counts
		im, err := mutate.AppendLayers(makeImage(t), l, l2)
		if err != nil {
			t.Fatal(err)
		}
		d := t.TempDir()
		if _, err := layout.Write(d, indexOf(mutate.IndexAddendum{Add: im})); err != nil {
			t.Fatal(err)
		}
		sources[kind+" layers"] = d
	}
	var meta, data []byte
	for what, src := range sources {
		t.Run(what, func(t *testing.T) {
			c := mustConvert(t, src, Options{})
			m, d := readFile(t, c.meta), readFile(t, c.data)
			if meta == nil {
				meta, data = m, d
				expect(t, mount(t, c), map[string]string{"b": "1", "c": "2"})
			}
			if !bytes.Equal(m, meta) || !bytes.Equal(d, data) {
				t.Error("another layer than from the first source")
			}
		})
	}
}

func readFile(t testing.TB, p string) []byte {
	t.Helper()
	b, err := os.ReadFile(p)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func tarOfDir(t testing.TB, dir string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := w.AddFS(os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestRootFileSystemTars(t *testing.T) {
	plain := makeTar(t, dir("./"), file("./etc/a", "1"))
	for _, kind := range []string{"plain", "gzip", "zstd"} {
		expect(t, mount(t, mustConvert(t, writeFile(t, compress(t, kind, plain)), Options{})), map[string]string{"etc/a": "1"})
	}
	for what, b := range map[string][]byte{"cut": plain[:700], "cut gzip": compress(t, "gzip", plain)[:60], "noise": bytes.Repeat([]byte("noise"), 300)} {
		if _, err := tryConvert(t, writeFile(t, b), Options{}); err == nil {
			t.Errorf("%s: accepted", what)
		}
	}
}

func TestCaps(t *testing.T) {
	var many []member
	for i := range 100 {
		many = append(many, file(fmt.Sprint(i), "0123456789"))
	}
	tarball := writeFile(t, makeTar(t, many...))
	for what, opts := range map[string]Options{"entries": {MaxEntries: 50}, "bytes": {MaxBytes: 500}} {
		if _, err := tryConvert(t, tarball, opts); !errors.Is(err, dsec.Invalid.Err()) || !strings.Contains(err.Error(), "more than") {
			t.Errorf("%s: %v", what, err)
		}
	}
	bomb := writeFile(t, compress(t, "zstd", makeTar(t, file("zeros", string(make([]byte, 66<<20))))))
	if _, err := tryConvert(t, bomb, Options{}); !errors.Is(err, dsec.Invalid.Err()) || !strings.Contains(err.Error(), "times as many") {
		t.Errorf("ratio: %v", err)
	}
	deep := strings.Repeat("d/", 9000) + "x"
	if _, err := tryConvert(t, writeFile(t, makeTar(t, file(deep, ""))), Options{}); !errors.Is(err, dsec.Invalid.Err()) {
		t.Errorf("depth: %v", err)
	}
}

func TestConfigCaps(t *testing.T) {
	cf := &v1.ConfigFile{Config: v1.Config{Env: []string{"A=" + strings.Repeat("x", dsec.MaxEnvBytes)}}}
	if _, err := configFrom(cf); err == nil {
		t.Error("a huge environment was accepted")
	}
	raw, err := json.Marshal(&v1.ConfigFile{Architecture: goarch(), OS: "linux", Config: v1.Config{Env: []string{"OK=1", "nonsense"}}})
	if err != nil {
		t.Fatal(err)
	}
	c, err := resolver{}.config(raw)
	if err != nil || len(c.Env) != 1 {
		t.Errorf("%+v, %v", c, err)
	}
}
