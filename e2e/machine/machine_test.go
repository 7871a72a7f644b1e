package machine

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/e2e/up"
	"github.com/opendsec/dsec/e2e/vm"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime/fullvm/smalldisk"
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
	var remove func()
	var err error
	if binary, remove, err = up.Build("../.."); err != nil {
		fmt.Println(err)
		return 1
	}
	defer remove()
	// The tests that run beside each other wait for supervisors more than they work; emulated machines work.
	beside := "4"
	if !hosted() {
		beside = "1"
	}
	if err := flag.Set("test.parallel", beside); err != nil {
		fmt.Println(err)
		return 1
	}
	return m.Run()
}

// host is a machine that serves: a real `dsec up` with its own state.
type host struct {
	*up.Machine
	t *testing.T
}

// instances there were: those that run at a time have users and addresses of their own.
var instances atomic.Uint32

const (
	idRanges         = 1100
	instancesAtATime = 56 // more never run, and there are no more users for
)

func start(t *testing.T) *host {
	t.Helper()
	return startIn(t, stateDir(t))
}

// kind is of the sandboxes: of the tier DSEC_TEST_TIER, behind DSEC_TEST_ISOLATION; or containers.
var kind = dsec.Spec{Tier: dsec.Tier(cmp.Or(os.Getenv("DSEC_TEST_TIER"), string(dsec.TierContainer))),
	Isolation: dsec.Isolation(os.Getenv("DSEC_TEST_ISOLATION")), Image: "box"}

// kernels is where those of virtual machines are, brought by the machine's own apt.
func kernels(t *testing.T) string {
	t.Helper()
	dir, err := filepath.Abs("../../.cache/vm")
	if err == nil {
		var k *vm.Kernel
		if k, err = vm.Fetch(t.Context(), dir); err == nil {
			k.Close()
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// hosted says that programs of sandboxes are processes of the machine, and their layers mounts of it: who they are, and
// what of a layer they read, is seen from outside.
func hosted() bool { return kind.Tier == dsec.TierContainer && kind.Isolation == dsec.IsolationDefault }

// smallDisk is what a full VM boots, made once for each test.
func smallDisk(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if _, err := smalldisk.Make(t.Context(), kernels(t), dir, 256); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, "disk")
}

// runsc is the program that `make runsc` made.
func runsc(t *testing.T) string {
	t.Helper()
	made, err := filepath.Glob("../../.cache/runsc/*/runsc")
	if err == nil && len(made) == 1 {
		var path string
		if path, err = filepath.Abs(made[0]); err == nil {
			return path
		}
	}
	t.Fatalf("make runsc makes one program, there are %v, %v", made, err)
	return ""
}

// stateDir is for the state of one machine, which removes it.
func stateDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "dsec-e2e-")
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// startIn keeps its state in dir, which it makes and removes.
func startIn(t *testing.T, dir string) *host {
	t.Helper()
	return startWith(t, dir, "")
}

// startWith has more lines in its configuration, and settings of the node.
func startWith(t *testing.T, dir, lines string, node ...string) *host {
	t.Helper()
	return startBinary(t, binary, dir, lines, node...)
}

// startBinary is startWith, of another program than dsec, which runs it.
func startBinary(t *testing.T, binary, dir, lines string, node ...string) *host {
	t.Helper()
	n := instances.Add(1)
	node = append(node, "disk_pool: 8GiB", fmt.Sprintf("max_live: 1000, uid_ranges: %d, uid_base: %d", idRanges, 1<<20+n%instancesAtATime*(idRanges+1)<<16),
		fmt.Sprintf("subnet: 100.%d.%d.0/20", 96+n%instancesAtATime/16, n%16*16))
	if kind.Tier != dsec.TierContainer {
		node = append(node, "kernel_cache: "+kernels(t))
	}
	if kind.Isolation == dsec.IsolationGVisor {
		node = append(node, "runsc: "+runsc(t))
	}
	conf := "gateway: {listen: ''}\nnode: {" + strings.Join(node, ", ") + "}\n" + lines
	h := &host{t: t, Machine: up.Start(t, binary, fmt.Sprintf("e%d", n), dir, conf)}
	if kind.Tier == dsec.TierFullVM {
		h.cli("image", "add-disk", "box", smallDisk(t), "--agent")
	} else {
		h.image("box", busybox(t))
	}
	return h
}

func (h *host) image(tag string, root []byte) {
	h.t.Helper()
	if _, err := h.UploadTree(h.t.Context(), bytes.NewReader(root), client.BuildOptions{Tag: tag}); err != nil {
		h.t.Fatal(err)
	}
}

func (h *host) create(change func(*dsec.Spec)) dsec.SandboxID {
	h.t.Helper()
	s := kind
	s.Limits = dsec.Limits{CPU: 1, Memory: 128 << 20, Pids: 64, Disk: 64 << 20}
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
	eventuallyWithin(t, up.Within, what, ok)
}

func eventuallyWithin(t *testing.T, within time.Duration, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(within); !ok(); {
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s", within, what)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

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
