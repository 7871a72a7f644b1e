package container

import (
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
)

func refusedCall(detail string) func(dsec.AuditRecord) bool {
	return func(r dsec.AuditRecord) bool {
		return r.Kind == dsec.AuditSyscall && r.Detail == detail && strings.HasPrefix(r.Exe, "/bin/") && r.PID > 1 && r.UID == 0 && r.GID == 0
	}
}

func TestRefusedCallsAreEvidence(t *testing.T) {
	o := newObserved(t)
	id := o.create(t)
	o.sh(t, id, "b=/bin/busybox; for i in 1 2 3; do $b mount -t tmpfs none /tmp; done; $b unshare -U $b true; true")
	p, err := o.r.Exec(t.Context(), id, process.Spec{ID: "later", Argv: []string{"/bin/sh", "-c", "b=/bin/busybox; read a; $b chroot / $b umount /proc; true"}, Stdin: true})
	must(t, err)

	o.r.takeRefusals(t.Context())
	o.away(t)
	o.see(t) // another agent comes
	p, err = o.r.Process(t.Context(), id, p.Spec().ID)
	must(t, err)
	_, err = p.Write(t.Context(), []byte("go\n"))
	must(t, err)
	_, err = p.Wait(t.Context())
	must(t, err)
	must(t, o.r.Stop(t.Context(), id, 0))
	all := o.records(t, id)
	for _, detail := range []string{"mount: EPERM", "unshare new namespace 0x10000000: EPERM", "umount2: EPERM"} {
		if !has(all, refusedCall(detail)) {
			t.Errorf("%s is not told", detail)
		}
	}
	var mounts int64
	for _, r := range all {
		if r.Kind == dsec.AuditSyscall {
			t.Logf("%+v", r)
		}
		if r.Detail == "umount2: EPERM" && r.Exec != "later" {
			t.Errorf("it belongs to %q", r.Exec)
		}
		if r.Detail == "mount: EPERM" {
			mounts += max(1, r.Count)
		}
	}
	if mounts != 3 {
		t.Errorf("%d mounts are told, want 3", mounts)
	}
}

// Nobody else may have a listener: the kernel allows one in a chain of filters.
func TestAListenerInsideIsRefusedOnlyWhereWeListen(t *testing.T) {
	o := newObserved(t)
	c := o.config()
	for _, heard := range []bool{true, false} {
		if !heard {
			must(t, o.r.Close())
			var err error
			o.r, err = Open(t.Context(), c)
			must(t, err)
		}
		id := o.create(t, func(r *runtime.Request) { r.Layers.Layers = append(r.Layers.Layers, abilities(t)) })
		want := unix.Errno(0)
		if heard {
			want = unix.EBUSY
		}
		wantAnswers(t, "a listener", o.answers(t, id, "", "listener"), map[string]any{"listener": want})
		must(t, o.r.Stop(t.Context(), id, 0))
	}
}
