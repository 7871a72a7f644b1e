package machine

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/process"
)

// long says that the full lengths are wanted.
var long = os.Getenv("DSEC_LONG") != ""

// binary is the dsec of this tree, built once by TestMain.
var binary string

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	if os.Geteuid() != 0 {
		fmt.Println("skipped: only root can make sandboxes, and this is uid", os.Geteuid())
		return 0
	}
	dir, err := os.MkdirTemp("", "dsec-e2e-")
	if err != nil {
		fmt.Println(err)
		return 1
	}
	defer os.RemoveAll(dir)
	binary = filepath.Join(dir, "dsec")
	cmd := exec.Command("go", "build", "-o", binary, "../../cmd/dsec")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		fmt.Printf("build dsec: %v\n%s", err, out)
		return 1
	}
	// The tests that run beside each other wait for supervisors more than they work.
	if err := flag.Set("test.parallel", "4"); err != nil {
		fmt.Println(err)
		return 1
	}
	return m.Run()
}

// host is a machine that serves: a real `dsec up` with its own state.
type host struct {
	*client.Client
	t    *testing.T
	dir  string
	args []string
	up   *exec.Cmd
	log  *lines

	ended <-chan struct{} // closed when up has
	over  sync.Once       // down
}

// instances there were: those that run at a time have users of their own.
var instances atomic.Uint32

const idRanges = 1100

func start(t *testing.T) *host {
	t.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "dsec-e2e-")
	if err != nil {
		t.Fatal(err)
	}
	return startIn(t, dir)
}

// startIn keeps its state in dir, which it makes and removes.
func startIn(t *testing.T, dir string) *host {
	t.Helper()
	return startWith(t, dir, "")
}

// startWith has more lines in its configuration, and settings of the node.
func startWith(t *testing.T, dir, lines string, node ...string) *host {
	t.Helper()
	err := os.MkdirAll(dir, 0o711)
	if err == nil {
		err = os.Chmod(dir, 0o711) // the gateway is not root
	}
	if err != nil {
		t.Fatal(err)
	}
	h := &host{t: t, dir: dir}
	n := instances.Add(1)
	node = append(node, "disk_pool: 8GiB", fmt.Sprintf("max_live: 1000, uid_ranges: %d, uid_base: %d", idRanges, 1<<20+n%16*idRanges<<16))
	conf := filepath.Join(dir, "dsec.yaml")
	if err := os.WriteFile(conf, []byte("gateway: {listen: ''}\nnode: {"+strings.Join(node, ", ")+"}\n"+lines), 0o600); err != nil {
		t.Fatal(err)
	}
	h.args = []string{"--instance", fmt.Sprintf("e%d", n), "--data", filepath.Join(dir, "data"),
		"--run", filepath.Join(dir, "run"), "--config", conf}
	t.Cleanup(h.down)
	h.serve()
	if h.Client, err = client.New(client.Config{URL: "unix://" + filepath.Join(dir, "run", "gateway.sock")}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = h.Client.Close() })
	h.image("box", busybox(t))
	return h
}

// serve starts `dsec up` and waits until it serves.
func (h *host) serve() {
	h.t.Helper()
	h.log = &lines{}
	h.up = exec.Command(binary, append([]string{"up"}, h.args...)...)
	h.up.Env = append(os.Environ(), "DSEC_CONFIG="+filepath.Join(h.dir, "context.json"))
	h.up.Stdout, h.up.Stderr = h.log, h.log
	if err := h.up.Start(); err != nil {
		h.t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		_ = h.up.Wait()
		close(ended)
	}()
	h.ended = ended
	h.await("dsec is up", 1)
}

// await waits until the log has a text n times, or dsec up has ended.
func (h *host) await(s string, n int) {
	h.t.Helper()
	eventually(h.t, s+" in the log of dsec up", func() bool {
		select {
		case <-h.ended:
			h.t.Fatalf("dsec up has ended:\n%s", h.log)
		default:
		}
		return h.log.count(s) >= n
	})
}

// worth are the lines of a log that are no everyday ones.
func (l *lines) worth() string {
	var out []string
	for _, line := range strings.Split(l.String(), "\n") {
		if !strings.Contains(line, `"level":"INFO"`) {
			out = append(out, line)
		}
	}
	return strings.Join(out, "\n")
}

// down ends everything and wants nothing left.
func (h *host) down() { h.over.Do(h.end) }

