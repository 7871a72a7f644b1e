package mirror

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
)

func TestPyPIAsOfATime(t *testing.T) {
	w := newWorld(t)
	wheels := w.up.pypi(t, "demo-pkg", release{"1.0", before}, release{"2.0", after}, release{"0.9", ""})
	a := w.get("pypi", "/simple/demo-pkg/", "Accept: "+pypiJSON).want(t, 200, "demo_pkg-1.0-py3-none-any.whl", `"versions":["1.0"]`)
	a.lacks(t, "2.0", "0.9", "secret.example", "last-serial", w.up.URL)
	w.get("pypi", "/simple/demo-pkg/").want(t, 200, "<a href=\"/files/demo-pkg/demo_pkg-1.0-py3-none-any.whl#sha256=", `data-requires-python="&gt;=3.8"`, "data-core-metadata").lacks(t, "2.0", "0.9")
	w.get("pypi", "/simple/demo-pkg/", "Accept: "+pypiJSON+";q=0.1, text/html;q=0.5").want(t, 200, "<!DOCTYPE html>")
	for _, name := range []string{"Demo_Pkg/", "demo.pkg/", "demo--pkg/", "demo-pkg"} {
		if got := w.get("pypi", "/simple/"+name).want(t, 301).header.Get("Location"); got != "/simple/demo-pkg/" {
			t.Errorf("%s leads to %q", name, got)
		}
	}
	old := "demo_pkg-1.0-py3-none-any.whl"
	for range 2 { // from upstream, from the cache
		if a := w.get("pypi", "/files/demo-pkg/"+old).want(t, 200); a.body != string(wheels[old]) {
			t.Fatal("the file is another")
		}
	}
	w.get("pypi", "/files/demo-pkg/"+old+".metadata").want(t, 200, "Version: 1.0")
	a = w.get("pypi", "/files/demo-pkg/"+old, "Range: bytes=2-5").want(t, 206)
	if a.body != string(wheels[old][2:6]) {
		t.Error("the part is another")
	}
	w.do(http.MethodHead, "pypi", "/files/demo-pkg/"+old).want(t, 200)
	for _, path := range []string{"/simple/", "/simple", "/pypi/demo-pkg/json", "/pypi/demo-pkg/2.0/json"} {
		w.get("pypi", path).want(t, 403, "not offered")
	}
	w.get("pypi", "/simple/other/").want(t, 404)
	w.let(Access{Services: dsec.Mirrors})
	w.get("pypi", "/simple/demo-pkg/", "Accept: "+pypiJSON).want(t, 200, "2.0", "0.9")
}

// TestAProjectThatIsTooNew is not there, not empty.
func TestAProjectThatIsTooNew(t *testing.T) {
	w := newWorld(t)
	w.up.pypi(t, "new", release{"1.0", after})
	w.up.npm(t, "new", map[string]string{"latest": "1.0.0"}, release{"1.0.0", after})
	w.up.gomod(t, "example.com/new", release{"v1.0.0", after})
	w.get("pypi", "/simple/new/").want(t, 404, "2025-01-31")
	w.get("npm", "/new").want(t, 404)
	w.get("go", "/example.com/new/@v/list").want(t, 200).lacks(t, "v1")
	w.get("go", "/example.com/new/@latest").want(t, 404)
}

