package machine

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/process"
)

// TestEvidenceHasNoGapWhereTheAgentWasKilled: what a sandbox does in between is told by
// the next one, and with the machine goes all that was in the kernel for it.
func TestEvidenceHasNoGapWhereTheAgentWasKilled(t *testing.T) {
	h := start(t)
	id := h.create(func(s *dsec.Spec) { s.Watch = []string{"/tests/**"} })
	before := kernelEvidence(t, h.holdPID())
	if len(before.links) == 0 || before.groups == 0 {
		t.Fatalf("nothing looks: %+v", before)
	}
	if _, err := h.Exec(t.Context(), id, process.Spec{Argv: []string{"/bin/sh", "-c",
		"b=/bin/busybox; $b mkdir /tests; i=0; while [ $i -lt 400 ]; do i=$((i+1)); echo x > /tests/f$i; $b sleep 0.01; done; $b rm /bin/wc; echo done > /tests/last"}}); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		h.Kill("node")
		eventually(t, "the next agent answers", func() bool { _, err := h.Get(t.Context(), id); return err == nil })
	}
	eventually(t, "the command has ended", func() bool { out, _ := h.sh(id, "cat /tests/last"); return out == "done\n" })
	if after := kernelEvidence(t, h.holdPID()); fmt.Sprint(after) != fmt.Sprint(before) {
		t.Errorf("after three agents there is %+v, before was %+v", after, before)
	}
	if _, err := h.Delete(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	wrote, differs := map[string]bool{}, map[string]bool{}
	var sleeps int64
	err := h.Audit(t.Context(), id, dsec.AuditFilter{}, func(r dsec.AuditRecord) error {
		switch {
		case r.Kind == dsec.AuditProcess && strings.HasSuffix(r.Exe, "busybox"):
			sleeps += max(1, r.Count)
		case r.Kind == dsec.AuditWrite && strings.HasPrefix(r.Detail, dsec.WriteDiffers):
			differs[r.Path] = true
		case r.Kind == dsec.AuditWrite && strings.HasPrefix(r.Detail, dsec.WriteChanged), r.Kind == dsec.AuditWrite && r.Detail == dsec.WriteRemoved:
			wrote[r.Path] = true
		case r.Kind == dsec.AuditLost:
			t.Errorf("lost: %+v", r)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for i := 1; i <= 400; i++ {
		if f := fmt.Sprint("/tests/f", i); !wrote[f] || !differs[f] {
			t.Errorf("%s: told %v, found at the end %v", f, wrote[f], differs[f])
		}
	}
	if !wrote["/bin/wc"] || !differs["/bin/wc"] {
		t.Error("that a tool was removed is not told")
	}
	if sleeps < 400 {
		t.Errorf("%d starts of 400", sleeps)
	}
	h.Down()
	before.gone(t)
}

// inKernel is what a hold keeps for the witnesses.
type inKernel struct {
	groups int   // of fanotify
	links  []int // ids, of BPF links that are no packet filters
	maps   []int
}

func kernelEvidence(t *testing.T, hold int) (k inKernel) {
	t.Helper()
	all, err := filepath.Glob(fmt.Sprintf("/proc/%d/fdinfo/*", hold))
	if err != nil || len(all) == 0 {
		t.Fatalf("descriptors of the hold: %v %v", all, err)
	}
	for _, name := range all {
		b, err := os.ReadFile(name)
		text := string(b)
		switch {
		case errors.Is(err, os.ErrNotExist), errors.Is(err, syscall.ESRCH):
		case err != nil:
			t.Fatal(err)
		case strings.Contains(text, "fanotify flags:"):
			k.groups++
		case strings.Contains(text, "tp_name:"):
			k.links = append(k.links, number(text, "link_id:"))
		case strings.Contains(text, "map_type:\t27"): // a ring
			k.maps = append(k.maps, number(text, "map_id:"))
		}
	}
	return k
}

func number(text, key string) int {
	_, rest, _ := strings.Cut(text, key)
	line, _, _ := strings.Cut(rest, "\n")
	n, _ := strconv.Atoi(strings.TrimSpace(line)) // of the kernel
	return n
}

// gone waits until none of it is there: the kernel frees it a little after the hold.
func (k inKernel) gone(t *testing.T) {
	t.Helper()
	eventually(t, "nothing of the witnesses is in the kernel", func() bool {
		for _, id := range k.links {
			if l, err := link.NewFromID(link.ID(id)); err == nil {
				_ = l.Close()
				return false
			}
		}
		for _, id := range k.maps {
			if m, err := ebpf.NewMapFromID(ebpf.MapID(id)); err == nil {
				_ = m.Close()
				return false
			}
		}
		return true
	})
}
