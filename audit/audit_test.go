package audit

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opendsec/dsec"
)

var update = flag.Bool("update", false, "write the golden files anew")

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func newID() dsec.SandboxID { return dsec.NewSandboxID("abcdef") }

// clock is set by hand, also while a Store asks it.
type clock struct{ now atomic.Int64 } // nanoseconds since 1970

func (c *clock) time() time.Time { return time.Unix(0, c.now.Load()) }

func (c *clock) add(d time.Duration) { c.now.Add(int64(d)) }

func openStore(t *testing.T, dir string, s Sizes) (*Store, *clock) {
	t.Helper()
	c := &clock{}
	c.add(1_700_000_000 * time.Second)
	st, err := Open(Config{Dir: dir, Sizes: s, Clock: c.time})
	must(t, err)
	return st, c
}

func all(t *testing.T, s *Store, id dsec.SandboxID, since uint64) []dsec.AuditRecord {
	t.Helper()
	c, err := s.Read(id, since)
	must(t, err)
	r, err := c.Next()
	must(t, err)
	return r
}

func start(exe string, args ...string) dsec.AuditRecord {
	return dsec.AuditRecord{Kind: dsec.AuditProcess, PID: 7, UID: 1000, GID: 1000, Exe: exe, Args: args}
}

func wrote(path string) dsec.AuditRecord {
	return dsec.AuditRecord{Kind: dsec.AuditWrite, Path: path, Detail: dsec.WriteChanged}
}

func TestRecordsComeBackInOrderAndAreStamped(t *testing.T) {
	dir, id := t.TempDir(), newID()
	s, c := openStore(t, dir, Sizes{})
	s.Append(id, start("/bin/sh", "sh", "-c", "x"))
	s.Append(id, dsec.AuditRecord{Kind: dsec.AuditPhase, Phase: "test"}, wrote("/bin/sh"))
	s.Append(id, start("/bin/true"))
	must(t, s.Close())
	s, _ = openStore(t, dir, Sizes{}) // another process
	defer s.Close()
	s.Append(id, wrote("/bin/ls"))
	got := all(t, s, id, 0)
	if len(got) != 5 {
		t.Fatalf("%+v", got)
	}
	for i, r := range got {
		if r.Seq != uint64(i+1) || !r.Time.Equal(c.time()) || i > 0 && r.Phase != "test" {
			t.Errorf("record %d: %+v", i, r)
		}
	}
	if got[0].Exe != "/bin/sh" || got[3].Exe != "/bin/true" || got[4].Path != "/bin/ls" {
		t.Errorf("%+v", got)
	}
	if got := all(t, s, id, 4); len(got) != 1 || got[0].Seq != 5 {
		t.Errorf("after 4: %+v", got)
	}
}

// TestNoFloodPushesOutTheBeginning, nor one of programs anything else.
func TestNoFloodPushesOutTheBeginning(t *testing.T) {
	dir, id := t.TempDir(), newID()
	size := Sizes{Segment: 4 << 10, Head: 2, Tail: 2}
	s, _ := openStore(t, dir, size)
	defer s.Close()
	s.Append(id, wrote("/bin/first"))
	const flood = 5000
	for i := range flood {
		s.Append(id, start("/bin/true", fmt.Sprint(i)))
	}
	got := all(t, s, id, 0)
	if got[0].Path != "/bin/first" || got[1].Args[0] != "0" || got[len(got)-1].Args[0] != fmt.Sprint(flood-1) {
		t.Errorf("begins with %+v, ends with %+v", got[:2], got[len(got)-1])
	}
	var sum, lost int64
	for i, r := range got {
		if i > 0 && r.Seq <= got[i-1].Seq {
			t.Errorf("record %d is number %d after %d", i, r.Seq, got[i-1].Seq)
		}
		if r.Kind == dsec.AuditLost {
			lost += r.Count
		} else {
			sum++
		}
	}
	if lost == 0 || sum+lost != flood+1 {
		t.Errorf("%d there and %d missing of %d", sum, lost, flood+1)
	}
	var bytes int64
	entries, err := os.ReadDir(filepath.Join(dir, string(id)))
	must(t, err)
	for _, e := range entries {
		i, err := e.Info()
		must(t, err)
		bytes += i.Size()
	}
	if most := 2 * int64(size.Head+size.Tail) * (size.Segment + 512); bytes > most {
		t.Errorf("%d bytes, at most %d", bytes, most)
	}
}

func TestWhatIsAlikeIsFolded(t *testing.T) {
	id := newID()
	s, c := openStore(t, t.TempDir(), Sizes{})
	defer s.Close()
	const n = 1000
	for range n {
		s.Append(id, start("/bin/true", "true"))
	}
	s.Append(id, start("/bin/true", "false"))
	if got := all(t, s, id, 0); len(got) != foldAfter+1 {
		t.Errorf("%d records at first", len(got))
	}
	c.add(foldWithin)
	s.Append(id, wrote("/x"))
	s.End(id)
	var sum int64
	got := all(t, s, id, 0)
	for _, r := range got {
		if r.Kind == dsec.AuditProcess {
			sum += max(1, r.Count)
		}
	}
	if sum != n+1 || len(got) != foldAfter+3 {
		t.Errorf("%d records of %d starts", len(got), sum)
	}
}

