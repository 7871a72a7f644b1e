package machine

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
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
	// What an agent had read and not written down when it was killed, the next one finds on the disk.
	eventually(t, "every file is told while the sandbox lives", func() bool {
		e := h.evidence(t, id)
		for i := 1; i <= 400; i++ {
			if f := fmt.Sprint("/tests/f", i); !e.wrote[f] && !e.differs[f] {
				return false
			}
		}
		return true
	})
	if _, err := h.Delete(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	e := h.evidence(t, id)
	unseen := 0
	for i := 1; i <= 400; i++ {
		f := fmt.Sprint("/tests/f", i)
		if !e.differs[f] {
			t.Errorf("%s is not found at the end", f)
		}
		if !e.wrote[f] {
			unseen++
		}
	}
	if unseen > 3*inHand {
		t.Errorf("%d of 400 writes were only found on the disk: the kernel did not keep the events", unseen)
	}
	if !e.wrote["/bin/wc"] || !e.differs["/bin/wc"] {
		t.Error("that a tool was removed is not told")
	}
	if e.starts < 400-3*inHand {
		t.Errorf("%d starts of 400", e.starts)
	}
	if len(e.lost) > 0 {
		t.Errorf("lost: %+v", e.lost)
	}
	h.Down()
	before.gone(t)
}

// inHand is how many events an agent may have read that it has not written down.
const inHand = 20

// evidence is what the audit log of a sandbox says.
type evidence struct {
	wrote, differs map[string]bool
	starts         int64 // of sleep; of those that had ended before they were looked at only the program is known
	lost           []dsec.AuditRecord
}

func (h *host) evidence(t *testing.T, id dsec.SandboxID) evidence {
	t.Helper()
	e := evidence{wrote: map[string]bool{}, differs: map[string]bool{}}
	err := h.Audit(t.Context(), id, dsec.AuditFilter{}, func(r dsec.AuditRecord) error {
		switch {
		case r.Kind == dsec.AuditProcess && strings.HasSuffix(r.Exe, "busybox") && (len(r.Args) == 0 || slices.Contains(r.Args, "sleep")):
			e.starts += max(1, r.Count)
		case r.Kind == dsec.AuditWrite && strings.HasPrefix(r.Detail, dsec.WriteDiffers):
			e.differs[r.Path] = true
		case r.Kind == dsec.AuditWrite:
			e.wrote[r.Path] = true
		case r.Kind == dsec.AuditLost:
			e.lost = append(e.lost, r)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return e
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
