package node

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
)

// repercussions of a sandbox, as "scope by: what".
func (w *world) repercussions(id dsec.SandboxID) (all []string) {
	w.t.Helper()
	events, err := w.oldEvents(Filter{All: true}, time.Time{}, true)
	if err != nil {
		w.t.Fatal(err)
	}
	for _, e := range events {
		if e.Sandbox == id && e.Type == dsec.EventRepercussion {
			all = append(all, e.Fields["scope"]+" "+e.Fields["by"]+": "+e.Detail)
		}
	}
	return all
}

func TestDamageIsToldOnceAndToWhomItWasDone(t *testing.T) {
	w := newWorld(t, nil)
	crashed, wanted, disk := w.create(nil), w.create(nil), w.create(nil)
	w.machine.Crash(crashed.ID, dsec.CauseAgentDamage, dsec.InducedBySelf)
	w.until("its end", func() bool { return w.stateOf(crashed.ID) == dsec.Failed })
	if _, err := w.Stop(t.Context(), wanted.ID, "", ""); err != nil {
		t.Fatal(err)
	}
	if all := w.repercussions(crashed.ID); len(all) != 1 || !strings.HasPrefix(all[0], "sandbox self: ") {
		t.Errorf("a crash: %q", all)
	}
	if all := w.repercussions(wanted.ID); len(all) != 0 {
		t.Errorf("an end that was asked for: %q", all)
	}
	w.crash()
	if all := w.repercussions(disk.ID); len(all) != 1 || !strings.HasPrefix(all[0], "service unknown: ") {
		t.Errorf("a killed agent: %q", all)
	}
	w.shut()
	w.open()
	if all := w.repercussions(disk.ID); len(all) != 1 {
		t.Errorf("an agent that closed: %q", all)
	}
	w.machine.FailDisks(errors.New("its file system is read-only"))
	w.sweep()
	w.sweep()
	if all := w.repercussions(disk.ID); len(all) != 2 || !strings.HasPrefix(all[1], "node unknown: ") {
		t.Errorf("failed disks: %q", all)
	}
}

// TestARemovedSystemIsTold: commands that do not start because somebody inside
// removed what they are made of.
func TestARemovedSystemIsTold(t *testing.T) {
	w := newWorld(t, nil)
	sb := w.create(nil)
	none := func() {
		t.Helper()
		_, err := w.Exec(t.Context(), sb.ID, process.Spec{Argv: []string{"/bin/none"}})
		wantClass(t, err, dsec.FileNotFound)
	}
	none() // was never there
	fs, err := w.Files(t.Context(), sb.ID, "root")
	if err != nil {
		t.Fatal(err)
	}
	b := w.find(sb.ID)
	b.lookForDamage(b.rt.(runtime.Packer)) // as the refusal has it done, and to its end
	if all := w.repercussions(sb.ID); len(all) != 0 {
		t.Errorf("a wrong name: %q", all)
	}
	list, err := fs.List(t.Context(), "/bin", 1)
	if err != nil || len(list) == 0 {
		t.Fatalf("%v, %v", list, err)
	}
	if err := fs.Remove(t.Context(), "/bin", true); err != nil {
		t.Fatal(err)
	}
	w.clock.add(damageLookBy)
	none()
	none()
	w.until("it is told", func() bool { return len(w.repercussions(sb.ID)) > 0 })
	if all := w.repercussions(sb.ID); len(all) != 1 || !slices.ContainsFunc(all, func(s string) bool { return strings.Contains(s, "/bin") }) {
		t.Errorf("%q", all)
	}
}
