package container

import (
	"context"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
)

func (w *world) cells(t testing.TB, s runtime.CellSpec) (dsec.SandboxID, runtime.Cells) {
	t.Helper()
	id := w.create(t)
	if s.UID == 0 {
		s.UID, s.GID = 65534, 65534
	}
	c, err := w.r.Cells(context.Background(), id, s)
	must(t, err)
	return id, c
}

func cellRun(argv ...string) runtime.CellRun {
	return runtime.CellRun{Command: runtime.CellCommand{Argv: argv, Wall: 5 * time.Second, CPU: 5 * time.Second}, Env: []string{"PATH=/bin:/usr/bin"},
		Output: 64 << 10, Disk: 8 << 20, Back: 1 << 20}
}

func TestACellRunsACommand(t *testing.T) {
	w := newWorld(t)
	id, c := w.cells(t, runtime.CellSpec{})
	r := cellRun("/bin/sh", "-c", "read x; echo got $x; id -u; pwd; ls -la / /work /dev /proc; echo err >&2; echo file > out.txt; exit 3")
	r.Stdin = []byte("hello\n")
	r.Files = []runtime.CellFile{{Path: "a/b.txt", Mode: 0o644, Data: []byte("in")}}
	r.Outputs = []string{"**"}
	end, err := c.Run(context.Background(), r)
	t.Logf("%+v %v\n%s\n%s", end, err, end.Stdout, end.Stderr)
	if end.Command != nil {
		t.Logf("%+v", end.Command)
	}
	must(t, err)
	begin := time.Now()
	for range 200 {
		end, err := c.Run(context.Background(), cellRun("/bin/true"))
		if err != nil || !end.Clean {
			t.Fatal(end, err)
		}
	}
	t.Log("a call: ", time.Since(begin)/200)
	must(t, c.Close())
	must(t, w.r.Destroy(context.Background(), id))
}

var _ = process.Spec{}
