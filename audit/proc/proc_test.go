package proc

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/audit"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/internal/procinfo"
)

// base is far from what sandboxes of other tests have.
const base = 1<<28 + 40_000<<idsOf

// told is what a witness said.
type told struct {
	mu  sync.Mutex
	all map[dsec.SandboxID][]dsec.AuditRecord
}

func (o *told) take(id dsec.SandboxID, r ...dsec.AuditRecord) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.all == nil {
		o.all = map[dsec.SandboxID][]dsec.AuditRecord{}
	}
	o.all[id] = append(o.all[id], r...)
}

func (o *told) of(id dsec.SandboxID) []dsec.AuditRecord {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Clone(o.all[id])
}

func openWitness(t testing.TB, k audit.Keeper, o *told) *Witness {
	t.Helper()
	return openAs(t, k, o, byLoads)
}

// openAs opens one whose program has no more from the kernel than others give.
func openAs(t testing.TB, k audit.Keeper, o *told, f form) *Witness {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("programs of the kernel are loaded by root, and this test runs without it")
	}
	w, err := Open(t.Context(), Config{Keeper: k, Name: fmt.Sprint("test", os.Getpid()), Base: base, Take: o.take, Cache: &procinfo.Cache{}, Log: slog.New(slog.DiscardHandler), form: f})
	if errors.Is(err, unix.EPERM) {
		t.Skip("tried and refused: ", err)
	}
	must(t, err)
	return w
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func newID() dsec.SandboxID { return dsec.NewSandboxID("abcdef") }

// as runs a command with a uid of a range.
func as(t testing.TB, n, uid uint32, argv ...string) {
	t.Helper()
	c := exec.Command(argv[0], argv[1:]...)
	first := uint32(base) + n<<idsOf
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: first + uid, Gid: first + uid + 1}}
	out, err := c.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %v %s", argv, err, out)
	}
}

func TestStartsAreToldWithWhoAndWhat(t *testing.T) {
	for name, f := range map[string]form{"by loads": byLoads, "by helper": byHelper, "by proc": byProc} {
		t.Run(name, func(t *testing.T) { whoAndWhat(t, f) })
	}
}

func whoAndWhat(t *testing.T, f form) {
	k, o := linux.NewKeeper(), &told{}
	defer k.Close()
	w := openAs(t, k, o, f)
	id, other := newID(), newID()
	must(t, w.Add(t.Context(), audit.Subject{ID: id, UID: base}, false))
	must(t, w.Add(t.Context(), audit.Subject{ID: other, UID: base + 1<<idsOf}, false))
	must(t, w.Start())
	as(t, 0, 0, "/bin/sh", "-c", "/bin/sleep 0.05; exec /bin/sleep 0.05")
	as(t, 1, 1000, "/bin/sleep", "0.05")
	as(t, 2, 0, "/bin/true") // of nobody
	w.Remove(t.Context(), id, nil)
	w.Remove(t.Context(), other, nil)
	must(t, w.Close())
	if got := o.of(id); len(got) != 3 || !isFile(got[0], "sh") || got[0].UID != 0 || got[0].GID != 1 || len(got[0].Args) != 3 ||
		!isFile(got[1], "sleep") || !isFile(got[2], "sleep") {
		t.Errorf("%+v", got)
	}
	if got := o.of(other); len(got) != 1 || got[0].UID != 1000 || got[0].GID != 1001 || got[0].PPID != 0 || time.Since(got[0].Time).Abs() > time.Minute {
		t.Errorf("%+v", got)
	}
	if len(o.all) != 2 {
		t.Errorf("also of %v", o.all)
	}
}

// isFile reports whether the file of a program is known, which busybox may be, and its name is that.
func isFile(r dsec.AuditRecord, name string) bool {
	return len(r.Args) > 0 && strings.HasSuffix(r.Args[0], name) && strings.HasPrefix(r.Exe, "/") && (strings.HasSuffix(r.Exe, "/busybox") || strings.Contains(r.Exe, name))
}

// TestNoStartIsUncounted: whatever is too fast is counted, by the kernel itself.
func TestNoStartIsUncounted(t *testing.T) {
	k, o := linux.NewKeeper(), &told{}
	defer k.Close()
	w := openWitness(t, k, o)
	id := newID()
	must(t, w.Add(t.Context(), audit.Subject{ID: id, UID: base}, false))
	must(t, w.Start())
	const each, parallel = 1500, 3
	var wg sync.WaitGroup
	for range parallel {
		wg.Go(func() {
			as(t, 0, 0, "/bin/sh", "-c", fmt.Sprintf("i=0; while [ $i -lt %d ]; do i=$((i+1)); /bin/true; done", each))
		})
	}
	wg.Wait()
	w.Remove(t.Context(), id, nil)
	must(t, w.Close())
	var starts, lost, unnamed int64
	for _, r := range o.of(id) {
		switch {
		case r.Kind == dsec.AuditLost:
			lost += r.Count
		case strings.HasPrefix(r.Exe, "~"):
			unnamed++
			fallthrough
		default:
			starts++
		}
	}
	t.Logf("%d told, %d of them without their file, %d counted as lost", starts, unnamed, lost)
	if starts+lost != parallel*(each+1) {
		t.Errorf("%d told and %d lost of %d", starts, lost, parallel*(each+1))
	}
}

