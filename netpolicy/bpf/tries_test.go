package bpf

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/netpolicy"
)

// group makes a control group of the v2 tree with one below it, in which processes
// are, as a sandbox's commands are.
func group(t *testing.T) (root *os.File, number uint64, leaf *os.File) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("control groups are made by root here; uid is", os.Geteuid())
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	var tree string
	for line := range strings.Lines(string(mounts)) {
		if f := strings.Fields(line); f[2] == "cgroup2" {
			tree = f[1]
		}
	}
	if tree == "" {
		t.Skip("no cgroup v2 tree is mounted:\n" + string(mounts))
	}
	top := filepath.Join(tree, fmt.Sprintf("dsec-bpf-%d", os.Getpid()))
	dirs := []string{top, top + "/box", top + "/box/exec"}
	files := make([]*os.File, len(dirs))
	for i, dir := range dirs {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := os.Remove(dir); err != nil {
				t.Error(err)
			}
		})
		if files[i], err = os.Open(dir); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = files[i].Close() })
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(files[1].Fd()), &st); err != nil {
		t.Fatal(err)
	}
	return files[0], st.Ino, files[2]
}

// tries runs a Python program in a control group and a network namespace without
// links, and returns what its sockets said.
func tries(t *testing.T, in *os.File, tries ...string) []string {
	t.Helper()
	program := "import socket,errno,os\ndef say(f):\n try:\n  f(); print('ok')\n except OSError as e:\n  print(errno.errorcode[e.errno])\n" +
		"T=socket.SOCK_STREAM;U=socket.SOCK_DGRAM;s=socket.socket;F=socket.AF_INET;X=socket.AF_INET6\n"
	for _, try := range tries {
		program += "say(lambda: " + try + ")\n"
	}
	cmd := exec.Command("python3", "-c", program)
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(in.Fd()), Cloneflags: syscall.CLONE_NEWNET}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return strings.Fields(string(out))
}

func TestWhatIsTriedIsRefusedAtOnceAndToldWithWhoTried(t *testing.T) {
	root, number, leaf := group(t)
	g := gate(t)
	rules := []dsec.NetworkRule{{CIDR: "203.0.113.7", Ports: []string{"443"}}, {CIDR: "203.0.113.8", Protocol: "udp", Ports: []string{"53"}}}
	plan, err := netpolicy.Compile(dsec.NetworkAllow, rules, netpolicy.Ground{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := g.Apply(loopback, plan); err != nil {
		t.Fatal(err)
	}
	told := make(chan netpolicy.Refusal, 64)
	stop, err := g.Refusals(func(r netpolicy.Refusal) { told <- r })
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	for range 2 { // the second is another version's, which replaces the first
		if err := g.Guard(root); err != nil {
			t.Fatal(err)
		}
	}
	const denied, open = "EPERM", "another error, or none"
	cases := []struct{ try, want string }{
		{"s(F,T).connect(('203.0.113.7',443))", open},
		{"s(F,T).connect(('203.0.113.7',80))", denied},
		{"s(F,T).connect(('203.0.113.9',443))", denied},
		{"s(F,U).connect(('203.0.113.8',53))", open},
		{"s(F,U).sendto(b'x',('203.0.113.8',53))", open},
		{"s(F,U).sendto(b'x',('203.0.113.8',54))", denied},
		{"s(F,U).sendto(b'x',('203.0.113.7',443))", denied},
		{"s(X,T).connect(('::ffff:203.0.113.7',443))", open},
		{"s(X,T).connect(('::ffff:203.0.113.9',443))", denied},
		{"s(X,U).sendto(b'x',('::ffff:203.0.113.9',443))", denied},
		{"s(X,T).connect(('2001:db8::1',443))", open},
		{"s(F,T).connect(('127.0.0.1',443))", open},
		{fmt.Sprintf("s(F,T).connect(('%s',443))", own), open},
	}
	var all []string
	for _, c := range cases {
		all = append(all, c.try)
	}
	for i, got := range tries(t, leaf, all...) {
		if got == denied {
			t.Errorf("%s of a group that nobody has bound: %s", all[i], got)
		}
	}
	if err := g.Bind(loopback, number); err != nil {
		t.Fatal(err)
	}
	refusals := 0
	for i, got := range tries(t, leaf, all...) {
		if (got == denied) != (cases[i].want == denied) {
			t.Errorf("%s: %s, want %s", all[i], got, cases[i].want)
		}
		if cases[i].want == denied {
			refusals++
		}
	}
	for i := range refusals {
		select {
		case r := <-told:
			if r.Program != "python3" || r.PID == 0 || r.UID != 0 || r.Link != loopback || r.Generation != 1 {
				t.Errorf("%+v", r)
			}
			if i == 0 && r.String() != "tcp 203.0.113.7:80" {
				t.Errorf("the first was %s", r)
			}
		case <-time.After(5 * time.Second):
			t.Fatalf("%d of %d were told", i, refusals)
		}
	}
	if n, err := g.Counts(loopback); err != nil || n.Refused != int64(refusals) {
		t.Errorf("%d were counted, %v; want %d", n.Refused, err, refusals)
	}
}

// TestAPinOpensWhatIsTried: a name's address is open to those who ask for it.
func TestAPinOpensWhatIsTried(t *testing.T) {
	root, number, leaf := group(t)
	g := gate(t)
	if _, err := g.Apply(loopback, netpolicy.Plan{}); err != nil {
		t.Fatal(err)
	}
	if err := g.Guard(root); err != nil {
		t.Fatal(err)
	}
	if err := g.Bind(loopback, number); err != nil {
		t.Fatal(err)
	}
	a := netip.MustParseAddr("203.0.113.7")
	try := []string{"s(F,T).connect(('203.0.113.7',443))", "s(F,T).connect(('203.0.113.7',80))"}
	if got := tries(t, leaf, try...); got[0] != "EPERM" {
		t.Errorf("before: %v", got)
	}
	if err := g.Pin(loopback, a, []netpolicy.Ports{{Protocol: 6, First: 443, Last: 443}}, time.Minute); err != nil {
		t.Fatal(err)
	}
	if got := tries(t, leaf, try...); got[0] != "ENETUNREACH" || got[1] != "EPERM" {
		t.Errorf("pinned: %v", got)
	}
	if err := g.Sweep(map[int]bool{loopback + 1: true}); err != nil {
		t.Fatal(err)
	}
	var index uint32
	if err := g.maps.Groups.Lookup(number, &index); err == nil {
		t.Error("the group of a link that is gone is bound")
	}
}