func TestNPMAsOfATime(t *testing.T) {
	w := newWorld(t)
	tags := map[string]string{"latest": "2.0.0", "next": "3.0.0-rc.1", "old": "1.0.0", "odd": "nothing"}
	all := []release{{"1.0.0", before}, {"1.10.0", before}, {"1.9.0", before}, {"1.11.0-beta.1", before}, {"2.0.0", after}, {"3.0.0-rc.1", after}, {"0.1.0", ""}}
	w.up.npm(t, "demo", tags, all...)
	w.up.npm(t, "@sc/demo", tags, all...)
	for _, name := range []string{"demo", "@sc/demo"} {
		for _, path := range []string{"/" + name, "/" + strings.Replace(name, "/", "%2f", 1), "/" + strings.Replace(name, "@", "%40", 1)} {
			a := w.get("npm", path).want(t, 200, `"latest":"1.10.0"`, `"next":"1.11.0-beta.1"`, `"old":"1.0.0"`, "http://npm.mirror.dsec/"+name+"/-/demo-1.10.0.tgz", "what 1.10.0 does")
			a.lacks(t, "2.0.0", "3.0.0", "0.1.0", "secret", "2025", "odd", w.up.URL)
		}
		short := w.get("npm", "/"+name, "Accept: "+npmShort+"; q=1.0, application/json; q=0.8").want(t, 200, `"latest":"1.10.0"`, "1.9.0", "modified")
		short.lacks(t, "2.0.0", "scripts", `"time"`, "created", "description")
		w.get("npm", "/"+name+"/latest").want(t, 200, `"version":"1.10.0"`, "npm.mirror.dsec")
		w.get("npm", "/"+name+"/1.0.0").want(t, 200, `"version":"1.0.0"`)
		w.get("npm", "/"+name+"/2.0.0").want(t, 404)
		w.get("npm", "/"+name+"/-/demo-1.10.0.tgz").want(t, 200)
		w.get("npm", "/"+name+"/-/demo-2.0.0.tgz").want(t, 404)
	}
	w.get("npm", "/-/v1/search?text=demo").want(t, 403)
	w.get("npm", "/-/package/demo/dist-tags").want(t, 403)
	w.get("npm", "/-/ping").want(t, 200)
	w.let(Access{Services: dsec.Mirrors})
	w.get("npm", "/demo").want(t, 200, `"latest":"2.0.0"`, "3.0.0-rc.1", "0.1.0")
}

func TestGoAsOfATime(t *testing.T) {
	w := newWorld(t)
	const path = "example.com/Up/Mod"
	pseudo := "v1.4.1-0.20250601100000-0123456789ab"
	w.up.gomod(t, path, release{"v1.2.0", before}, release{"v1.10.0", before}, release{"v1.11.0-RC1", before}, release{"v2.0.0+incompatible", before},
		release{"v1.3.0", after}, release{pseudo, after})
	at := "/example.com/!up/!mod/"
	w.up.bytes("/go"+at+"@v/master.info", "application/json", fmt.Appendf(nil, `{"Version":%q,"Time":%q}`, pseudo, after))
	w.up.bytes("/go"+at+"@v/old.info", "application/json", fmt.Appendf(nil, `{"Version":"v1.2.0","Time":%q}`, before))
	w.up.bytes("/go"+at+"@latest", "application/json", fmt.Appendf(nil, `{"Version":%q,"Time":%q}`, pseudo, after))
	list := w.get("go", at+"@v/list").want(t, 200).body
	if list != "v1.2.0\nv1.10.0\nv1.11.0-RC1\nv2.0.0+incompatible\n" {
		t.Errorf("versions %q", list)
	}
	w.get("go", at+"@latest").want(t, 200, `"v1.10.0"`).lacks(t, "secret", "Origin")
	for _, ext := range []string{"info", "mod", "zip"} {
		w.get("go", at+"@v/v1.2.0."+ext).want(t, 200)
		w.get("go", at+"@v/v1.11.0-!r!c1."+ext).want(t, 200)
		w.get("go", at+"@v/v1.3.0."+ext).want(t, 404, "newer than the cut-off")
		w.get("go", at+"@v/"+pseudo+"."+ext).want(t, 404)
	}
	w.get("go", at+"@v/old.info").want(t, 200, "v1.2.0")
	for _, what := range []string{"@v/master.info", "@v/master.zip", "@v/old.zip", "@v/old.mod", "@v/v1.2.0.lock", "@v/", "@v", ""} {
		w.get("go", at+what).want(t, 404)
	}
	w.up.bytes("/lookup/example.com/!up/!mod@v1.2.0", "text/plain", []byte("a sum"))
	w.up.bytes("/lookup/example.com/!up/!mod@v1.3.0", "text/plain", []byte("a sum"))
	w.up.bytes("/tile/8/0/x001/234.p/5", "", []byte("a tile"))
	w.up.bytes("/tile/8/data/000", "", []byte("records"))
	db := "/sumdb/" + strings.TrimPrefix(w.up.URL, "http://")
	w.get("go", db+"/supported").want(t, 200)
	w.get("go", db+"/lookup/example.com/!up/!mod@v1.2.0").want(t, 200, "a sum")
	w.get("go", db+"/lookup/example.com/!up/!mod@v1.3.0").want(t, 404)
	w.get("go", db+"/tile/8/0/x001/234.p/5").want(t, 200, "a tile")
	w.get("go", db+"/tile/8/data/000").want(t, 404)
	w.get("go", "/sumdb/other.example/supported").want(t, 404)
}

