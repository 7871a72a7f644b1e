package container

import (
	"testing"

	"github.com/opendsec/dsec/process"
)

func TestCreateExecDestroy(t *testing.T) {
	w := newWorld(t)
	req := request(t)
	steps, err := w.r.Create(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	t.Log(steps)
	o := w.run(t, req.ID, process.Spec{Argv: []string{"echo", "hello"}})
	if o.stdout != "hello\n" || o.ExitCode != 0 || o.Status != process.Exited {
		t.Errorf("%+v", o)
	}
	must(t, w.r.Destroy(t.Context(), req.ID))
	must(t, w.r.Destroy(t.Context(), req.ID))
	w.wantNothing(t)
}
