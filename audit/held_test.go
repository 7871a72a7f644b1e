package audit

import (
	"bytes"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"testing"

	"github.com/opendsec/dsec"
)

func starts(list []dsec.AuditRecord) (n int64) {
	for _, r := range list {
		if r.Kind == dsec.AuditProcess {
			n += max(1, r.Count)
		}
	}
	return n
}

// TestWhatIsHeldBackOutlivesTheProcess: the first store is never closed, as if it were killed.
func TestWhatIsHeldBackOutlivesTheProcess(t *testing.T) {
	dir, id, other, gone := t.TempDir(), newID(), newID(), newID()
	killed, c := openStore(t, dir, Sizes{})
	for range 100 {
		killed.Append(id, start("/bin/true", "true"))
		killed.Append(other, wrote("/x"))
		killed.Append(gone, wrote("/x"))
	}
	c.add(foldWithin)
	killed.Append(id, start("/bin/true", "true")) // what was held is written, this one is held
	must(t, os.RemoveAll(filepath.Join(dir, string(gone))))
	s, _ := openStore(t, dir, Sizes{})
	if n := starts(all(t, s, id, 0)); n != 101 {
		t.Errorf("%d starts of 101", n)
	}
	list := all(t, s, other, 0)
	if last := list[len(list)-1]; len(list) != foldAfter+1 || last.Count != 100-foldAfter || last.Path != "/x" {
		t.Errorf("%+v", list)
	}
	if known, err := s.Known(); err != nil || len(known) != 2 {
		t.Errorf("%v %v: a log was made for a sandbox that is no more", known, err)
	}
	s2, _ := openStore(t, dir, Sizes{}) // twice is not told twice
	if n := starts(all(t, s2, id, 0)); n != 101 {
		t.Errorf("%d starts of 101 the second time", n)
	}
}

func TestWhatWasWrittenOrRemovedIsNotHeld(t *testing.T) {
	dir, id, removed := t.TempDir(), newID(), newID()
	s, _ := openStore(t, dir, Sizes{})
	for range 100 {
		s.Append(id, start("/bin/true"))
		s.Append(removed, start("/bin/true"))
	}
	s.End(id)
	must(t, s.Remove(removed))
	if err := s.held.left(func(id dsec.SandboxID, r dsec.AuditRecord) { t.Errorf("%s: %+v", id, r) }); err != nil {
		t.Error(err)
	}
	must(t, s.Close())
}

// TestMoreThanCanBeHeldIsWritten: all is in the logs, just not folded.
func TestMoreThanCanBeHeldIsWritten(t *testing.T) {
	id := newID()
	s, _ := openStore(t, t.TempDir(), Sizes{})
	var mine []*slot
	r := start("/bin/true")
	for x := s.held.take(id, &r); x != nil; x = s.held.take(id, &r) {
		mine = append(mine, x)
	}
	if len(mine) != mostSlots {
		t.Errorf("%d slots", len(mine))
	}
	for range 10 {
		s.Append(id, start("/bin/true"))
	}
	if list := all(t, s, id, 0); len(list) != 10 {
		t.Errorf("%d of 10", len(list))
	}
	must(t, s.held.release(mine))
	for range 10 {
		s.Append(id, start("/bin/true"))
	}
	if list := all(t, s, id, 0); len(list) != 10 {
		t.Errorf("%d, with slots free again", len(list))
	}
	must(t, s.Close())
}

func TestGoldenHeld(t *testing.T) {
	file := filepath.Join(t.TempDir(), "held")
	h, err := openHeld(file)
	must(t, err)
	id := dsec.SandboxID("sfabcdefpuhamfz4sxa4tu3jo3wr")
	x := h.take(id, &golden[0])
	if x == nil || !x.add(6) {
		t.Fatal("not held")
	}
	must(t, h.close())
	b, err := os.ReadFile(file)
	must(t, err)
	name := filepath.Join("testdata", "held-v1.bin")
	if *update {
		must(t, os.WriteFile(name, b, 0o644))
	}
	want, err := os.ReadFile(name)
	must(t, err)
	if !bytes.Equal(b, want) {
		t.Error("what is written is not what is specified")
	}
	must(t, os.WriteFile(file, want, 0o600))
	h, err = openHeld(file)
	must(t, err)
	n := 0
	must(t, h.left(func(got dsec.SandboxID, r dsec.AuditRecord) {
		n++
		first := golden[0]
		first.Count = max(1, first.Count) + 6
		if got != id || !reflect.DeepEqual(r, first) {
			t.Errorf("%s: %+v", got, r)
		}
	}))
	if n != 1 {
		t.Errorf("%d held", n)
	}
	must(t, h.close())
}

