package layer

import (
	"bytes"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
)

func sampleCheckpoint() Checkpoint {
	return Checkpoint{Version: CheckpointVersion, Project: "p", Sandbox: "satuzngwdttdwarxlyqqtjb", Time: time.Date(2026, 11, 30, 1, 2, 3, 4, time.UTC),
		Spec: dsec.Spec{Tier: dsec.TierMicroVM, Image: dsec.LayerRef(DigestOf([]byte("base"))), Layers: []dsec.LayerRef{dsec.LayerRef(DigestOf([]byte("top")))},
			Env: map[string]string{"A": "<&>"}, Network: dsec.NetworkNone, OOM: dsec.OOMExec,
			Limits: dsec.Limits{CPU: 1, CPUWeight: 100, Memory: 1 << 30, Pids: 512, Disk: 4 << 30, Output: 64 << 20}, Lifetimes: dsec.Lifetimes{Idle: time.Hour}},
		Config: image.Config{Env: []string{"PATH=/bin"}}, Machine: []byte(`{"read":[false,true],"monitor":{"snapshot":{},"cpu":""}}`),
		Disk: Chunked{Size: 8 << 20, Count: 2, Chunks: DigestOf([]byte("disk"))}, Memory: Chunked{Size: 5000, Count: 1, Chunks: DigestOf([]byte("memory"))}}
}

func encoded(t testing.TB, c Checkpoint) []byte {
	t.Helper()
	b, err := c.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestGoldenCheckpoint: what was written once is written, and read, the same for ever.
func TestGoldenCheckpoint(t *testing.T) {
	file, b := filepath.Join("testdata", "checkpoint-v1.json"), encoded(t, sampleCheckpoint())
	if *update {
		if err := os.WriteFile(file, b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(b, want) {
		t.Errorf("now %q", b)
	}
	got, err := DecodeCheckpoint(want, DigestOf(want))
	if err != nil || !reflect.DeepEqual(got, sampleCheckpoint()) {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestCheckpointsThatAreRefused(t *testing.T) {
	good := string(encoded(t, sampleCheckpoint()))
	replace := func(old, by string) string {
		if !strings.Contains(good, old) {
			t.Fatalf("no %s in it", old)
		}
		return strings.Replace(good, old, by, 1)
	}
	for what, c := range map[string]struct {
		text  string
		class dsec.Class
	}{
		"nothing":               {"", dsec.Corrupt},
		"half of one":           {good[:len(good)/2], dsec.Corrupt},
		"another version":       {replace(`"version":1`, `"version":2`), dsec.Unsupported},
		"a member nobody knows": {replace(`"version":1`, `"version":1,"more":1`), dsec.Corrupt},
		"two":                   {good + good, dsec.Corrupt},
		"nobody's":              {replace(`"project":"p"`, `"project":""`), dsec.Corrupt},
		"a long project":        {replace(`"project":"p"`, `"project":"`+strings.Repeat("p", 129)+`"`), dsec.Corrupt},
		"no sandbox":            {replace(`"sandbox":"s`, `"sandbox":"-`), dsec.Corrupt},
		"a tag for a layer":     {replace(`"image":"sha256:`, `"image":"tag:`), dsec.Corrupt},
		"a name":                {replace(`"spec":{`, `"spec":{"name":"n",`), dsec.Corrupt},
		"one of one":            {replace(`"spec":{`, `"spec":{"checkpoint":"`+string(DigestOf(nil))+`",`), dsec.Corrupt},
		"a limit below zero":    {replace(`"pids":512`, `"pids":-1`), dsec.Corrupt},
		"an empty disk":         {replace(`"size":8388608`, `"size":0`), dsec.Corrupt},
		"too many chunks":       {replace(`"count":2`, `"count":4194305`), dsec.Corrupt},
		"no digest":             {replace(`"chunks":"sha256:`, `"chunks":"sha1:`), dsec.Corrupt},
		"no machine":            {replace(`"machine":{"read":[false,true],"monitor":{"snapshot":{},"cpu":""}},`, ``), dsec.Corrupt},
		"a long machine":        {replace(`"cpu":""`, `"cpu":"`+strings.Repeat("x", 256<<10)+`"`), dsec.Corrupt},
		"too long":              {replace(`"A":"`, `"A":"`+strings.Repeat("x", MaxCheckpoint)), dsec.Corrupt},
	} {
		_, err := DecodeCheckpoint([]byte(c.text), DigestOf([]byte(c.text)))
		if dsec.ClassOf(err) != c.class {
			t.Errorf("%s: %v, want %s", what, err, c.class)
		}
	}
	if _, err := DecodeCheckpoint([]byte(good), DigestOf([]byte("another"))); dsec.ClassOf(err) != dsec.Corrupt {
		t.Errorf("of another digest: %v", err)
	}
}

// What is read once is written so that it is read again as the same.
func FuzzDecodeCheckpoint(f *testing.F) {
	good := encoded(f, sampleCheckpoint())
	f.Add(good)
	f.Add(good[:len(good)/2])
	f.Add([]byte(`{"version":1}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := DecodeCheckpoint(b, DigestOf(b))
		if err != nil {
			if class := dsec.ClassOf(err); class != dsec.Corrupt && class != dsec.Unsupported {
				t.Fatalf("%v", err)
			}
			return
		}
		again := encoded(t, c)
		if _, err := DecodeCheckpoint(again, DigestOf(again)); err != nil {
			t.Fatalf("%q was read, and %q is not: %v", b, again, err)
		}
	})
}
