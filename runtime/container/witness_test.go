package container

import (
	"context"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/audit"
	"github.com/opendsec/dsec/audit/proc"
	"github.com/opendsec/dsec/audit/watch"
	"github.com/opendsec/dsec/internal/diskpool"
	"github.com/opendsec/dsec/internal/procinfo"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
)

// observed is a world in which sandboxes are seen.
type observed struct {
	*world
	store *audit.Store
	proc  *proc.Witness
	watch *watch.Witness
}

func newObserved(t *testing.T, options ...func(*world)) *observed {
	t.Helper()
	o := &observed{world: newWorld(t, options...)}
	t.Cleanup(func() { // before the world, which it looks at
		if o.proc != nil {
			o.away(t)
		}
	})
	o.see(t)
	return o
}

// everyShell runs a test with shells made for a sandbox and with such as were made ahead.
func everyShell(t *testing.T, f func(t *testing.T, o *observed)) {
	t.Run("made for it", func(t *testing.T) { f(t, newObserved(t)) })
	t.Run("made ahead", func(t *testing.T) { f(t, newObserved(t, readyShells)) })
}

// create has it made from a shell that was made ahead, where there are such.
func (o *observed) create(t *testing.T, f ...func(*runtime.Request)) dsec.SandboxID {
	t.Helper()
	o.prime(t)
	id := o.world.create(t, f...)
	if made := o.r.boxes.Reserve(id).record().Shell != ""; made != (o.shells > 0) {
		t.Fatalf("made from a shell that was made ahead: %v", made)
	}
	return id
}

// see opens what an agent has of it, and the runtime anew.
func (o *observed) see(t *testing.T) {
	t.Helper()
	ctx := context.Background()
	must(t, o.r.Close())
	var err error
	o.store, err = audit.Open(audit.Config{Dir: filepath.Join(o.dir, "audit"), Log: slog.Default()})
	must(t, err)
	cache, log := &procinfo.Cache{}, slog.Default()
	o.proc, err = proc.Open(ctx, proc.Config{Keeper: o.hold, Name: o.name, Base: o.uidBase, Take: o.store.Append, Cache: cache, Log: log})
	must(t, err)
	o.watch, err = watch.Open(ctx, watch.Config{Keeper: o.hold, Name: o.name, Pool: o.disks.(diskpool.Shared).Root(), Take: o.store.Append, Cache: cache, Log: log})
	must(t, err)
	c := o.config()
	c.Log = log
	c.Witness = audit.Witnesses{o.proc, o.watch}
	c.Refused = o.store.Append
	c.Unseen = func(id dsec.SandboxID, err error) { t.Errorf("%s is not seen: %v", id, err) }
	o.r, err = Open(ctx, c)
	must(t, err)
	must(t, o.proc.Start())
	o.watch.Start()
}

// away lets go of it, as an agent that ends.
func (o *observed) away(t *testing.T) {
	t.Helper()
	must(t, o.proc.Close())
	must(t, o.watch.Close())
	must(t, o.store.Close())
	o.proc, o.watch = nil, nil
}

func (o *observed) records(t *testing.T, id dsec.SandboxID) []dsec.AuditRecord {
	t.Helper()
	o.store.End(id)
	c, err := o.store.Read(id, 0)
	must(t, err)
	all, err := c.Next()
	must(t, err)
	return all
}

func has(all []dsec.AuditRecord, f func(r dsec.AuditRecord) bool) bool {
	return slices.ContainsFunc(all, f)
}

func wroteTo(path, what string) func(dsec.AuditRecord) bool {
	return func(r dsec.AuditRecord) bool {
		return r.Kind == dsec.AuditWrite && r.Path == path && (r.Detail == what || strings.HasPrefix(r.Detail, what+", "))
	}
}

// asUser runs a command as another user than root.
func (o *observed) asUser(t *testing.T, id dsec.SandboxID, exec, script string) {
	t.Helper()
	p, err := o.r.Exec(t.Context(), id, process.Spec{ID: exec, Argv: []string{"/bin/sh", "-c", script}, User: "1000:1000"})
	must(t, err)
	_, err = p.Wait(t.Context())
	must(t, err)
}