func TestFollowWaitsForNews(t *testing.T) {
	id := newID()
	s, _ := openStore(t, t.TempDir(), Sizes{})
	defer s.Close()
	c, err := s.Read(id, 0)
	must(t, err)
	if r, err := c.Next(); err != nil || len(r) != 0 {
		t.Fatalf("%v %v", r, err)
	}
	go s.Append(id, wrote("/a"))
	must(t, c.Wait(t.Context()))
	if r, err := c.Next(); err != nil || len(r) != 1 {
		t.Fatalf("%v %v", r, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := c.Wait(ctx); dsec.ClassOf(err) != dsec.Canceled {
		t.Errorf("nothing new: %v", err)
	}
	go func() { _ = s.Remove(id) }()
	if err := c.Wait(t.Context()); err != nil && !errors.Is(err, dsec.NotFound.Err()) { // before it asked, or while it waited
		t.Error(err)
	}
	if err := c.Wait(t.Context()); !errors.Is(err, dsec.NotFound.Err()) {
		t.Errorf("removed: %v", err)
	}
}

func TestATornEndIsCutOff(t *testing.T) {
	dir, id := t.TempDir(), newID()
	s, _ := openStore(t, dir, Sizes{})
	s.Append(id, wrote("/a"), wrote("/b"))
	must(t, s.Close())
	file := filepath.Join(dir, string(id), "other-0")
	b, err := os.ReadFile(file)
	must(t, err)
	for cut := range len(b) {
		must(t, os.WriteFile(file, b[:cut], 0o600))
		s, _ := openStore(t, dir, Sizes{})
		s.Append(id, wrote("/c"))
		got := all(t, s, id, 0)
		if n := len(got); n == 0 || n > 2 || got[n-1].Path != "/c" || n == 2 && got[0].Path != "/a" {
			t.Fatalf("cut at %d: %+v", cut, got)
		}
		must(t, s.Close())
	}
}

func TestAnIDIsNoPath(t *testing.T) {
	s, _ := openStore(t, t.TempDir(), Sizes{})
	defer s.Close()
	for _, id := range []dsec.SandboxID{"", "..", "../../etc"} {
		if _, err := s.Read(id, 0); err == nil {
			t.Errorf("%q is read", id)
		}
		if err := s.Remove(id); err == nil {
			t.Errorf("%q is removed", id)
		}
		s.Append(id, wrote("/x"))
	}
}

// TestLongTextsAreCut, and none breaks the log.
func TestLongTextsAreCut(t *testing.T) {
	id := newID()
	s, _ := openStore(t, t.TempDir(), Sizes{})
	defer s.Close()
	long := strings.Repeat("\x01\xffé", 100_000)
	s.Append(id, dsec.AuditRecord{Kind: dsec.AuditWrite, Exe: long, Path: long, Detail: long, Exec: long, Args: []string{long, long}},
		start("/bin/x", strings.Split(strings.Repeat("a,", 1000), ",")...))
	got := all(t, s, id, 0)
	if len(got) != 2 {
		t.Fatalf("%d records", len(got))
	}
	if r := got[0]; len(r.Exe) > dsec.MaxAuditText+3 || len(strings.Join(r.Args, "")) > dsec.MaxAuditArgBytes+6 {
		t.Errorf("%d %d", len(r.Exe), len(strings.Join(r.Args, "")))
	}
	if r := got[1]; len(r.Args) != dsec.MaxAuditArgs+1 {
		t.Errorf("%d arguments", len(r.Args))
	}
}

var golden = []dsec.AuditRecord{
	{Seq: 1, Time: time.Unix(1_700_000_000, 123).UTC(), Kind: dsec.AuditWrite, PID: 12, PPID: 1, UID: 1000, GID: 100, Exe: "/usr/bin/dash", Args: []string{"sh", "-c", "é"},
		Path: "/usr/bin/env", Detail: dsec.WriteMoved, Exec: "abc", Phase: "work", Count: 3},
	{Seq: 2, Time: time.Unix(1_700_000_001, 0).UTC(), Kind: dsec.AuditLost, UID: -1, GID: -1, Detail: "why"},
}

func TestGoldenSegment(t *testing.T) {
	b := []byte(magic)
	var err error
	for i := range golden {
		b, err = appendFrame(b, &golden[i])
		must(t, err)
	}
	file := filepath.Join("testdata", "segment-v1.bin")
	if *update {
		must(t, os.MkdirAll("testdata", 0o755))
		must(t, os.WriteFile(file, b, 0o644))
	}
	want, err := os.ReadFile(file)
	must(t, err)
	if !bytes.Equal(b, want) {
		t.Error("what is written is not what is specified")
	}
	var got []dsec.AuditRecord
	end, _, err := readSegment(file, 0, -1, func(r dsec.AuditRecord) { got = append(got, r) })
	if err != nil || end != int64(len(want)) || !reflect.DeepEqual(got, golden) {
		t.Errorf("%d %v %+v", end, err, got)
	}
}

func FuzzDecodeFrame(f *testing.F) {
	for i := range golden {
		b, err := appendFrame(nil, &golden[i])
		must(f, err)
		f.Add(b)
	}
	f.Add([]byte{255, 255, 255, 255, 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		r, n, err := decodeFrame(b)
		if err != nil {
			return
		}
		if n <= frameHeader || n > len(b) {
			t.Fatalf("%d of %d bytes", n, len(b))
		}
		again, err := appendFrame(nil, &r)
		must(t, err)
		if r2, _, err := decodeFrame(again); err != nil || !reflect.DeepEqual(r, r2) && len(r.Args) > 0 {
			t.Fatalf("%+v is %+v: %v", r, r2, err)
		}
	})
}
