package machine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/files"
	"github.com/opendsec/dsec/process"
)

func TestA25_ASignalReachesTheCommandItWasMeantForOrNobody(t *testing.T) {
	t.Parallel()
	h := start(t)
	id := h.create(nil)
	first, err := h.Exec(t.Context(), id, process.Spec{Argv: []string{"/bin/true"}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := first.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	other, err := h.Exec(t.Context(), id, process.Spec{Argv: []string{"/bin/sleep", "600"}})
	if err != nil {
		t.Fatal(err)
	}
	if err := first.Signal(t.Context(), int(syscall.SIGKILL)); dsec.ClassOf(err) != dsec.IllegalState {
		t.Errorf("signal to an ended command: %v", err)
	}
	if killed, err := first.Kill(t.Context()); err != nil || killed {
		t.Errorf("kill of an ended command: %v, %v", killed, err)
	}
	if err := other.Signal(t.Context(), int(syscall.SIGTERM)); err != nil {
		t.Fatal(err)
	}
	if r, err := other.Wait(t.Context()); err != nil || r.ExitCode != 128+int(syscall.SIGTERM) {
		t.Errorf("%+v, %v", r, err)
	}
}

// B11: an image with one static program, no shell, and a WORKDIR it does not have.
func TestB11_AWorkingDirectoryThatIsMissingIsMade(t *testing.T) {
	t.Parallel()
	h := start(t)
	root := staticLayout(t)
	if _, err := h.Import(t.Context(), "oci:"+root, "static", nil); err != nil {
		t.Fatal(err)
	}
	id := h.create(func(s *dsec.Spec) { s.Image = "static" })
	var out bytes.Buffer
	r, err := h.Run(t.Context(), id, process.Spec{Argv: []string{"/busybox", "pwd"}}, &out, &out)
	if err != nil || r.ExitCode != 0 || out.String() != "/app/deep\n" {
		t.Errorf("%q, %+v, %v", out.String(), r, err)
	}
}

// staticLayout is an OCI layout of an image with one program.
func staticLayout(t *testing.T) string {
	t.Helper()
	root := filepath.Join(t.TempDir(), "layout")
	l, err := tarball.LayerFromFile(oneProgram(t))
	if err != nil {
		t.Fatal(err)
	}
	img, err := mutate.AppendLayers(empty.Image, l)
	if err != nil {
		t.Fatal(err)
	}
	conf, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	conf.Config.WorkingDir, conf.OS, conf.Architecture = "/app/deep", "linux", "amd64"
	conf.Config.Env = []string{"FROM_IMAGE=yes"}
	if img, err = mutate.ConfigFile(img, conf); err != nil {
		t.Fatal(err)
	}
	p, err := layout.Write(root, empty.Index)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.AppendImage(img); err != nil {
		t.Fatal(err)
	}
	return root
}

// oneProgram is a tar of busybox alone.
func oneProgram(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	text, err := os.ReadFile("/bin/busybox")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "busybox"), text, 0o755); err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(t.TempDir(), "prog.tar")
	if msg, err := exec.Command("tar", "-C", dir, "-cf", out, "busybox").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, msg)
	}
	return out
}

func TestB18_ALongHostNameIsShortened(t *testing.T) {
	t.Parallel()
	h := start(t)
	id := h.create(func(s *dsec.Spec) { s.Hostname = strings.Repeat("x", 200) })
	if out, _ := h.sh(id, "hostname"); out != strings.Repeat("x", 63)+"\n" {
		t.Errorf("host name %q", out)
	}
}

func TestC8_KeptOutputIsBoundedOnDisk(t *testing.T) {
	t.Parallel()
	h := start(t)
	id := h.create(nil)
	size := 128 << 20
	if long {
		size = 5 << 30
	}
	before := h.onDisk(id)
	p, err := h.Exec(t.Context(), id, process.Spec{Argv: []string{"/bin/head", "-c", strconv.Itoa(size), "/dev/zero"}})
	if err != nil {
		t.Fatal(err)
	}
	r, err := p.Wait(t.Context())
	if err != nil || r.Stdout.Total != int64(size) || !r.Stdout.Truncated {
		t.Fatalf("%+v, %v", r, err)
	}
	if more := h.onDisk(id) - before; more > 24<<20 {
		t.Errorf("%d bytes of kept output, and what the machine noted meanwhile, on disk", more)
	}
	if out, r := h.sh(id, "dd if=/dev/urandom of=/root/big bs=1M count=32"); r.ExitCode != 0 { // which would have been seen
		t.Fatalf("%q, %+v", out, r)
	}
	if more := h.onDisk(id) - before; more < 32<<20 {
		t.Errorf("32 MiB that were written are %d bytes on disk", more)
	}
}

