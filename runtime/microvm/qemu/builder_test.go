package qemu

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opendsec/dsec/internal/failpoint"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
)

// builderJob is what a builder of another process builds.
type builderJob struct {
	Dir   string
	Shape vmm.Shape
	Stop  string // the failpoint at which it says "here", and hangs; or "boot"
}

// builder is this test's binary as another process that builds a template.
func builder(text string) {
	var job builderJob
	if err := json.Unmarshal([]byte(text), &job); err != nil {
		panic(err)
	}
	here := func(context.Context, string) error {
		fmt.Println("here")
		select {}
	}
	defer failpoint.Arm(job.Stop, here)()
	d, err := New(context.Background(), Config{Dir: job.Dir, UID: testUID})
	if err != nil {
		panic(err)
	}
	_, err = d.BuildTemplate(context.Background(), job.Shape, func(ctx context.Context, ch net.Conn) error {
		if job.Stop == "boot" {
			_ = here(ctx, "")
		}
		return ready(ctx, ch)
	})
	fmt.Println("end", err) // not reached
}

// Builders are killed where a template is in the making: their QEMU ends with them,
// and the next one finds nothing half.
func TestKilledBuildersLeaveNothing(t *testing.T) {
	g := theGuest(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, stop := range []string{"boot", "qemu.template.stopped", "qemu.template.written"} {
		job := builderJob{Dir: t.TempDir(), Shape: g.shape, Stop: stop}
		text, err := json.Marshal(job)
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.CommandContext(ctxOf(t), self)
		cmd.Env = append(os.Environ(), "DSEC_TEST_BUILDER="+string(text))
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		said := make([]byte, 100)
		n, _ := out.Read(said)
		if string(said[:n]) != "here\n" {
			t.Fatalf("%s: it said %q", stop, said[:n])
		}
		children := childrenOf(t, cmd.Process.Pid)
		if want := stop != "qemu.template.written"; want != (len(children) == 1) {
			t.Errorf("%s: it has the children %v", stop, children)
		}
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		for _, pid := range children {
			waitGone(t, pid)
		}
		names := list(t, job.Dir)
		if slices.ContainsFunc(names, keyForm.MatchString) || !slices.ContainsFunc(names, func(s string) bool { return strings.HasPrefix(s, "tmp-") }) {
			t.Errorf("%s: it left %v", stop, names)
		}
		// The next who builds sweeps, whatever becomes of it.
		d, err := New(t.Context(), Config{Dir: job.Dir, UID: testUID})
		if err != nil {
			t.Fatal(err)
		}
		gone := g.shape
		gone.Kernel.Path += "?"
		if _, err := d.BuildTemplate(ctxOf(t), gone, ready); err == nil {
			t.Error("a template without a kernel")
		}
		if names := list(t, job.Dir); !slices.Equal(names, []string{"lock"}) {
			t.Errorf("%s: swept to %v", stop, names)
		}
	}
}

func list(t *testing.T, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// childrenOf lists the QEMUs of a process, as directories of /proc.
func childrenOf(t *testing.T, pid int) (dirs []string) {
	t.Helper()
	all, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range all {
		text, err := os.ReadFile(d + "/status")
		if err == nil && strings.Contains(string(text), fmt.Sprintf("\nPPid:\t%d\n", pid)) {
			dirs = append(dirs, d)
		}
	}
	return dirs
}

// waitGone waits until a process has ended; somebody else reaps it.
func waitGone(t *testing.T, dir string) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		text, err := os.ReadFile(dir + "/status")
		if err != nil || strings.Contains(string(text), "State:\tZ") || strings.Contains(string(text), "State:\tX") {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%s lives on:\n%s", dir, text)
		}
	}
}
