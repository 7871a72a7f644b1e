package layer

import (
	"bytes"
	"encoding/json"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
)

func exampleLineage() dsec.Lineage {
	d := func(c string) string { return "sha256:" + strings.Repeat(c, 64) }
	return dsec.Lineage{Version: 1, Parents: []string{d("a"), d("b")}, Sandbox: "snodea0123456789", Time: time.Date(2030, 1, 2, 3, 4, 5, 6000, time.UTC),
		Scrub: d("c"), Merged: []string{d("d")}}
}

func TestLineageIsAsSpecified(t *testing.T) {
	got, err := json.Marshal(exampleLineage())
	if err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile("testdata/lineage-v1.json")
	if err != nil || !bytes.Equal(append(got, '\n'), want) {
		t.Errorf("%s\nwant\n%s %v", got, want, err)
	}
	l, err := DecodeLineage(want)
	if err != nil || !l.Time.Equal(exampleLineage().Time) || len(l.Parents) != 2 || l.Merged[0] != exampleLineage().Merged[0] {
		t.Errorf("%+v %v", l, err)
	}
	for what, b := range map[string]string{"version": `{"version":2}`, "parent": `{"version":1,"parents":["../x"]}`, "no JSON": `x`,
		"large": `{"version":1,"scrub":"` + strings.Repeat("x", MaxLineage) + `"}`, "merged": `{"version":1,"merged":["x"]}`} {
		if l, err := DecodeLineage([]byte(b)); err == nil {
			t.Errorf("%s: %+v", what, l)
		}
	}
}

func FuzzDecodeLineage(f *testing.F) {
	if b, err := os.ReadFile("testdata/lineage-v1.json"); err == nil {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		l, err := DecodeLineage(b)
		if err != nil {
			return
		}
		for _, p := range l.Parents {
			if _, err := ParseDigest(p); err != nil {
				t.Fatal(err)
			}
		}
		if len(l.Parents) >= MaxStack {
			t.Fatalf("%d parents", len(l.Parents))
		}
	})
}
