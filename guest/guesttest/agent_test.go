package guesttest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/files"
	"github.com/opendsec/dsec/guest"
	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/internal/leak"
	"github.com/opendsec/dsec/process"
)

var machineNumber atomic.Int64

// newMachine is on, and nothing was said to it; what is left of it at the end of
// the test is an error.
func newMachine(t *testing.T) *hardware {
	t.Helper()
	name := fmt.Sprintf("m%d", machineNumber.Add(1))
	dir := t.TempDir()
	before := leak.Take(dir)
	disk, err := makeDisk(dir, 64<<20)
	must(t, err)
	h, err := powerOn(name, dir, disk, cgroup.Limits{Memory: 256 << 20, Pids: 600, Devices: cgroup.DefaultDevices()})
	must(t, err)
	t.Cleanup(func() {
		group := h.group.Paths().Unified
		if err := h.powerOff(); err != nil {
			t.Error(err)
		}
		if err := unix.Unmount(disk, 0); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Logf("agent: %s", h.log())
		}
		if _, err := os.Stat(group); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("control group left: %v", err)
		}
		if h.netns == "" {
			t.Error("its network namespace is not known")
		}
		for what := range leak.Take(dir) {
			// Others make network namespaces meanwhile; ours is known.
			theirs := strings.HasPrefix(what, "network namespace") && !strings.HasSuffix(what, h.netns)
			if _, was := before[what]; !was && !theirs {
				t.Errorf("left: %s", what)
			}
		}
	})
	return h
}

func (h *hardware) client(t *testing.T) *guest.Client {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	c, err := h.connect(ctx)
	if err != nil {
		t.Fatalf("%v; its log: %s", err, h.log())
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// running is a machine with a sandbox.
func running(t *testing.T) (*hardware, *guest.Client) {
	t.Helper()
	h := newMachine(t)
	c := h.client(t)
	if s := c.Hello().State; s != guest.Fresh {
		t.Fatalf("state %s", s)
	}
	must(t, c.Resume(t.Context(), guest.Resume{Seed: seed(), Hostname: "guest-1", MachineID: strings.Repeat("ab", 16)}))
	for range 2 {
		must(t, c.Mount(t.Context(), h.mountOf()))
	}
	return h, c
}

// build is what the profile of that name gives.
const buildCaps = 1<<0 | 1<<1 | 1<<3 | 1<<4 | 1<<5 | 1<<6 | 1<<7 | 1<<8 | 1<<10 | 1<<13 | 1<<18 | 1<<29 | 1<<31

func start(t *testing.T, c *guest.Client, s process.Spec) process.Process {
	t.Helper()
	if s.ID == "" {
		s.ID = dsec.Random(12)
	}
	p, err := c.Exec(t.Context(), guest.Exec{Command: guest.NewCommand(s), Caps: buildCaps})
	if err != nil {
		t.Fatalf("exec %q: %v", s.Argv, err)
	}
	return p
}

func waitFor(t *testing.T, p process.Process) process.Result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	r, err := p.Wait(ctx)
	if err != nil {
		t.Fatalf("wait for %q: %v", p.Spec().Argv, err)
	}
	return r
}

func output(t *testing.T, p process.Process) string {
	t.Helper()
	head, tail, _, err := p.Kept(t.Context(), process.Stdout)
	must(t, err)
	return string(head) + string(tail)
}

func sh(t *testing.T, c *guest.Client, script string) string {
	t.Helper()
	p := start(t, c, process.Spec{Argv: []string{"/bin/sh", "-c", script}})
	waitFor(t, p)
	out := output(t, p)
	must(t, p.Release(t.Context()))
	return out
}

func soon(t *testing.T, what string, fn func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !fn(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("never: " + what)
		}
	}
}