func FuzzDecodeSlot(f *testing.F) {
	b, err := os.ReadFile(filepath.Join("testdata", "held-v1.bin"))
	must(f, err)
	f.Add(b[slotBytes:])
	f.Add(make([]byte, slotBytes))
	f.Fuzz(func(t *testing.T, b []byte) {
		id, r, ok := decodeSlot(b)
		if ok && (len(id) > slotID || r.Count < 0 || r.Count == 1) {
			t.Fatalf("%q %+v", id, r)
		}
	})
}

// TestAFileOfAnotherVersionIsMadeAnew, and so is one that was cut anywhere.
func TestAFileOfAnotherVersionIsMadeAnew(t *testing.T) {
	dir, id := t.TempDir(), newID()
	s, _ := openStore(t, dir, Sizes{})
	for range 10 {
		s.Append(id, start("/bin/true"))
	}
	file := filepath.Join(dir, heldName)
	b, err := os.ReadFile(file)
	must(t, err)
	for _, bad := range [][]byte{nil, b[:3], b[:len(heldMagic)], b[:slotBytes+100], append([]byte("dsechld9"), b[8:]...), bytes.Repeat([]byte{255}, 3*slotBytes)} {
		must(t, os.WriteFile(file, bad, 0o600))
		again, _ := openStore(t, dir, Sizes{})
		for range 10 {
			again.Append(id, wrote("/y"))
		}
		again.End(id)
		list := all(t, again, id, 0)
		if r := list[len(list)-1]; r.Count != 10-foldAfter {
			t.Errorf("%d bytes: %+v", len(bad), r)
		}
		must(t, again.Close())
	}
}

// TestOneSandboxLeavesSlotsToOthers: what it says too much is written, and nothing is lost.
func TestOneSandboxLeavesSlotsToOthers(t *testing.T) {
	greedy, honest := newID(), newID()
	s, c := openStore(t, t.TempDir(), Sizes{})
	for range 2 { // also when what it held was written
		for range 3 * foldAfter {
			for n := range foldKeys {
				s.Append(greedy, start("/bin/"+strconv.Itoa(n)))
			}
		}
		s.held.mu.Lock()
		if n := s.held.next - len(s.held.free); n > foldSlots {
			t.Errorf("it has %d slots", n)
		}
		s.held.mu.Unlock()
		c.add(foldWithin)
	}
	for range 100 {
		s.Append(honest, start("/bin/true"))
	}
	if n := len(all(t, s, honest, 0)); n != foldAfter {
		t.Errorf("%d records are written, of which more were to be folded", n)
	}
	s.End(greedy)
	if n := starts(all(t, s, greedy, 0)); n != 2*3*foldAfter*foldKeys {
		t.Errorf("%d starts are told", n)
	}
	must(t, s.Close())
}

// TestWhatIsHeldBackIsOfItsPhase, and not of the one in which it is written.
func TestWhatIsHeldBackIsOfItsPhase(t *testing.T) {
	id := newID()
	s, _ := openStore(t, t.TempDir(), Sizes{})
	sum := map[string]int64{}
	for _, phase := range []string{"work", "grade"} {
		s.Append(id, dsec.AuditRecord{Kind: dsec.AuditPhase, Phase: phase})
		for range 100 {
			s.Append(id, start("/bin/true"))
		}
	}
	s.End(id)
	for _, r := range all(t, s, id, 0) {
		if r.Kind == dsec.AuditProcess {
			sum[r.Phase] += max(1, r.Count)
		}
	}
	if sum["work"] != 100 || sum["grade"] != 100 {
		t.Errorf("%v", sum)
	}
	must(t, s.Close())
}
