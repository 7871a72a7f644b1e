package bench

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/runtime/runtimetest"
)

func TestSetUpUnpacksInEverySandboxAndLeavesNone(t *testing.T) {
	archive := filepath.Join(t.TempDir(), "a")
	if err := os.WriteFile(archive, []byte("contents"), 0o600); err != nil {
		t.Fatal(err)
	}
	machine := runtimetest.NewMachine()
	rt := machine.Open()
	defer rt.Close()
	w := Way{Name: "archives", Archive: []string{archive}, Unpack: []string{"/bin/sh", "-c", "cat >/tmp/a"},
		Runtime: Runtime{Name: "fake", RT: rt, Node: "bench", Argv: []string{"/bin/sh", "-c", "test -f /tmp/a"},
			Spec: dsec.Spec{Limits: dsec.Limits{CPU: 1, CPUWeight: 100, Memory: 1 << 30, Pids: 64, Disk: 1 << 30, Output: 1 << 20}}}}
	asked := 0
	d := Disks{
		Used:    func(context.Context, dsec.SandboxID) (int64, error) { asked++; return 1000, nil },
		Written: func(context.Context) (int64, error) { return int64(5000 * asked), nil },
	}
	got, err := w.Fresh(t.Context(), 3, 2, d)
	if err != nil {
		t.Fatal(err)
	}
	if got.N != 3 || got.P50 <= 0 || got.Wall < got.P50 || asked != 3 || got.Each != 999 || got.Written != 0 {
		t.Errorf("%+v, %d disks asked for", got, asked)
	}
	if left := machine.Residue(); len(left) != 0 {
		t.Errorf("%v are left", left)
	}
	w.Archive = nil
	if _, err := w.Fresh(t.Context(), 1, 1, d); err == nil || !strings.Contains(err.Error(), "exit code 1") {
		t.Errorf("a sandbox without its archive was ready: %v", err)
	}
	if left := machine.Residue(); len(left) != 0 {
		t.Errorf("%v are left of what went wrong", left)
	}
}