func TestNothingRunsBeforeResume(t *testing.T) {
	h := newMachine(t)
	c := h.client(t)
	if err := c.Mount(t.Context(), h.mountOf()); !errors.Is(err, dsec.IllegalState.Err()) {
		t.Fatal(err)
	}
	if err := c.Resume(t.Context(), guest.Resume{Seed: []byte("short")}); !errors.Is(err, dsec.Invalid.Err()) {
		t.Fatal(err)
	}
	if _, err := c.Exec(t.Context(), guest.Exec{Command: guest.NewCommand(process.Spec{ID: "x", Argv: []string{"true"}})}); !errors.Is(err, dsec.IllegalState.Err()) {
		t.Fatal(err)
	}
}

// What a command can see of the machine, and what it cannot reach as root.
func TestRootInsideReachesNothingOfTheAgent(t *testing.T) {
	_, c := running(t)
	for script, want := range map[string]string{
		"hostname; cat /etc/machine-id":                      "guest-1\n" + strings.Repeat("ab", 16) + "\n",
		"ls /dev":                                            "fd\nfull\nmqueue\nnull\nptmx\npts\nrandom\nshm\nstderr\nstdin\nstdout\ntty\nurandom\nzero\n",
		"ps -o pid,args | grep -c '[d]sec-guest'":            "0\n",
		"ls /run/dsec /lower /controllers 2>&1 | grep -c No": "3\n",
		"mknod /root/n c 1 3 2>&1 | grep -c 'not permitted'": "1\n",
		"mount -t tmpfs x /tmp 2>&1 | grep -c denied; mount -o remount,rw /dev 2>&1 | grep -c denied":                            "1\n1\n",
		"echo 1 > /proc/sys/kernel/panic || echo no":                                                                             "no\n",
		"kill -9 1; kill -15 1; kill -3 1; echo alive; cat /proc/1/cmdline | tr '\\0' ' '":                                       "alive\ninit init ",
		"for f in exe cwd root fd/0 ns/pid; do readlink /proc/1/$f || echo no; done; cat /proc/1/environ 2>/dev/null || echo no": "no\nno\nno\nno\nno\nno\n",
		"grep Cap /proc/1/status | grep -v 0000000000000000; grep CapBnd /proc/self/status":                                      fmt.Sprintf("CapBnd:\t%016x\n", buildCaps),
		"ls /proc/self/fd | wc -l":          "4\n", // three, and the directory
		"grep NoNewPrivs /proc/self/status": "NoNewPrivs:\t0\n",
	} {
		if got := sh(t, c, script); got != want {
			t.Errorf("%s: %q, want %q", script, got, want)
		}
	}
	p := start(t, c, process.Spec{Argv: []string{"grep", "NoNewPrivs", "/proc/self/status"}, User: "user"})
	waitFor(t, p)
	q, err := c.Exec(t.Context(), guest.Exec{Command: guest.NewCommand(process.Spec{ID: "nnp", Argv: []string{"grep", "-E", "NoNewPrivs|CapBnd", "/proc/self/status"}}), NoNewPrivs: true})
	must(t, err)
	waitFor(t, q)
	if got := output(t, q); got != "CapBnd:\t0000000000000000\nNoNewPrivs:\t1\n" {
		t.Errorf("with less: %q", got)
	}
	_, err = c.Exec(t.Context(), guest.Exec{Command: guest.NewCommand(process.Spec{ID: "more", Argv: []string{"true"}}), Caps: 1 << unix.CAP_SYS_ADMIN})
	if !errors.Is(err, dsec.Unsupported.Err()) {
		t.Errorf("SYS_ADMIN: %v", err)
	}
	if out := sh(t, c, "echo well"); out != "well\n" {
		t.Errorf("after all that: %q", out)
	}
}

