// Package up runs a real `dsec up` with state of its own, for tests and
// benchmarks: it builds dsec from this tree, starts and restarts it, waits for
// what it says, and ends it wanting that nothing is left.
package up

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec/client"
)

// Within is how long anything that is awaited may take.
const Within = 30 * time.Second

// Build makes the dsec of this tree, which is below root, in a temporary
// directory. Remove removes it.
func Build(root string) (binary string, remove func(), err error) {
	dir, err := os.MkdirTemp("", "dsec-up-")
	if err != nil {
		return "", nil, err
	}
	binary = filepath.Join(dir, "dsec")
	cmd := exec.Command("go", "build", "-o", binary, "./cmd/dsec")
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", nil, fmt.Errorf("build dsec: %w\n%s%v", err, out, os.RemoveAll(dir))
	}
	return binary, func() { _ = os.RemoveAll(dir) }, nil
}

// Machine is a `dsec up` and who speaks to it. One goroutine at a time calls its
// methods; those of the client and the log are anybody's.
type Machine struct {
	*client.Client
	Binary string // what is started, and asked, from now on
	Dir    string // its state
	Log    *Log
	Ended  <-chan struct{} // closed when it has; another one after each Serve

	t        testing.TB
	instance string
	process  *os.Process
	over     sync.Once // Down
}

// Start makes dir, writes conf there as its configuration, and serves. The end
// of the test is the end of the machine, before what was there before it.
func Start(t testing.TB, binary, instance, dir, conf string) *Machine {
	t.Helper()
	m := &Machine{Binary: binary, Dir: dir, t: t, instance: instance}
	err := os.MkdirAll(dir, 0o711)
	if err == nil {
		err = os.Chmod(dir, 0o711) // the gateway is not root
	}
	if err == nil {
		err = os.WriteFile(m.path("dsec.yaml"), []byte(conf), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Down)
	m.Serve()
	if m.Client, err = client.New(client.Config{URL: "unix://" + m.path("run", "gateway.sock")}); err != nil {
		t.Fatal(err)
	}
	return m
}

func (m *Machine) path(parts ...string) string {
	return filepath.Join(append([]string{m.Dir}, parts...)...)
}

// Serve starts `dsec up` and waits until it serves.
func (m *Machine) Serve() {
	m.t.Helper()
	m.Log = &Log{}
	cmd := m.Command("up")
	cmd.Stdout, cmd.Stderr = m.Log, m.Log
	if err := cmd.Start(); err != nil {
		m.t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		_ = cmd.Wait()
		close(ended)
	}()
	m.process, m.Ended = cmd.Process, ended
	m.Await("dsec is up", 1)
}

// Command is a verb of dsec that means this machine.
func (m *Machine) Command(verb string, more ...string) *exec.Cmd {
	args := append([]string{verb, "--instance", m.instance, "--data", m.path("data"), "--run", m.path("run"), "--config", m.path("dsec.yaml")}, more...)
	cmd := exec.Command(m.Binary, args...)
	cmd.Env = append(os.Environ(), "DSEC_CONFIG="+m.path("context.json"))
	return cmd
}

// Await waits until the log has a text n times, or the machine has ended.
func (m *Machine) Await(text string, n int) {
	m.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), Within)
	defer cancel()
	for m.Log.Count(text) < n {
		select {
		case <-m.Ended:
			m.t.Fatalf("dsec up has ended:\n%s", m.Log)
		case <-ctx.Done():
			m.t.Fatalf("not within %v: %s in the log of dsec up\n%s", Within, text, m.Log)
		case <-time.After(10 * time.Millisecond): // the log is another process's
		}
	}
}

// Quit ends `dsec up` as a person or systemd does; what it made runs on.
func (m *Machine) Quit(sig os.Signal) {
	m.t.Helper()
	if err := m.process.Signal(sig); err != nil {
		m.t.Fatal(err)
	}
	<-m.Ended
}

// Down ends everything, once, wants nothing left, and removes the state.
func (m *Machine) Down() {
	m.over.Do(func() {
		if m.Client != nil {
			_ = m.Client.Close()
		}
		if m.process == nil {
			return
		}
		out, err := m.Command("down", "--purge").CombinedOutput()
		<-m.Ended
		if err != nil || !bytes.Contains(out, []byte("nothing is left")) {
			m.t.Errorf("dsec down: %v\n%s\nlog:\n%s", err, out, m.Log)
		}
		if err := os.RemoveAll(m.Dir); err != nil {
			m.t.Error(err)
		}
	})
}
