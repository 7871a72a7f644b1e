package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// mainEnv makes the test binary the command.
const mainEnv = "DSEC_TEST_MAIN"

func TestMain(m *testing.M) {
	if os.Getenv(mainEnv) != "" {
		main()
	}
	os.Exit(m.Run())
}

// gatewayEnv starts a gateway and a node over the fake tier and points the
// environment at it.
func gatewayEnv(t *testing.T) (socket string) {
	t.Helper()
	bin := filepath.Join(t.TempDir(), "testserver")
	build := exec.Command("go", "build", "-o", bin, "../../sdk/python/testserver")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build test server: %v\n%s", err, out)
	}
	cmd := exec.Command(bin)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe() // the server ends with it
	must(t, err)
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	t.Cleanup(func() {
		_ = in.Close()
		_ = cmd.Wait()
	})
	var ready struct{ Socket string }
	must(t, json.NewDecoder(out).Decode(&ready))
	t.Setenv("DSEC_SOCKET", ready.Socket)
	t.Setenv("DSEC_CONFIG", filepath.Join(t.TempDir(), "contexts.json"))
	return ready.Socket
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// outcome of one command line.
type outcome struct {
	out, err string
	code     int
}

func dsecIn(t *testing.T, stdin string, args ...string) outcome {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	var out, errs bytes.Buffer
	cmd := newRoot()
	cmd.SetArgs(args)
	cmd.SetIn(strings.NewReader(stdin))
	cmd.SetOut(&out)
	cmd.SetErr(&errs)
	err := cmd.ExecuteContext(ctx)
	if err != nil {
		fmt.Fprint(&errs, err)
	}
	return outcome{out.String(), errs.String(), finish(err)}
}

// ok runs a command line that must succeed and returns its output.
func ok(t *testing.T, args ...string) string {
	t.Helper()
	o := dsecIn(t, "", args...)
	if o.code != 0 {
		t.Fatalf("dsec %s: %d, %s", strings.Join(args, " "), o.code, o.err)
	}
	return o.out
}

func TestTheVerbsOfUsers(t *testing.T) {
	socket := gatewayEnv(t)
	t.Run("run ends as its command", func(t *testing.T) { runs(t) })
	t.Run("a sandbox lives by verbs", func(t *testing.T) { lives(t) })
	t.Run("cp", func(t *testing.T) { copies(t) })
	t.Run("many", func(t *testing.T) { many(t) })
	t.Run("keys and contexts", func(t *testing.T) { keysAndContexts(t, socket) })
	t.Run("wrong usage", func(t *testing.T) { wrong(t) })
	t.Run("interrupt", func(t *testing.T) { interrupt(t) })
	t.Run("terminal", func(t *testing.T) { terminal(t) })
	if left := ok(t, "ps", "-q"); left != "" {
		t.Errorf("left behind: %s", left)
	}
}

func runs(t *testing.T) {
	for _, c := range []struct {
		args string
		code int
		out  string
		err  string
	}{
		{"run base:1 -- echo hello", 0, "hello\n", ""},
		{"run base:1 echo hello", 0, "hello\n", ""},
		{"run base:1 -- sh -c exit\t7", 7, "", ""},
		{"run base:1 -- /no/such", 127, "", "/no/such"},
		{"run base:1 -- /etc", 126, "", "/etc"},
		{"run --timeout 200ms base:1 -- sleep 60", 124, "", "timed out"},
		{"run --memory 1KiB base:1 -- true", 125, "", "limits.memory"},
		{"run", 125, "", "usage: dsec run"},
	} {
		args := strings.Fields(strings.ReplaceAll(c.args, "\t", "\x00"))
		for i := range args {
			args[i] = strings.ReplaceAll(args[i], "\x00", " ")
		}
		o := dsecIn(t, "", args...)
		if o.code != c.code || o.out != c.out || !strings.Contains(o.err, c.err) {
			t.Errorf("%s: %+v", c.args, o)
		}
	}
	o := dsecIn(t, "from stdin", "run", "-i", "base:1", "--", "cat")
	if o.out != "from stdin" || o.code != 0 {
		t.Errorf("stdin: %+v", o)
	}
	var r struct {
		Stdout   string
		ExitCode int `json:"exit_code"`
		Status   string
	}
	o = dsecIn(t, "", "run", "-o", "json", "base:1", "--", "sh", "-c", "echo out; exit 3")
	if err := json.Unmarshal([]byte(o.out), &r); err != nil || r.Stdout != "out\n" || r.ExitCode != 3 || r.Status != "exited" || o.code != 3 {
		t.Errorf("json: %+v, %+v, %v", r, o, err)
	}
}