// A frozen sandbox does nothing, and no clock of its commands goes on.
func TestFreezeAndResume(t *testing.T) {
	_, c := running(t)
	p := start(t, c, process.Spec{Argv: []string{"/bin/sh", "-c", "while :; do echo x; done >> /root/ticks"}, Timeout: time.Minute})
	q := start(t, c, process.Spec{Argv: []string{"sleep", "300"}, Timeout: 700 * time.Millisecond})
	fs, err := c.Files(t.Context(), "root")
	must(t, err)
	defer fs.Close()
	total := func() int64 {
		i, err := fs.Stat(t.Context(), "/root/ticks", true)
		if err != nil && !errors.Is(err, dsec.FileNotFound.Err()) {
			t.Fatal(err)
		}
		return i.Size
	}
	soon(t, "it writes", func() bool { return total() > 100 })
	for range 2 {
		must(t, c.Freeze(t.Context(), true))
	}
	before := total()
	if _, err := c.Exec(t.Context(), guest.Exec{Command: guest.NewCommand(process.Spec{ID: "x", Argv: []string{"true"}})}); !errors.Is(err, dsec.IllegalState.Err()) {
		t.Fatalf("exec in a frozen sandbox: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond) // twice its limit
	defer cancel()
	if r, err := q.Wait(ctx); !errors.Is(err, dsec.Timeout.Err()) {
		t.Fatalf("the clock went on: %+v %v", r, err)
	}
	if n := total(); n != before {
		t.Fatalf("a frozen command wrote %d bytes", n-before)
	}
	must(t, c.Resume(t.Context(), guest.Resume{Seed: seed(), Hostname: "guest-2"}))
	if out := sh(t, c, "hostname"); out != "guest-2\n" {
		t.Fatalf("host name %q", out)
	}
	if r := waitFor(t, q); r.Status != process.TimedOut || r.Held < time.Second {
		t.Fatalf("%+v", r)
	}
	soon(t, "it writes again", func() bool { return total() > before })
	must(t, c.Freeze(t.Context(), false))
	must(t, p.Kill(t.Context()))
	if r := waitFor(t, p); r.Status != process.Killed {
		t.Fatalf("killed while frozen: %+v", r)
	}
}

// A resume
// that cannot do all it was asked for thaws nothing.
func TestResumeThatBreaksOffThawsNothing(t *testing.T) {
	_, c := running(t)
	p := start(t, c, process.Spec{Argv: []string{"sleep", "300"}})
	must(t, c.Freeze(t.Context(), false))
	for name, r := range map[string]guest.Resume{
		"a clock that it may not set": {Seed: seed(), Time: time.Now().UnixNano()},
		"a link that is none":         {Seed: seed(), Network: &guest.Network{Link: "none0", Address: "10.0.0.2/30"}},
		"an address":                  {Seed: seed(), Network: &guest.Network{Link: "lo", Address: "nowhere"}},
		"a host name":                 {Seed: seed(), Hostname: "../x"},
		"a machine id":                {Seed: seed(), MachineID: "x"},
	} {
		if err := c.Resume(t.Context(), r); err == nil {
			t.Errorf("%s was taken", name)
		}
		if _, err := c.Exec(t.Context(), guest.Exec{Command: guest.NewCommand(process.Spec{ID: "x", Argv: []string{"true"}})}); !errors.Is(err, dsec.IllegalState.Err()) {
			t.Errorf("%s: exec afterwards: %v", name, err)
		}
	}
	must(t, c.Resume(t.Context(), guest.Resume{Seed: seed(), Network: &guest.Network{Link: "lo", Address: "10.9.8.7/30", Gateway: "10.9.8.6", MTU: 9000}}))
	if out := sh(t, c, "ip -4 addr show lo; ip route"); !strings.Contains(out, "10.9.8.7/30") || !strings.Contains(out, "mtu 9000") || !strings.Contains(out, "default via 10.9.8.6") {
		t.Errorf("network: %s", out)
	}
	must(t, p.Kill(t.Context()))
}

// A host that is gone loses nothing of what is kept: the next one reads on where
// it was. While nobody follows, what is more than that is dropped, as the
// contract has it, and so this command keeps all.
func TestCommandsOutliveTheirHost(t *testing.T) {
	h, c := running(t)
	const lines = 50000
	p := start(t, c, process.Spec{ID: "long", Argv: []string{"/bin/sh", "-c", fmt.Sprintf("seq 1 %d; exit 9", lines)}, Head: 64 << 10, Tail: 256 << 10})
	var got bytes.Buffer
	hosts := 0
	for eof := false; !eof; hosts++ {
		r, err := p.Follow(t.Context(), process.Stdout, int64(got.Len()))
		must(t, err)
		chunk, err := r.Next(t.Context())
		must(t, err)
		if chunk.Offset != int64(got.Len()) {
			t.Fatalf("chunk at %d, want %d", chunk.Offset, got.Len())
		}
		got.Write(chunk.Data)
		eof = chunk.EOF
		old := c
		boot := c.Hello().Boot
		c = h.client(t) // cuts the old one off
		if c.Hello().Boot != boot || c.Hello().State != guest.Running {
			t.Fatalf("%+v", c.Hello())
		}
		select {
		case <-old.Done():
		case <-time.After(5 * time.Second):
			t.Fatal("the old host has not noticed")
		}
		if p, err = c.Process(t.Context(), "long"); err != nil {
			t.Fatal(err)
		}
	}
	var want bytes.Buffer
	for i := range lines {
		fmt.Fprintln(&want, i+1)
	}
	if !bytes.Equal(got.Bytes(), want.Bytes()) {
		t.Fatalf("%d bytes of %d", got.Len(), want.Len())
	}
	if r := waitFor(t, p); r.ExitCode != 9 || r.Stdout.Dropped != 0 {
		t.Fatalf("%+v", r)
	}
	if hosts < 4 {
		t.Errorf("only %d hosts", hosts)
	}
}

func TestThousandCommands(t *testing.T) {
	h, c := running(t)
	began := time.Now()
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for i := range 125 {
				id := fmt.Sprintf("c%d.%d", w, i)
				p, err := c.Exec(t.Context(), guest.Exec{Command: guest.NewCommand(process.Spec{ID: id, Argv: []string{"echo", id}}), Caps: buildCaps})
				if err != nil {
					t.Error(err)
					return
				}
				r, err := p.Wait(t.Context())
				head, _, _, kerr := p.Kept(t.Context(), process.Stdout)
				if err = errors.Join(err, kerr, p.Release(t.Context())); err != nil || r.ExitCode != 0 || string(head) != id+"\n" {
					t.Errorf("%s: %+v %q %v", id, r, head, err)
				}
			}
		})
	}
	wg.Wait()
	t.Logf("1000 commands in %v", time.Since(began))
	if ids, err := c.List(t.Context()); err != nil || len(ids) != 0 {
		t.Errorf("listed: %v %v", ids, err)
	}
	if groups, _ := filepath.Glob(filepath.Join(h.group.Paths().Unified, "vm/sandbox/exec-*")); len(groups) != 0 {
		t.Errorf("control groups: %v", groups)
	}
	pid := h.cmd.Process.Pid
	soon(t, "the agent has no descriptors of commands", func() bool {
		open, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
		must(t, err)
		return len(open) < 40
	})
	if s, err := c.Stats(t.Context()); err != nil || s.Pids != 1 {
		t.Errorf("%+v %v", s, err)
	}
}