// TestDebianIsServedAsItIs: whatever the cut-off says.
func TestDebianIsServedAsItIs(t *testing.T) {
	w := newWorld(t)
	w.up.bytes("/debian/dists/bookworm/InRelease", "", []byte("signed"))
	w.up.bytes("/debian/pool/main/h/hello/hello_2.10-3_amd64.deb", "", []byte("a package"))
	w.up.bytes("/sec/dists/x/main/by-hash/SHA256/"+sum256([]byte("list")), "", []byte("list"))
	w.up.bytes("/sec/dists/x/main/by-hash/SHA256/"+sum256([]byte("lost")), "", []byte("another"))
	w.get("debian", "/debian/dists/bookworm/InRelease").want(t, 200, "signed")
	w.get("debian", "/debian/pool/main/h/hello/hello_2.10-3_amd64.deb").want(t, 200, "a package")
	w.get("debian", "/debian-security/dists/x/main/by-hash/SHA256/"+sum256([]byte("list"))).want(t, 200, "list")
	w.get("deb.debian.org", "/debian/dists/bookworm/InRelease").want(t, 200, "signed") // as images have it
	if a := w.get("debian", "/debian-security/dists/x/main/by-hash/SHA256/"+sum256([]byte("lost"))); a.err == nil && a.status == 200 {
		t.Errorf("a list of another digest was served: %+v", a)
	}
	for _, path := range []string{"/debian/", "/debian", "/debian/pool/", "/other/x", "/debian/doc/README"} {
		w.get("debian", path).want(t, 404)
	}
	w.let(Access{Services: dsec.Mirrors, Deny: map[string][]string{"debian": {"hello"}}})
	w.get("debian", "/debian/pool/main/h/hello/hello_2.10-3_amd64.deb").want(t, 403, "denied")
}