// onDisk is what files of the machine take, and all disks in them, after everything was written.
func (h *host) onDisk(id dsec.SandboxID) (used int64) {
	h.t.Helper()
	h.sh(id, "busybox sync")
	unix.Sync()
	err := filepath.WalkDir(filepath.Join(h.Dir, "data"), func(path string, d fs.DirEntry, err error) error {
		var st unix.Stat_t
		if err == nil && d.Type().IsRegular() && unix.Lstat(path, &st) == nil { // some end while they are looked at
			used += st.Blocks * 512
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	})
	if err != nil {
		h.t.Fatal(err)
	}
	return used
}

func TestD16_WhatWasWrittenIsThereAfterStopAndStart(t *testing.T) {
	t.Parallel()
	h := start(t)
	id := h.create(func(s *dsec.Spec) { s.Limits.Disk = 256 << 20 })
	body := bytes.Repeat([]byte("0123456789abcdef"), 100<<20/16)
	fs := h.Files(id, "")
	if _, err := fs.Write(t.Context(), "/root/big", bytes.NewReader(body), files.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	want, _ := h.sh(id, "sha256sum /root/big")
	if _, err := h.Stop(t.Context(), id, ""); err != nil {
		t.Fatal(err)
	}
	sb, err := h.Start(t.Context(), id)
	if err != nil || sb.Starts != 2 || sb.ID != id {
		t.Fatalf("%+v, %v", sb, err)
	}
	if got, _ := h.sh(id, "sha256sum /root/big"); got != want || got == "" {
		t.Errorf("before %q, after %q", want, got)
	}
}

func TestI5_TheAgentIsNeverTheVictim(t *testing.T) {
	h := start(t)
	id := h.create(func(s *dsec.Spec) { s.Limits.Memory = 32 << 20 })
	if _, err := h.Exec(t.Context(), id, process.Spec{Argv: []string{"/bin/sleep", "600"}}); err != nil {
		t.Fatal(err)
	}
	theirs := h.processesOf(id)
	if len(theirs) == 0 {
		t.Error("the machine has no process of the sandbox")
	}
	for _, pid := range theirs {
		if line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); err == nil && string(line) == "init\x00" {
			continue // has nothing to give
		}
		if adj := oomScoreAdj(t, pid); adj < 500 {
			t.Errorf("process %d of the sandbox has oom_score_adj %d", pid, adj)
		}
	}
	for _, pid := range []int{h.Child("node"), h.Child("gateway"), h.holdPID()} {
		if adj := oomScoreAdj(t, pid); adj >= 500 {
			t.Errorf("process %d of ours has oom_score_adj %d", pid, adj)
		}
	}
	node, hold := h.Child("node"), h.holdPID()
	r, err := h.Run(t.Context(), id, process.Spec{Argv: []string{"/bin/tail", "/dev/zero"}, Timeout: time.Minute}, nil, nil)
	whole := kind.Isolation == dsec.IsolationGVisor // has a kernel that dies with it
	if err != nil || !r.OOM || r.ExitCode != 137 || r.OOMLimit != 32<<20 != whole {
		t.Errorf("%+v, %v", r, err)
	}
	if h.Child("node") != node || h.holdPID() != hold || syscall.Kill(node, 0) != nil {
		t.Error("the agent was hit")
	}
	if whole {
		eventually(t, "the sandbox has ended of it", func() bool {
			sb, err := h.Get(t.Context(), id)
			return err == nil && sb.Result != nil && sb.Result.Cause == dsec.CauseOOM
		})
		id = h.create(nil)
	}
	if out, _ := h.sh(id, "echo lives"); out != "lives\n" {
		t.Errorf("after the kill the sandbox says %q", out)
	}
}

func oomScoreAdj(t *testing.T, pid int) (adj int) {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid))
	if err == nil {
		_, err = fmt.Sscan(string(text), &adj)
	}
	if err != nil {
		t.Fatal(err)
	}
	return adj
}

// G10: what was created, what failed and what was tried twice can be read.
func TestMetricsOfTheNodeAreServedByTheGateway(t *testing.T) {
	t.Parallel()
	h := start(t)
	h.create(nil)
	if text := h.counts(); !strings.Contains(text, `dsec_node_creations_total{outcome="ok"} 1`) {
		t.Error(text)
	}
}

