package container

import (
	"bytes"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/runtime"
)

var update = flag.Bool("update", false, "rewrite golden files")

func goldenRecord() *record {
	const id = "saaaaabbbbbcccccdddddeeee"
	return &record{
		Request: runtime.Request{ID: id, Spec: dsec.Spec{Tier: dsec.TierContainer, Image: "base:1", Command: []string{"/bin/sh"},
			Env: map[string]string{"A": "b"}, Limits: dsec.Limits{CPU: 1.5, Memory: 1 << 30, Pids: 100, Disk: 1 << 30}},
			Layers: layer.Set{Lease: id, Layers: []layer.Local{{Info: layer.Info{Digest: "sha256:00", MetaSize: 4096}, Meta: "/l/meta", Data: "/l/data"}},
				Config: image.Config{Env: []string{"PATH=/bin"}, User: "user"}}},
		UID: 1 << 28, Begun: time.Date(2026, 11, 29, 17, 0, 0, 0, time.UTC), Starts: 2, Stopped: true, Last: &runtime.Stats{Memory: 1},
	}
}

func TestStateFileFormatIsStable(t *testing.T) {
	golden := filepath.Join("testdata", "state")
	b, err := goldenRecord().encode()
	if err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(golden, b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(b, want) {
		t.Errorf("encoded\n%s\nwant\n%s", b, want)
	}
	r, err := decodeRecord(want)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := r.encode(); err != nil || !bytes.Equal(again, want) {
		t.Errorf("decoded and encoded\n%s %v", again, err)
	}
}

func TestStateFileOfAnotherVersionOrSandboxIsRefused(t *testing.T) {
	b, err := goldenRecord().encode()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, stateFile), append([]byte("2\n"), b[2:]...), 0o600))
	if _, err := readRecord(dir, goldenRecord().Request.ID); !errors.Is(err, dsec.Unsupported.Err()) {
		t.Errorf("version 2: %v", err)
	}
	if err := writeRecord(dir, goldenRecord()); err != nil {
		t.Fatal(err)
	}
	if _, err := readRecord(dir, "saother"); !errors.Is(err, dsec.Corrupt.Err()) {
		t.Errorf("another sandbox's file: %v", err)
	}
	if r, err := readRecord(dir, goldenRecord().Request.ID); err != nil || r.Starts != 2 {
		t.Errorf("%+v, %v", r, err)
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
		if err == nil && (r.Starts < 1 || r.UID == 0) {
			t.Errorf("accepted %+v", r)
		}
	})
}

func TestStopSignals(t *testing.T) {
	for in, want := range map[string]int{"": 15, "SIGTERM": 15, "SIGINT": 2, "quit": 3, "9": 9, "SIGRTMIN+3": 15, "999": 15} {
		if got := signalOf(in); got != want {
			t.Errorf("%q: %d, want %d", in, got, want)
		}
	}
}
