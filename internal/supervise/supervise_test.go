package supervise

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// The test binary is its own child: ROLE says what it plays.
func TestMain(m *testing.M) {
	switch os.Getenv("ROLE") {
	case "child":
		child()
	case "mute":
		os.Exit(3)
	case "supervisor":
		supervisor()
	default:
		os.Exit(m.Run())
	}
}

func child() {
	ctx, ready := Join(context.Background())
	f, err := os.OpenFile(os.Getenv("LOG"), os.O_APPEND|os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		os.Exit(4)
	}
	fmt.Fprintln(f, os.Getpid())
	if err := ready(); err != nil {
		os.Exit(5)
	}
	<-ctx.Done()
	fmt.Fprintln(f, "lifeline")
	os.Exit(0)
}

func supervisor() {
	_ = Run(context.Background(), []Child{testChild(os.Getenv("LOG"))}, func() { fmt.Println("up") })
}

func testChild(log string) Child {
	return Child{Name: "t", Argv: []string{os.Args[0]}, Env: []string{"ROLE=child", "LOG=" + log},
		Ready: 20 * time.Second, Grace: 10 * time.Second}
}

// lines waits until the log has at least n lines.
func lines(t *testing.T, path string, n int) []string {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for {
		text, _ := os.ReadFile(path)
		l := strings.Fields(string(text))
		if len(l) >= n {
			return l
		}
		if time.Now().After(deadline) {
			t.Fatalf("log has %q, want %d lines", l, n)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func TestChildIsStartedAgainAfterKill(t *testing.T) {
	log := filepath.Join(t.TempDir(), "log")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- Run(ctx, []Child{testChild(log)}, func() {}) }()
	first := lines(t, log, 1)[0]
	pid, _ := strconv.Atoi(first)
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	second := lines(t, log, 2)[1]
	if second == first {
		t.Fatal("same process")
	}
	cancel()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	pid, _ = strconv.Atoi(second)
	if err := syscall.Kill(pid, 0); err != syscall.ESRCH {
		t.Errorf("child %d outlives Run: %v", pid, err)
	}
}

func TestChildThatNeverServesIsAnError(t *testing.T) {
	c := testChild("")
	c.Env = []string{"ROLE=mute"}
	err := Run(t.Context(), []Child{c}, func() { t.Error("said to be started") })
	if err == nil || !strings.Contains(err.Error(), "before it was ready") {
		t.Fatalf("got %v", err)
	}
}

func TestKilledSupervisorTakesItsChildrenAlong(t *testing.T) {
	log := filepath.Join(t.TempDir(), "log")
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "ROLE=supervisor", "LOG="+log)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if l := lines(t, log, 2); l[1] != "lifeline" {
		t.Errorf("child said %q", l[1])
	}
}