func lives(t *testing.T) {
	id := strings.TrimSpace(ok(t, "create", "base:1", "--name", "work", "--label", "a=b"))
	if got := ok(t, "exec", "work", "--", "echo", "in"); got != "in\n" {
		t.Errorf("exec: %q", got)
	}
	if got := ok(t, "exec", id[:12], "echo", "by prefix"); got != "by prefix\n" {
		t.Errorf("exec: %q", got)
	}
	exec := strings.TrimSpace(ok(t, "exec", "-d", "work", "--", "echo", "kept"))
	if got := ok(t, "logs", "-f", "work", exec); got != "kept\n" {
		t.Errorf("logs -f: %q", got)
	}
	for _, args := range [][]string{{"logs", "work", exec}, {"logs", "work"}} {
		if got := ok(t, args...); got != "kept\n" {
			t.Errorf("%v: %q", args, got)
		}
	}
	var list []struct {
		ID    string
		State string
		Spec  struct{ Name string }
	}
	must(t, json.Unmarshal([]byte(ok(t, "ps", "-o", "json", "-l", "a=b")), &list))
	if len(list) != 1 || list[0].ID != id || list[0].State != "running" || list[0].Spec.Name != "work" {
		t.Errorf("ps: %+v", list)
	}
	for _, c := range [][2]string{{"stat work", "SANDBOX"}, {"stat", id}, {"events work", "creating → running"}, {"why work", "limits and peaks"},
		{"why work -o json", `"mask":false`}, {"__complete exec wo", "work\trunning"}, {"__complete cp w", "work:"}, {"ps", "work"}} {
		if got := ok(t, strings.Fields(c[0])...); !strings.Contains(got, c[1]) {
			t.Errorf("%s: %s", c[0], got)
		}
	}
	ok(t, "stop", "work", "--cause", "agent_error")
	if got := ok(t, "ps", "-a"); !strings.Contains(got, "stopped") {
		t.Errorf("after stop: %s", got)
	}
	ok(t, "start", "work")
	if o := dsecIn(t, "", "commit", "work", "tag:1"); o.code != 1 || !strings.Contains(o.err, "commit sandbox "+id+": the tier container cannot") {
		t.Errorf("commit on the fake tier: %+v", o)
	}
	ok(t, "rm", "work")
	o := dsecIn(t, "", "exec", "nobody", "--", "true")
	if o.code != 125 || !strings.Contains(o.err, `find sandbox "nobody"`) {
		t.Errorf("unknown sandbox: %+v", o)
	}
}

func copies(t *testing.T) {
	ok(t, "create", "base:1", "--name", "box")
	defer ok(t, "rm", "box")
	dir := t.TempDir()
	must(t, os.MkdirAll(filepath.Join(dir, "tree/sub"), 0o755))
	must(t, os.WriteFile(filepath.Join(dir, "tree/sub/f"), []byte("content"), 0o640))
	must(t, os.Symlink("sub/f", filepath.Join(dir, "tree/link")))
	ok(t, "cp", dir+"/tree", "box:/tmp")
	ok(t, "cp", "box:/tmp/tree", dir+"/out")
	ok(t, "cp", "box:/tmp/tree", dir+"/out") // now into it
	for _, p := range []string{"out/sub/f", "out/tree/sub/f", "out/link"} {
		if b, err := os.ReadFile(filepath.Join(dir, p)); string(b) != "content" {
			t.Errorf("%s: %q, %v", p, b, err)
		}
	}
	if to, _ := os.Readlink(filepath.Join(dir, "out/link")); to != "sub/f" {
		t.Errorf("link: %q", to)
	}
	ok(t, "cp", dir+"/tree/sub/f", "box:/new/dir/")
	if got := ok(t, "cp", "box:/new/dir/f", "-"); got != "content" {
		t.Errorf("to stdout: %q", got)
	}
	if o := dsecIn(t, "piped", "cp", "-", "box:/piped"); o.code != 0 {
		t.Errorf("from stdin: %+v", o)
	}
	must(t, os.WriteFile(filepath.Join(dir, "old"), []byte("old"), 0o600))
	ok(t, "cp", "box:/piped", dir+"/old")
	if b, _ := os.ReadFile(filepath.Join(dir, "old")); string(b) != "piped" {
		t.Errorf("replaced: %q", b)
	}
	for _, c := range [][3]string{{"box:/none", dir + "/x", "/none"}, {dir + "/none", "box:/x", "none"}, {"a", "b", "SANDBOX:PATH"}} {
		if o := dsecIn(t, "", "cp", c[0], c[1]); o.code != 1 || !strings.Contains(o.err, c[2]) {
			t.Errorf("%v: %+v", c, o)
		}
	}
}

func many(t *testing.T) {
	ids := strings.Fields(ok(t, "create", "-n", "5", "base:1", "--label", "batch=1"))
	if len(ids) != 5 {
		t.Fatalf("created %v", ids)
	}
	if got := strings.Fields(ok(t, "ps", "-q", "-l", "batch=1")); len(got) != 5 {
		t.Errorf("listed %v", got)
	}
	ok(t, append([]string{"rm"}, ids...)...)
}

