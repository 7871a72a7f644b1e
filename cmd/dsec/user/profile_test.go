package user

import (
	"bytes"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/confine"
)

func TestProfileNamesTheCallTheReasonAndTheWayOut(t *testing.T) {
	run := func(args ...string) (string, error) {
		c := Profile()
		Register(c)
		var out bytes.Buffer
		c.SetOut(&out)
		c.SetArgs(args)
		c.SilenceErrors, c.SilenceUsage = true, true
		err := c.Execute()
		return out.String(), err
	}
	out, err := run("ptrace")
	if err != nil || !strings.Contains(out, "EPERM") || !strings.Contains(out, `profile="debug"`) {
		t.Errorf("%q %v", out, err)
	}
	if _, err := run("--profile", "debug", "ptrace"); dsec.ClassOf(err) != dsec.NotFound {
		t.Errorf("debug allows it: %v", err)
	}
	if out, err := run(); err != nil || !strings.Contains(out, "io_uring_setup") || !strings.Contains(out, "socket raw") {
		t.Errorf("%q %v", out, err)
	}
	if out, err := run("--profile", "desktop", "mount", "clone"); err != nil || !strings.Contains(out, "mount ") || !strings.Contains(out, "beside user, process and network") {
		t.Errorf("%q %v", out, err)
	}
	out, err = run("--all")
	if err != nil || !strings.Contains(out, "user-namespaces") || !strings.Contains(out, "microvm, fullvm") || strings.Count(out, "\n") != 1+len(confine.Profiles) {
		t.Errorf("%q %v", out, err)
	}
	if _, err := run("--profile", "none"); dsec.ClassOf(err) != dsec.Invalid {
		t.Error(err)
	}
}