func (h *host) end() {
	out, err := exec.Command(binary, append([]string{"down", "--purge"}, h.args...)...).CombinedOutput()
	<-h.ended
	if err != nil || !bytes.Contains(out, []byte("nothing is left")) {
		h.t.Errorf("dsec down: %v\n%s\nlog:\n%s", err, out, h.log)
	}
	if err := os.RemoveAll(h.dir); err != nil {
		h.t.Error(err)
	}
}

// child returns the pid of the newest child of that name.
func (h *host) child(name string) int {
	h.t.Helper()
	pid := 0
	for _, l := range strings.Split(h.log.String(), "\n") {
		var e struct {
			Msg, Name string
			PID       int
		}
		if json.Unmarshal([]byte(l), &e) == nil && e.Msg == "child ready" && e.Name == name {
			pid = e.PID
		}
	}
	if pid == 0 {
		h.t.Fatalf("no child %s in\n%s", name, h.log)
	}
	return pid
}

// kill ends children with SIGKILL and waits until the supervisor has others.
func (h *host) kill(names ...string) {
	h.t.Helper()
	ready := func(name string) string { return `"msg":"child ready","name":"` + name + `"` }
	before := make([]int, len(names))
	for i, name := range names {
		before[i] = h.log.count(ready(name))
		if err := syscall.Kill(h.child(name), syscall.SIGKILL); err != nil {
			h.t.Fatal(err)
		}
	}
	for i, name := range names {
		h.await(ready(name), before[i]+1)
	}
}

func (h *host) image(tag string, root []byte) {
	h.t.Helper()
	if _, err := h.UploadTree(h.t.Context(), bytes.NewReader(root), client.BuildOptions{Tag: tag}); err != nil {
		h.t.Fatal(err)
	}
}

func (h *host) create(change func(*dsec.Spec)) dsec.SandboxID {
	h.t.Helper()
	s := dsec.Spec{Tier: dsec.TierContainer, Image: "box", Limits: dsec.Limits{CPU: 1, Memory: 128 << 20, Pids: 64, Disk: 64 << 20}}
	if change != nil {
		change(&s)
	}
	sb, err := h.Create(h.t.Context(), s)
	if err != nil {
		h.t.Fatal(err)
	}
	return sb.ID
}

// sh runs a shell command to its end.
func (h *host) sh(id dsec.SandboxID, script string) (string, process.Result) {
	h.t.Helper()
	var out bytes.Buffer
	r, err := h.Run(h.t.Context(), id, process.Spec{Argv: []string{"/bin/sh", "-c", script}, Timeout: time.Minute}, &out, &out)
	if err != nil {
		h.t.Fatalf("%s: %v", script, err)
	}
	return out.String(), r
}

// busybox is a root file system of one static program and its names.
func busybox(t *testing.T) []byte {
	t.Helper()
	prog, err := os.ReadFile("/bin/busybox")
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	put := func(h tar.Header, body []byte) {
		h.Size = int64(len(body))
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(body); err != nil {
			t.Fatal(err)
		}
	}
	put(tar.Header{Name: "bin/busybox", Mode: 0o755, Typeflag: tar.TypeReg}, prog)
	for _, name := range strings.Fields("sh true false echo cat sleep seq head dd id hostname pwd ps sha256sum yes kill ls grep tail nc wc mkdir shuf usleep") {
		put(tar.Header{Name: "bin/" + name, Linkname: "busybox", Typeflag: tar.TypeSymlink}, nil)
	}
	put(tar.Header{Name: "tmp/", Mode: 0o1777, Typeflag: tar.TypeDir}, nil)
	put(tar.Header{Name: "root/", Mode: 0o700, Typeflag: tar.TypeDir}, nil)
	put(tar.Header{Name: "etc/passwd", Mode: 0o644, Typeflag: tar.TypeReg}, []byte("root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/tmp:/bin/sh\n"))
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// eventually polls, because what it looks at is another process's.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !ok(); {
		if time.Now().After(end) {
			t.Fatalf("not within 30 s: %s", what)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// lines is a log that others wait on.
type lines struct {
	mu   sync.Mutex
	text bytes.Buffer
}

var _ io.Writer = (*lines)(nil)

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

func (l *lines) count(s string) int { return strings.Count(l.String(), s) }

// states of all sandboxes that are not deleted.
func (h *host) states(ctx context.Context) map[dsec.SandboxID]dsec.State {
	h.t.Helper()
	list, _, err := h.List(ctx, client.ListOptions{})
	if err != nil {
		h.t.Fatal(err)
	}
	out := map[dsec.SandboxID]dsec.State{}
	for _, sb := range list {
		out[sb.ID] = sb.State
	}
	return out
}
