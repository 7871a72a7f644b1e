package leak

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

func TestWhatAppearsIsSeen(t *testing.T) {
	before := Take("dsecleak")
	dir := t.TempDir()
	exe := dir + "/dsecleak1"
	text, err := os.ReadFile("/bin/sleep")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(exe, text, 0o700); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe, "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	seen := Take("dsecleak").Since(before)
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if !strings.Contains(strings.Join(seen, "\n"), "process: dsecleak1") {
		t.Errorf("the process is not among %q", seen)
	}
	if after := Take("dsecleak").Since(before); strings.Contains(strings.Join(after, "\n"), "process: ") {
		t.Errorf("still there: %q", after)
	}
}