// TestWhoMayAskWhat: nobody else, nothing else, no other method.
func TestWhoMayAskWhat(t *testing.T) {
	w := newWorld(t)
	w.up.pypi(t, "demo", release{"1.0", before})
	w.get("pypi", "/simple/demo/", "Authorization: Basic c2VjcmV0", "Cookie: a=b", "Referer: http://x", "X-Forwarded-For: 1.2.3.4", "User-Agent: spy").want(t, 200)
	for _, h := range w.up.heads {
		for _, k := range []string{"Authorization", "Cookie", "Referer", "X-Forwarded-For"} {
			if h.Get(k) != "" {
				t.Errorf("upstream was given %s", k)
			}
		}
		if h.Get("User-Agent") != "dsec-mirror" {
			t.Errorf("upstream was told of %q", h.Get("User-Agent"))
		}
	}
	for _, method := range []string{"POST", "PUT", "DELETE", "OPTIONS", "CONNECT"} {
		w.do(method, "pypi", "/simple/demo/").want(t, 405, "read-only")
	}
	w.let(Access{Services: []string{"go"}})
	w.get("pypi", "/simple/demo/").want(t, 403, "policy of this sandbox")
	w.get("evil.example", "/simple/demo/").want(t, 403)
	w.let(Access{Services: dsec.Mirrors, Deny: map[string][]string{"pypi": {"De.Mo_x"}, "npm": {"Left-Pad"}, "go": {"github.com/Foo/bar"}}})
	w.get("pypi", "/simple/DE_MO--X/").want(t, 403, "denied to this sandbox")
	w.get("pypi", "/files/de-mo-x/a.whl").want(t, 403)
	w.get("npm", "/left-pad").want(t, 403)
	w.get("npm", "/left-pad/-/left-pad-1.0.0.tgz").want(t, 403)
	for _, p := range []string{"github.com/foo/bar", "github.com/!foo/!bar", "github.com/foo/bar/v2", "github.com/foo/bar/sub"} {
		w.get("go", "/"+p+"/@v/list").want(t, 403)
	}
	w.get("go", "/github.com/foo/barn/@v/list").want(t, 404)
	w.mu.Lock()
	w.known = false
	w.mu.Unlock()
	w.get("pypi", "/simple/demo/").want(t, 403, "no sandbox has this address")
}

func TestVersionsAreOrdered(t *testing.T) {
	order := []string{"0.9.9", "1.0.0-1", "1.0.0-alpha", "1.0.0-alpha.1", "1.0.0-alpha.beta", "1.0.0-beta.2", "1.0.0-beta.11", "1.0.0", "1.2.0", "1.10.0", "100000000000000000000.0.0"}
	for i, a := range order {
		for j, b := range order {
			x, ok := parseSemver(a)
			y, ok2 := parseSemver(b + "+build")
			if got := x.compare(y); !ok || !ok2 || (got < 0) != (i < j) || (got == 0) != (i == j) {
				t.Errorf("%s against %s: %d", a, b, got)
			}
		}
	}
	for _, bad := range []string{"", "1", "1.0", "1.0.0.0", "01.0.0", "1.0.0-", "v1.0.0", "1.x.0"} {
		if _, ok := parseSemver(bad); ok {
			t.Errorf("%q is a version", bad)
		}
	}
}

// TestYankedStaysAsItIs, with what was said, and nothing breaks out of the page.
func TestYankedStaysAsItIs(t *testing.T) {
	w := newWorld(t)
	w.up.index("y", map[string]any{"name": "Y", "files": []any{
		map[string]any{"filename": "y-1.tar.gz", "url": w.up.URL + "/y", "hashes": map[string]string{"sha256": sum256(nil)}, "upload-time": before, "yanked": `bad "><script>`},
		map[string]any{"filename": "y-2.tar.gz", "url": w.up.URL + "/y", "hashes": map[string]string{"sha256": sum256(nil)}, "upload-time": before, "yanked": true, "core-metadata": true},
		map[string]any{"filename": "y-3.tar.gz\r\nX: y", "url": w.up.URL + "/y", "hashes": map[string]string{"sha256": sum256(nil)}, "upload-time": before},
		map[string]any{"filename": "y-4.tar.gz", "url": w.up.URL + "/y", "hashes": map[string]string{"md5": "x"}, "upload-time": before}, "nonsense", 7}})
	w.get("pypi", "/simple/y/").want(t, 200, `data-yanked="bad &#34;&gt;&lt;script&gt;"`, `data-yanked=""`).lacks(t, "<script>", "y-3", "y-4", "core-metadata")
	var doc struct{ Files []map[string]any }
	if err := json.Unmarshal([]byte(w.get("pypi", "/simple/y/", "Accept: "+pypiJSON).body), &doc); err != nil || len(doc.Files) != 2 || doc.Files[1]["yanked"] != true {
		t.Errorf("%v %v", err, doc)
	}
}