func keysAndContexts(t *testing.T, socket string) {
	secret := strings.TrimSpace(ok(t, "keys", "create", "trainer", "--project", "vision"))
	if !strings.HasPrefix(secret, "dsec_") {
		t.Errorf("secret %q", secret)
	}
	var keys []struct{ ID, Name string }
	must(t, json.Unmarshal([]byte(ok(t, "keys", "ls", "-o", "json")), &keys))
	for _, k := range keys {
		if k.Name == "trainer" {
			ok(t, "keys", "revoke", k.ID)
		}
	}
	if got := ok(t, "keys", "ls"); !strings.Contains(got, "revoked") {
		t.Errorf("keys: %s", got)
	}
	t.Setenv("DSEC_SOCKET", "")
	ok(t, "context", "set", "here", "--socket", socket)
	ok(t, "context", "set", "gone", "--socket", "/no/such.sock")
	ok(t, "ps")
	ok(t, "context", "use", "gone")
	ok(t, "ps", "--context", "here")
	if o := dsecIn(t, "", "ps"); o.code != 1 || o.err == "" {
		t.Errorf("without a gateway: %+v", o)
	}
	if got := ok(t, "context", "ls"); !strings.Contains(got, "*        gone") {
		t.Errorf("contexts: %s", got)
	}
	ok(t, "context", "rm", "gone")
	if o := dsecIn(t, "", "ps", "--context", "gone"); o.code != 1 {
		t.Errorf("removed context: %+v", o)
	}
}

func wrong(t *testing.T) {
	for _, c := range []struct {
		args string
		code int
	}{{"ps --bad", 2}, {"cp one", 2}, {"exec one", 125}, {"run --bad", 125}, {"ps -o yaml", 1}, {"stat nobody", 1}} {
		if o := dsecIn(t, "", strings.Fields(c.args)...); o.code != c.code || strings.Contains(o.err, "failed to") {
			t.Errorf("%s: %+v", c.args, o)
		}
	}
}

// self is the command as a process of its own.
func self(args ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), mainEnv+"=1")
	return cmd
}

func interrupt(t *testing.T) {
	cmd := self("run", "base:1", "--", "sh", "-c", "echo begun; sleep 60")
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	if _, err := io.ReadFull(out, make([]byte, 6)); err != nil {
		t.Fatal(err)
	}
	must(t, cmd.Process.Signal(os.Interrupt))
	begun := time.Now()
	err = cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 130 && code != 137 || time.Since(begun) > 20*time.Second {
		t.Errorf("ended with %v after %v", err, time.Since(begun))
	}
}

// terminal runs a command on a terminal of its own, which is as it was
// afterwards.
func terminal(t *testing.T) {
	master, slave := openPTY(t)
	defer master.Close()
	defer slave.Close()
	before, err := unix.IoctlGetTermios(int(slave.Fd()), unix.TCGETS)
	must(t, err)
	cmd := self("run", "-it", "base:1", "--", "cat")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	must(t, cmd.Start())
	_, err = master.Write([]byte("typed\n"))
	must(t, err)
	must(t, master.SetReadDeadline(time.Now().Add(30*time.Second)))
	var out []byte
	for buf := make([]byte, 100); strings.Count(string(out), "typed") < 2; { // the echo and the command's
		n, err := master.Read(buf)
		if out = append(out, buf[:n]...); err != nil {
			t.Fatalf("read terminal: %v, %q", err, out)
		}
	}
	must(t, cmd.Process.Signal(syscall.SIGTERM))
	_ = cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 130 && code != 137 {
		t.Errorf("ended with %d", code)
	}
	after, err := unix.IoctlGetTermios(int(slave.Fd()), unix.TCGETS)
	must(t, err)
	if *before != *after {
		t.Errorf("terminal was %+v, is %+v", before, after)
	}
}

func openPTY(t *testing.T) (master, slave *os.File) {
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	must(t, err)
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	must(t, err)
	must(t, unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0))
	slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	must(t, err)
	return os.NewFile(uintptr(fd), "ptmx"), slave
}

func TestPortForward(t *testing.T) {
	gatewayEnv(t)
	id := strings.TrimSpace(ok(t, "create", "base:1"))
	defer ok(t, "rm", id)
	cmd := self("port-forward", "-o", "json", id, "0:8000", "0:9")
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	var lines [2]struct {
		Address string
		Port    int
	}
	d := json.NewDecoder(out)
	for i := range lines {
		must(t, d.Decode(&lines[i]))
	}
	if lines[0].Port != 8000 || lines[1].Port != 9 {
		t.Errorf("forwarded %+v", lines)
	}
	if resp, err := http.Get("http://" + lines[0].Address + "/"); err == nil {
		_ = resp.Body.Close()
	}
	c, err := net.Dial("tcp", lines[1].Address) // nothing listens inside: closed at once
	must(t, err)
	must(t, c.SetReadDeadline(time.Now().Add(20*time.Second)))
	if _, err := c.Read(make([]byte, 1)); err == nil || os.IsTimeout(err) {
		t.Errorf("read of a port without a listener: %v", err)
	}
	_ = c.Close()
	must(t, cmd.Process.Signal(syscall.SIGTERM))
	must(t, cmd.Wait())
}
