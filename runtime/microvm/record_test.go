package microvm

import (
	"errors"
	"flag"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/netpolicy"
	"github.com/opendsec/dsec/runtime"
)

var update = flag.Bool("update", false, "rewrite golden files")

func goldenRecord() *record {
	const id = "satexampleexampleexample"
	return &record{
		Request: runtime.Request{ID: id, Spec: dsec.Spec{Tier: dsec.TierMicroVM, Image: "base", Network: dsec.NetworkOpen, Limits: dsec.Limits{CPU: 1, Memory: 1 << 28, Disk: 1 << 30}},
			Layers: layer.Set{Lease: id, Layers: []layer.Local{{Info: layer.Info{Digest: "sha256:00", MetaSize: 4096, DataSize: 8192}, Meta: "/l/meta", Data: "/l/data"}}}, From: "fork1"},
		Begun: time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC), Starts: 2, Ready: 2, MachineID: "0123456789abcdef0123456789abcdef", Read: []bool{true},
		Lease: &lease{Lease: netpolicy.Lease{Mode: dsec.NetworkOpen, Address: netip.MustParseAddr("100.96.0.16"), Gateway: netip.MustParseAddr("100.96.0.1")}, MAC: "02:00:00:00:00:01", MTU: 1500},
		Last:  &runtime.Stats{CPU: time.Second, Memory: 1 << 20},
	}
}

func TestRecordIsAsSpecified(t *testing.T) {
	golden := filepath.Join("testdata", "state")
	b, err := goldenRecord().encode()
	must(t, err)
	if *update {
		must(t, os.WriteFile(golden, b, 0o644))
	}
	want, err := os.ReadFile(golden)
	must(t, err)
	if string(b) != string(want) {
		t.Errorf("%s\nwant %s", b, want)
	}
	dir := t.TempDir()
	id := goldenRecord().Request.ID
	must(t, writeRecord(dir, goldenRecord()))
	if r, err := readRecord(dir, id); err != nil || r.Starts != 2 || r.Lease.Address != goldenRecord().Lease.Address {
		t.Errorf("%+v %v", r, err)
	}
	if _, err := readRecord(dir, "another"); !errors.Is(err, dsec.Corrupt.Err()) {
		t.Error(err)
	}
	b[0] = '9'
	must(t, os.WriteFile(filepath.Join(dir, stateFile), b, 0o600))
	if _, err := readRecord(dir, id); !errors.Is(err, dsec.Unsupported.Err()) {
		t.Error(err)
	}
	for _, bad := range []string{"", "1", "1\n", "1\n{}", "1\n{\"starts\":1,\"ready\":2}", "x\n{}"} {
		if r, err := decodeRecord([]byte(bad)); err == nil {
			t.Errorf("%q: %+v", bad, r)
		}
	}
	must(t, writeExit(dir, runtime.Exit{ID: id, Cause: dsec.CauseOOM}))
	if x := readExit(dir, id); x == nil || x.Cause != dsec.CauseOOM || x.ID != id {
		t.Errorf("%+v", x)
	}
	must(t, os.WriteFile(filepath.Join(dir, exitFile), []byte("{"), 0o600))
	if x := readExit(dir, id); x == nil || x.Cause != dsec.CauseUnknown {
		t.Errorf("%+v", x)
	}
	must(t, forgetExit(dir))
	must(t, forgetExit(dir))
	if x := readExit(dir, id); x != nil {
		t.Errorf("%+v", x)
	}
}

func FuzzDecodeRecord(f *testing.F) {
	b, err := goldenRecord().encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte("1\n{}"))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := decodeRecord(b)
		if err != nil {
			return
		}
		if _, err := r.encode(); err != nil {
			t.Error(err)
		}
	})
}

// Shapes are few, and never too small for what is in them.
func TestShapesAreFew(t *testing.T) {
	seen := map[int64]bool{}
	for n := int64(1); n < 64<<30; n = n*5/4 + 4097 {
		s := slotSize(n)
		if s < n || s > 4*max(n, smallSlot) || s%smallSlot != 0 {
			t.Errorf("a slot of %d bytes for %d", s, n)
		}
		seen[s] = true
		l := dsec.Limits{Memory: n, Output: 64 << 20}
		if m := memorySize(l, []int64{s}); m < n+n/pageShare+s/pageShare+guestOwn || m%(1<<20) != 0 {
			t.Errorf("a machine of %d bytes for %d", m, n)
		}
		if d := diskSize(n); d < fileSystemSize(n) || fileSystemSize(n) < n {
			t.Errorf("a disk of %d bytes for %d", d, n)
		}
	}
	if len(seen) > 14 {
		t.Errorf("%d sizes of slots", len(seen))
	}
	if diskSize(dsec.MaxBytes) != 0 {
		t.Error("a disk of a petabyte")
	}
}
