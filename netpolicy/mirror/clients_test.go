package mirror

import (
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/netpolicy"
)

// run runs a real client as a sandbox has it: with the environment the platform
// sets. The names of the mirror are found by making it the proxy.
func (w *world) run(dir string, extra []string, name string, args ...string) (string, error) {
	w.t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + dir, "http_proxy=" + w.front.URL, "HTTP_PROXY=" + w.front.URL, "https_proxy=http://127.0.0.1:1", "HTTPS_PROXY=http://127.0.0.1:1"}
	for k, v := range netpolicy.MirrorEnvironment(dsec.NetworkPolicy{Mode: dsec.NetworkMirror}) {
		cmd.Env = append(cmd.Env, k+"="+v)
	}
	cmd.Env = append(cmd.Env, extra...)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// need skips, with what trying says, where a client is not there.
func need(t *testing.T, name string, args ...string) {
	t.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		t.Skipf("%s %v: %v %s", name, args, err, out)
	}
}

// TestTheRealPip gets what was there at the time, and nothing newer by name.
func TestTheRealPip(t *testing.T) {
	need(t, "python3", "-m", "pip", "--version")
	w := newWorld(t)
	w.up.pypi(t, "demo-pkg", release{"1.0", before}, release{"1.1", before}, release{"2.0", after})
	w.up.pypi(t, "secret", release{"1.0", before})
	dir := t.TempDir()
	pip := func(what string) (string, error) {
		return w.run(dir, nil, "python3", "-m", "pip", "download", "--no-cache-dir", "--disable-pip-version-check", "--retries=0", "-d", dir+"/got", what)
	}
	if out, err := pip("Demo_Pkg"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	got, _ := filepath.Glob(dir + "/got/*")
	if len(got) != 1 || filepath.Base(got[0]) != "demo_pkg-1.1-py3-none-any.whl" {
		t.Errorf("got %v", got)
	}
	if out, err := pip("demo-pkg==2.0"); err == nil || !strings.Contains(out, "from versions: 1.0, 1.1)") {
		t.Errorf("2.0: %v: %s", err, out)
	}
	w.let(Access{Services: dsec.Mirrors, Cutoff: cutoff, Deny: map[string][]string{"pypi": {"Secret"}}})
	if out, err := pip("secret"); err == nil {
		t.Errorf("a denied name: %s", out)
	}
}

// TestTheRealNPM installs what latest was, and nothing newer by number.
func TestTheRealNPM(t *testing.T) {
	need(t, "npm", "--version")
	w := newWorld(t)
	w.up.npm(t, "@sc/demo", map[string]string{"latest": "2.0.0"}, release{"1.0.0", before}, release{"1.1.0", before}, release{"2.0.0", after})
	dir := t.TempDir()
	npm := func(what string) (string, error) {
		return w.run(dir, []string{"npm_config_fetch_retries=0", "npm_config_https_proxy=" + w.front.URL}, "npm", "install", "--no-audit", "--no-fund", what)
	}
	if out, err := npm("@sc/demo"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if b, err := os.ReadFile(dir + "/node_modules/@sc/demo/package.json"); err != nil || !strings.Contains(string(b), `"version":"1.1.0"`) {
		t.Errorf("installed %s %v", b, err)
	}
	if out, err := npm("@sc/demo@2.0.0"); err == nil || !strings.Contains(out, "ETARGET") {
		t.Errorf("2.0.0: %v: %s", err, out)
	}
}

// TestTheRealGo downloads the newest of that time, and nothing newer by version.
func TestTheRealGo(t *testing.T) {
	need(t, "go", "version")
	var to string
	w := newWorld(t, func(c *Config) {
		c.Upstreams.SumDB = "http://sum.golang.org" // whose name it is, wherever it leads
		c.Dial = func(ctx context.Context, network, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, network, to)
		}
	})
	to = w.up.Listener.Addr().String()
	w.up.gomod(t, "example.com/Demo", release{"v1.0.0", before}, release{"v1.1.0", before}, release{"v1.2.0", after})
	dir := t.TempDir()
	if err := os.WriteFile(dir+"/go.mod", []byte("module m\n\ngo 1.20\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	extra := []string{"GOFLAGS=-modcacherw", "GOMODCACHE=" + dir + "/mod", "GOCACHE=" + dir + "/cache", "GOTOOLCHAIN=local", "GONOSUMDB=example.com"}
	if out, err := w.run(dir, extra, "go", "get", "example.com/Demo@latest"); err != nil || !strings.Contains(out, "v1.1.0") {
		t.Fatalf("%v: %s", err, out)
	}
	if out, err := w.run(dir, extra, "go", "list", "-m", "-versions", "example.com/Demo"); err != nil || strings.TrimSpace(out) != "example.com/Demo v1.0.0 v1.1.0" {
		t.Errorf("%v: %s", err, out)
	}
	if out, err := w.run(dir, extra, "go", "mod", "download", "example.com/Demo@v1.2.0"); err == nil || !strings.Contains(out, "404") {
		t.Errorf("v1.2.0: %v: %s", err, out)
	}
	// The checksum database is asked through the mirror; what is signed by nobody is
	// not believed.
	w.up.bytes("/latest", "text/plain", []byte("no tree\n"))
	w.up.bytes("/lookup/example.com/!demo@v1.0.0", "text/plain", []byte("1\nexample.com/Demo v1.0.0 h1:x\n\nno tree\n"))
	out, err := w.run(dir, append(extra, "GONOSUMDB=", "GOMODCACHE="+dir+"/other"), "go", "mod", "download", "example.com/Demo@v1.0.0")
	if err == nil || w.up.times("/latest")+w.up.times("/lookup/example.com/!demo@v1.0.0") == 0 {
		t.Errorf("%v: %s", err, out)
	}
}
