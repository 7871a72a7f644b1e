package procinfo

import (
	"errors"
	"os"
	"os/exec"
	"syscall"
	"testing"
)

// TestProgramIsWhatReadSays: but for what only the latter has.
func TestProgramIsWhatReadSays(t *testing.T) {
	c := exec.Command("/bin/sleep", "60")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	whole, err := Read(c.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	i, err := Program(c.Process.Pid)
	if err != nil || i.Exe == "" || i.Exe != whole.Exe || i.Name != whole.Name || i.UID != uint32(os.Geteuid()) {
		t.Errorf("%+v %v, and whole %+v", i, err, whole)
	}
	if err := errors.Join(c.Process.Kill(), ended(c)); err != nil {
		t.Fatal(err)
	}
	if i, err := Program(c.Process.Pid); err == nil {
		t.Errorf("of a process that is gone: %+v", i)
	}
}

// ended waits for a process that was killed.
func ended(c *exec.Cmd) error {
	var e *exec.ExitError
	if err := c.Wait(); !errors.As(err, &e) || e.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		return err
	}
	return nil
}