// counts are the numbers of the node.
func (h *host) counts() string {
	h.t.Helper()
	nodes, err := h.Nodes(h.t.Context())
	if err != nil || len(nodes) != 1 {
		h.t.Fatalf("%v, %v", nodes, err)
	}
	http := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(h.Dir, "run", "gateway.sock"))
	}}}
	defer http.CloseIdleConnections()
	resp, err := http.Get("http://dsec/v1/nodes/" + string(nodes[0].ID) + "/metrics")
	if err != nil {
		h.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		h.t.Fatal(err)
	}
	return string(text)
}

// A refused upload is an error for its caller and nothing for the log.
func TestRefusedUploadsAreQuiet(t *testing.T) {
	t.Parallel()
	h := start(t)
	for _, o := range []client.BuildOptions{{Tag: "x", Owner: "bob"}, {Tag: "bad tag!"}} {
		if _, err := h.UploadTree(t.Context(), bytes.NewReader(busybox(t)), o); dsec.ClassOf(err) != dsec.Invalid {
			t.Errorf("%+v: %v", o, err)
		}
	}
	id := h.create(nil)
	if _, err := h.Commit(t.Context(), id, client.CommitOptions{Tag: "bad tag!"}); dsec.ClassOf(err) != dsec.Invalid {
		t.Errorf("commit: %v", err)
	}
	if state := h.states(t.Context())[id]; state != dsec.Running {
		t.Errorf("a refused commit left it %s", state)
	}
	if strings.Contains(h.Log.String(), "panic") {
		t.Errorf("the log:\n%s", h.Log)
	}
}

// What the kernel counts for each user must not be counted together: one
// sandbox would use up the inotify instances of all, and of the machine.
func TestOneSandboxCannotUseUpAnothersWatches(t *testing.T) {
	t.Parallel()
	h := start(t)
	hog := filepath.Join(t.TempDir(), "hog")
	build := exec.Command("go", "build", "-o", hog, "./testdata/hog")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	text, err := os.ReadFile(hog)
	if err != nil {
		t.Fatal(err)
	}
	mode := uint32(0o755)
	greedy, other := h.create(nil), h.create(nil)
	for _, id := range []dsec.SandboxID{greedy, other} {
		if _, err := h.Files(id, "").Write(t.Context(), "/hog", bytes.NewReader(text), files.WriteOptions{Mode: &mode}); err != nil {
			t.Fatal(err)
		}
	}
	p, err := h.Exec(t.Context(), greedy, process.Spec{Argv: []string{"/hog", "100000"}, Stdin: true})
	if err != nil {
		t.Fatal(err)
	}
	enough := errors.New("it has said how many")
	var got bytes.Buffer
	_, err = p.Follow(t.Context(), client.Offsets{}, func(c client.Chunk) error {
		if got.Write(c.Data); bytes.HasSuffix(got.Bytes(), []byte("\n")) {
			return enough
		}
		return nil
	})
	if n, _ := strconv.Atoi(strings.TrimSpace(got.String())); !errors.Is(err, enough) || n < 50 {
		t.Fatalf("it got %q: %v", got.String(), err)
	}
	if out, r := h.sh(other, "/hog 10 </dev/null"); r.ExitCode != 0 || out != "10\n" {
		t.Errorf("the other sandbox gets %q of 10", out)
	}
	fd, err := syscall.InotifyInit()
	if err != nil {
		t.Fatalf("the machine gets none: %v", err)
	}
	_ = syscall.Close(fd)
	if out, _ := h.sh(other, "grep devpts /proc/mounts"); !strings.Contains(out, "max=64") && kind.Isolation == dsec.IsolationDefault {
		t.Errorf("terminals are not limited: %q", out)
	}
}

// What people have on their own machine becomes an image through the command line.
func TestDirectoriesAndLayoutsAreImported(t *testing.T) {
	t.Parallel()
	h := start(t)
	h.cli("image", "import", staticLayout(t), "--tag", "layout")
	tree := t.TempDir()
	if out, err := exec.Command("tar", "-C", tree, "-xf", oneProgram(t)).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	h.cli("image", "import", tree, "--tag", "tree")
	for _, image := range []string{"layout", "tree"} {
		h.cli("run", image, "--", "/busybox", "true")
	}
}