// TestStartsAreKeptWhileNobodyReads: the agent was away.
func TestStartsAreKeptWhileNobodyReads(t *testing.T) {
	k, o := linux.NewKeeper(), &told{}
	defer k.Close()
	w := openWitness(t, k, o)
	id, gone := newID(), newID()
	must(t, w.Add(t.Context(), audit.Subject{ID: id, UID: base}, false))
	must(t, w.Add(t.Context(), audit.Subject{ID: gone, UID: base + 1<<idsOf}, false))
	must(t, w.Start())
	must(t, w.Close())
	as(t, 0, 7, "/bin/true")
	as(t, 1, 7, "/bin/true")
	w = openWitness(t, k, o)
	must(t, w.Add(t.Context(), audit.Subject{ID: id, UID: base}, true))
	must(t, w.Start())
	w.mu.Lock()
	w.settleLocked()
	w.mu.Unlock()
	if got := o.of(id); len(got) != 1 || !ended(got[0], "/bin/true", "true") || got[0].UID != 7 {
		t.Errorf("%+v", got)
	}
	if _, err := w.kept.missed(1); err == nil {
		t.Error("a sandbox that is not there any more is still told of")
	}
	w.Remove(t.Context(), id, nil)
	must(t, w.Close())
}

// TestForgottenIsNotKept: a node that is to look no more leaves nothing in the kernel.
func TestForgottenIsNotKept(t *testing.T) {
	k, o := linux.NewKeeper(), &told{}
	defer k.Close()
	w := openWitness(t, k, o)
	c := w.cfg
	must(t, w.Start())
	must(t, w.Close())
	names := []string{"link", "subjects", "told", "ring"}
	for _, n := range names {
		f, err := k.Get(t.Context(), keptName(c, n))
		must(t, err)
		must(t, f.Close())
	}
	for range 2 { // nothing is fine too
		must(t, Forget(t.Context(), c))
	}
	for _, n := range names {
		if f, err := k.Get(t.Context(), keptName(c, n)); !errors.Is(err, dsec.NotFound.Err()) {
			t.Errorf("%s is kept: %v %v", n, f, err)
		}
	}
}

// ended reports whether a program is told as one that had ended.
func ended(r dsec.AuditRecord, asked, name string) bool {
	if hasTypes() != nil {
		asked = name
	}
	return r.Exe == "~"+asked
}

// TestAnOlderOnesIsDropped: the ring of an earlier layout is read by nobody, which is told of sandboxes that lived,
// also by the second process that tries, if the first was killed when it had made its own.
func TestAnOlderOnesIsDropped(t *testing.T) {
	for name, killed := range map[string]bool{"at once": false, "by the second": true} {
		t.Run(name, func(t *testing.T) { olderIsDropped(t, killed) })
	}
}

func olderIsDropped(t *testing.T, killed bool) {
	k, o := linux.NewKeeper(), &told{}
	defer k.Close()
	w := openWitness(t, k, o)
	c, parts := w.cfg, []string{"link", "subjects", "told", "ring"}
	for _, n := range parts {
		f, err := k.Get(t.Context(), keptName(c, n))
		must(t, err)
		must(t, k.Put(t.Context(), nameIn(older[0], c, n), f))
		must(t, f.Close())
		if !killed {
			must(t, k.Drop(t.Context(), keptName(c, n)))
		}
	}
	must(t, w.Start())
	must(t, w.Close())
	w = openWitness(t, k, o)
	id, fresh := newID(), newID()
	must(t, w.Add(t.Context(), audit.Subject{ID: id, UID: base}, true))
	must(t, w.Add(t.Context(), audit.Subject{ID: fresh, UID: base + 1<<idsOf}, false))
	if got := o.of(id); len(got) != 1 || got[0].Kind != dsec.AuditLost || len(o.of(fresh)) != 0 {
		t.Errorf("%+v %+v", got, o.of(fresh))
	}
	must(t, w.Start())
	must(t, w.Close())
	for _, n := range parts {
		if f, err := k.Get(t.Context(), nameIn(older[0], c, n)); !errors.Is(err, dsec.NotFound.Err()) {
			t.Errorf("%s is kept: %v %v", n, f, err)
		}
	}
	must(t, Forget(t.Context(), c))
}