func TestManyWaitAtOnce(t *testing.T) {
	_, c := running(t)
	p := start(t, c, process.Spec{Stdin: true, Argv: []string{"cat"}})
	var wg sync.WaitGroup
	for range 1000 {
		wg.Go(func() {
			if r, err := p.Wait(t.Context()); err != nil || r.ExitCode != 0 {
				t.Errorf("%+v %v", r, err)
			}
		})
	}
	must(t, p.CloseStdin(t.Context()))
	wg.Wait()
}

// When the agent is killed everything ends with an error that says so.
func TestKilledAgentEndsEveryCall(t *testing.T) {
	h, c := running(t)
	p := start(t, c, process.Spec{ID: "p", Argv: []string{"/bin/sh", "-c", "echo up; sleep 300"}, Stdin: true})
	soon(t, "up", func() bool { return output(t, p) == "up\n" })
	fs, err := c.Files(t.Context(), "root")
	must(t, err)
	defer fs.Close()
	r, err := p.Follow(t.Context(), process.Stdout, 3)
	must(t, err)
	defer r.Close()
	calls := map[string]func() error{
		"wait":   func() error { _, err := p.Wait(t.Context()); return err },
		"follow": func() error { _, err := r.Next(t.Context()); return err },
		"write":  func() error { _, err := p.Write(t.Context(), make([]byte, 1<<20)); return err },
		"ended":  func() error { _, err := c.Ended(t.Context()); return err },
		"watch": func() error {
			return fs.Watch(t.Context(), "/tmp", false, func(files.Change) error { return nil })
		},
	}
	errs := make(chan error, len(calls))
	for name, call := range calls {
		go func() {
			err := call()
			if !errors.Is(err, dsec.Unavailable.Err()) {
				err = fmt.Errorf("%s ended with %s: %w", name, dsec.ClassOf(err), err)
			} else {
				err = nil
			}
			errs <- err
		}()
	}
	time.Sleep(50 * time.Millisecond) // not all of them need have begun; those that have not err as well
	must(t, h.cmd.Process.Kill())
	for range calls {
		select {
		case err := <-errs:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(10 * time.Second):
			t.Fatal("a call hangs")
		}
	}
	if _, err := c.List(t.Context()); !errors.Is(err, dsec.Unavailable.Err()) {
		t.Error(err)
	}
}

