package node

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"testing"
	"time"

	"github.com/opendsec/dsec"
)

var update = flag.Bool("update", false, "write the golden files")

func goldenRecord() *record {
	at := time.Date(2030, 1, 2, 3, 4, 5, 678, time.UTC)
	res := dsec.NewResult(dsec.CauseOOM, "run", dsec.InducedBySelf, "memory.max 64 MiB, peak 64 MiB, oom_kill 1")
	res.Usage = dsec.Usage{Wall: time.Minute, CPU: time.Second, MemoryPeak: 64 << 20, OOMKills: 1, Starts: 1, ExecsStarted: 1}
	return &record{ID: "seaaaaabbbbbbbbbbbbbbbbbbbb", Project: "proj", State: dsec.Failed, Intent: intentDestroy, Result: res,
		Spec: dsec.Spec{Tier: dsec.TierContainer, Image: "base:1", Layers: []dsec.LayerRef{"work:1"}, Env: map[string]string{"A": "b"},
			Limits: dsec.Limits{CPU: 1, Memory: 64 << 20}, Lifetimes: dsec.Lifetimes{Idle: time.Hour}, CallID: "key"},
		Digests: []string{"sha256:00"}, Created: at, Changed: at.Add(time.Minute), Ended: at.Add(time.Minute), Expires: at.Add(time.Hour), Active: at, Started: at, Starts: 1,
		Steps: []dsec.Step{{Name: "layers", Took: time.Millisecond}}, Usage: res.Usage, Seq: 7,
		Events:   []dsec.Event{{Sandbox: "seaaaaabbbbbbbbbbbbbbbbbbbb", Seq: 7, Time: at, Type: dsec.EventState, From: dsec.Running, To: dsec.Failed}},
		Outputs:  []output{{Exec: "e1", Argv: "tail /dev/zero", Status: "exited", Code: 137, OOM: true, Started: at, Wall: 1.5, Stderr: []byte{0, 0xff}, Total: 2}},
		SpecHash: "ab"}
}

func TestRecordFormatIsAsItWas(t *testing.T) {
	const path = "testdata/record-v1"
	want := goldenRecord()
	if *update {
		if err := os.WriteFile(path, append(want.encode(), '\n'), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	got, err := decodeRecord(bytes.TrimSuffix(b, []byte("\n")))
	if err != nil {
		t.Fatal(err)
	}
	if g, w := got.encode(), want.encode(); !bytes.Equal(g, w) {
		t.Fatalf("decoded %s\nwant %s", g, w)
	}
	if !bytes.Equal(append(want.encode(), '\n'), b) {
		t.Fatalf("encoded %s\nwant %s", want.encode(), b)
	}
}

func TestDecodeRecordRefusesDamage(t *testing.T) {
	good := goldenRecord().encode()
	bad := map[string][]byte{
		"empty":      nil,
		"version":    append([]byte{9}, good[1:]...),
		"cut":        good[:len(good)/2],
		"more after": append(bytes.Clone(good), "{}"...),
		"id":         bytes.Replace(good, []byte("seaaaaa"), []byte("../../x"), 1),
		"state":      bytes.Replace(good, []byte(`"state":"failed"`), []byte(`"state":"fainted"`), 1),
	}
	for what, b := range bad {
		_, err := decodeRecord(b)
		if dsec.ClassOf(err) != dsec.Corrupt {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func FuzzDecodeRecord(f *testing.F) {
	f.Add(goldenRecord().encode())
	f.Add([]byte{recordVersion})
	f.Add([]byte("\x01{\"id\":\"x\"}"))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := decodeRecord(b)
		if err != nil {
			if dsec.ClassOf(err) != dsec.Corrupt {
				t.Fatal(err)
			}
			return
		}
		again, err := decodeRecord(r.encode())
		if err != nil {
			t.Fatalf("what was read cannot be written: %v", err)
		}
		x, _ := json.Marshal(r.sandbox())
		y, _ := json.Marshal(again.sandbox())
		if !bytes.Equal(x, y) {
			t.Fatalf("%s became %s", x, y)
		}
	})
}

func TestOldRecordsArePrunedByAgeAndSize(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Records = Retention{Age: 48 * time.Hour, Bytes: 8000} })
	var ids []dsec.SandboxID
	for range 12 {
		sb := w.create(nil)
		ids = append(ids, sb.ID)
		if _, err := w.Delete(t.Context(), sb.ID, ""); err != nil {
			t.Fatal(err)
		}
		w.clock.add(time.Minute)
	}
	w.clock.add(time.Hour)
	w.sweep()
	list, err := w.List(t.Context(), Filter{All: true})
	if err != nil || len(list) == 0 || len(list) >= 12 || list[len(list)-1].ID != ids[11] {
		t.Fatalf("%d records, %v", len(list), err)
	}
	_, err = w.Get(t.Context(), ids[0])
	wantClass(t, err, dsec.NotFound)
	w.clock.add(50 * time.Hour)
	w.sweep()
	if list, err := w.List(t.Context(), Filter{All: true}); len(list) != 0 || err != nil {
		t.Fatalf("%d records after their time, %v", len(list), err)
	}
}