func TestWhatASandboxDoesIsSeen(t *testing.T) { everyShell(t, whatItDoesIsSeen) }

func whatItDoesIsSeen(t *testing.T, o *observed) {
	id := o.create(t, func(r *runtime.Request) { r.Spec.Watch = []string{"/tests/**"} })
	o.sh(t, id, "b=/bin/busybox; $b mkdir -p /repo /opt /tests; echo x > /repo/conftest.py; echo x > /opt/x; $b mv /opt/x /bin/env; $b ln $b /opt/l; echo evil >> /opt/l; echo > /tests/t; sleep 0.1; true")
	o.asUser(t, id, "theirs", "sleep 0.1; exec sleep 0.1")
	must(t, o.r.Stop(t.Context(), id, 0))
	all := o.records(t, id)
	for what, f := range map[string]func(dsec.AuditRecord) bool{
		"a shell of root": func(r dsec.AuditRecord) bool {
			return r.Kind == dsec.AuditProcess && len(r.Args) == 3 && r.UID == 0 && r.PID > 1 && r.Exec != ""
		},
		"sleep of a user": func(r dsec.AuditRecord) bool {
			return r.Kind == dsec.AuditProcess && strings.HasPrefix(r.Exe, "/") && r.UID == 1000 && r.GID == 1000 && r.Exec == "theirs"
		},
		"a hook":          wroteTo("/repo/conftest.py", dsec.WriteMade),
		"which is root's": func(r dsec.AuditRecord) bool { return r.Path == "/repo/conftest.py" && r.UID == 0 && r.Exec != "" },
		"a rename":        wroteTo("/bin/env", dsec.WriteMoved),
		"what was asked":  wroteTo("/tests/t", dsec.WriteChanged),
		"by the link":     wroteTo("/bin/busybox", dsec.WriteDiffers),
		"at the end":      wroteTo("/bin/env", dsec.WriteDiffers),
	} {
		if !has(all, f) {
			t.Errorf("%s is not told", what)
		}
	}
	if has(all, func(r dsec.AuditRecord) bool { return r.Kind == dsec.AuditLost }) {
		t.Error("something was lost")
	}
	if t.Failed() {
		for _, r := range all {
			t.Logf("%+v", r)
		}
	}
	must(t, o.r.Destroy(t.Context(), id))
	o.away(t)
}

// TestNothingIsMissedWhileTheAgentIsAway: the kernel keeps what happens, for whoever opens it next.
func TestNothingIsMissedWhileTheAgentIsAway(t *testing.T) { everyShell(t, nothingIsMissed) }

func nothingIsMissed(t *testing.T, o *observed) {
	id := o.create(t, func(r *runtime.Request) { r.Spec.Watch = []string{"/tests/**"} })
	_, err := o.r.Exec(t.Context(), id, process.Spec{ID: "later", Argv: []string{"/bin/sh", "-c",
		"b=/bin/busybox; while [ ! -e /go ]; do sleep 0.02; done; $b mkdir /tests; echo evil > /tests/away; $b rm /bin/env; $b touch /done"}})
	must(t, err)
	o.away(t)
	o.sh(t, id, "echo > /go; while [ ! -e /done ]; do sleep 0.02; done")
	o.close(t) // pool, mounts and hold too are opened anew
	o.open(t)
	o.see(t)
	must(t, o.r.Destroy(t.Context(), id))
	all := o.records(t, id)
	for what, f := range map[string]func(dsec.AuditRecord) bool{
		"a program": func(r dsec.AuditRecord) bool {
			return r.Kind == dsec.AuditProcess && strings.HasPrefix(r.Exe, "~") && strings.HasSuffix(r.Exe, "busybox")
		},
		"a watched path":      wroteTo("/tests/away", dsec.WriteChanged),
		"which appeared":      wroteTo("/tests/away", dsec.WriteMade),
		"and is on the disk":  wroteTo("/tests/away", dsec.WriteDiffers),
		"what is always seen": wroteTo("/bin/env", dsec.WriteRemoved),
	} {
		if !has(all, f) {
			t.Errorf("%s is not told", what)
		}
	}
	if t.Failed() {
		for _, r := range all {
			t.Logf("%+v", r)
		}
	}
	o.away(t)
}