// Stdin that is not read can be given up, and it is known how much was taken.
func TestGivenUpWriteTellsHowMuch(t *testing.T) {
	_, c := running(t)
	p := start(t, c, process.Spec{Stdin: true, Argv: []string{"/bin/sh", "-c", "read x; cat | wc -c"}})
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	n, err := p.Write(ctx, bytes.Repeat([]byte("x"), 4<<20))
	if !errors.Is(err, dsec.Timeout.Err()) || n < 4096 || n >= 4<<20 {
		t.Fatalf("%d %v", n, err)
	}
	rest := "\n" + strings.Repeat("y", 1000)
	go func() {
		_, _ = p.Write(t.Context(), []byte(rest)) // what it wrote shows below
		_ = p.CloseStdin(t.Context())
	}()
	waitFor(t, p)
	if out := strings.TrimSpace(output(t, p)); out != "1000" {
		t.Fatalf("it read %s bytes", out)
	}
}

func TestFilesOfMegabytesBothWays(t *testing.T) {
	_, c := running(t)
	fs, err := c.Files(t.Context(), "user")
	must(t, err)
	defer fs.Close()
	data := bytes.Repeat([]byte("0123456789abcdef"), 1<<20)
	sum := fmt.Sprintf("%x", sha256.Sum256(data))
	if i, err := fs.Write(t.Context(), "/home/user/big", bytes.NewReader(data), files.WriteOptions{SHA256: sum}); err != nil || i.UID != 1000 {
		t.Fatalf("%+v %v", i, err)
	}
	got := sha256.New()
	if n, err := fs.Read(t.Context(), "/home/user/big", 0, -1, got); err != nil || n != int64(len(data)) || fmt.Sprintf("%x", got.Sum(nil)) != sum {
		t.Fatalf("%d %v", n, err)
	}
	if _, err := fs.Read(t.Context(), "/proc/1/environ", 0, -1, io.Discard); err == nil {
		t.Error("read the environment of PID 1")
	}
}

func TestRequiredDAXIsCheckedAndRefused(t *testing.T) {
	h := newMachine(t)
	c := h.client(t)
	must(t, c.Resume(t.Context(), guest.Resume{Seed: seed()}))
	m := h.mountOf()
	m.Mounts[0].DAX = "required"
	if err := c.Mount(t.Context(), m); !errors.Is(err, dsec.Unsupported.Err()) || !strings.Contains(err.Error(), "dax") {
		t.Fatal(err)
	}
	if c := h.client(t); c.Hello().State != guest.Empty {
		t.Fatalf("state %s", c.Hello().State)
	}
	c = h.client(t)
	for name, change := range map[string]func(*guest.Mount){
		"a target outside": func(m *guest.Mount) { m.Mounts[0].Target = "../x" },
		"an upper outside": func(m *guest.Mount) { m.Overlay.Upper = "/disk/upper" },
		"no such source":   func(m *guest.Mount) { m.Mounts[0].Source = "/none" },
	} {
		m := h.mountOf()
		change(&m)
		if err := c.Mount(t.Context(), m); err == nil {
			t.Errorf("%s was mounted", name)
		}
	}
	must(t, c.Mount(t.Context(), h.mountOf())) // what was refused has left nothing
	if out := sh(t, c, "echo well"); out != "well\n" {
		t.Fatal(out)
	}
	other := h.mountOf()
	other.Defaults.User = "user"
	if err := c.Mount(t.Context(), other); !errors.Is(err, dsec.Conflict.Err()) {
		t.Fatal(err)
	}
}

func TestShutdownEndsAndKeepsTheDisk(t *testing.T) {
	h, c := running(t)
	start(t, c, process.Spec{ID: "main", Argv: []string{"/bin/sh", "-c", "trap 'echo bye > /root/said; exit 0' TERM; while :; do sleep .05; done"}})
	p := start(t, c, process.Spec{Argv: []string{"/bin/sh", "-c", "trap '' TERM; (setsid sleep 300 &); sleep 300"}})
	soon(t, "the trap is set", func() bool { return strings.Contains(sh(t, c, "grep SigCgt /proc/[0-9]*/status"), "4002") })
	must(t, c.Shutdown(t.Context(), 5*time.Second))
	if r := waitFor(t, p); r.Status != process.Killed {
		t.Errorf("%+v", r)
	}
	if _, err := c.Exec(t.Context(), guest.Exec{Command: guest.NewCommand(process.Spec{ID: "x", Argv: []string{"true"}})}); !errors.Is(err, dsec.SandboxGone.Err()) {
		t.Error(err)
	}
	if b, err := os.ReadFile(filepath.Join(h.disk, "upper/root/said")); err != nil || string(b) != "bye\n" {
		t.Errorf("%q %v", b, err)
	}
	if log := h.log(); strings.Contains(log, "unmount") {
		t.Errorf("something was still in use: %s", log)
	}
}

// When PID 1 of the sandbox is gone everything in it is, and everybody learns it.
func TestEndOfTheSandboxIsTold(t *testing.T) {
	h, c := running(t)
	p := start(t, c, process.Spec{Argv: []string{"/bin/sh", "-c", "setsid sleep 300 & sleep 300"}})
	b, err := os.ReadFile(filepath.Join(h.group.Paths().Unified, "vm/sandbox/init/cgroup.procs"))
	must(t, err)
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	must(t, err)
	must(t, unix.Kill(pid, unix.SIGKILL))
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if why, err := c.Ended(ctx); err != nil || !strings.Contains(why, "signal 9") {
		t.Errorf("%q %v", why, err)
	}
	if r := waitFor(t, p); r.Status != process.Killed {
		t.Errorf("%+v", r)
	}
	if _, err := c.Exec(t.Context(), guest.Exec{Command: guest.NewCommand(process.Spec{ID: "x", Argv: []string{"true"}})}); !errors.Is(err, dsec.SandboxGone.Err()) {
		t.Error(err)
	}
	if s := h.client(t).Hello().State; s != guest.Ended {
		t.Errorf("state %s", s)
	}
}
