package layer

import (
	"bytes"
	"os"
	"strings"
	"testing"
	"time"
)

func keepGolden() map[string][]byte {
	a, b := DigestOf([]byte("a")), DigestOf([]byte("b"))
	return map[string][]byte{
		"root-v1.json":      NewRoot("n1", 10*time.Minute, []string{PackKey(b), ManifestKey(a), PackKey(b)}).Encode(),
		"condemned-v1.json": NewCondemned([]string{IndexKey(b), KindStack.Key(a), MetaKey(a)}).Encode(),
		"run-v1.json":       NewRun("host 4711", []string{"two", "one"}).Encode(),
	}
}

func decodeKeep(b []byte) (again []byte, errs [3]error) {
	r, err := DecodeRoot(b, "x")
	if errs[0] = err; err == nil {
		again = r.Encode()
	}
	c, err := DecodeCondemned(b, "x")
	if errs[1] = err; err == nil {
		again = c.Encode()
	}
	u, err := DecodeRun(b, "x")
	if errs[2] = err; err == nil {
		again = u.Encode()
	}
	return again, errs
}

func TestKeepGolden(t *testing.T) {
	for name, got := range keepGolden() {
		if *update {
			if err := os.WriteFile("testdata/"+name, got, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile("testdata/" + name)
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: %v: %s", name, err, got)
		}
		if again, _ := decodeKeep(want); !bytes.Equal(again, want) {
			t.Errorf("%s: read as %s", name, again)
		}
	}
}

// TestKeepRefuses: a decoder that accepted one of these would delete too much.
func TestKeepRefuses(t *testing.T) {
	key := ManifestKey(DigestOf([]byte("a")))
	for name, text := range map[string]string{
		"other version":    `{"version":2,"node":"","every":0,"keep":["` + key + `"]}`,
		"unknown field":    `{"version":1,"node":"","every":0,"keep":[],"more":1}`,
		"not sorted":       `{"version":1,"keys":["` + PackKey(DigestOf([]byte("a"))) + `","` + key + `"]}`,
		"twice":            `{"version":1,"keys":["` + key + `","` + key + `"]}`,
		"other kind":       `{"version":1,"keys":["hints/` + key[10:] + `"]}`,
		"no digest":        `{"version":1,"keys":["manifests/../../x"]}`,
		"upper case":       `{"version":1,"keys":["` + "manifests/" + strings.ToUpper(key[10:]) + `"]}`,
		"spaces":           `{"version":1, "keys":[]}`,
		"names not sorted": `{"version":1,"owner":"","removes":["b","a"]}`,
		"cut":              `{"version":1,"keys":["` + key,
		"empty":            ``,
		"negative":         `{"version":1,"node":"","every":-1,"keep":[]}`,
		"long":             `{"version":1,"node":"` + strings.Repeat("x", 300) + `","every":1,"keep":[]}`,
	} {
		if _, errs := decodeKeep([]byte(text + "\n")); errs[0] == nil || errs[1] == nil || errs[2] == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

func FuzzDecodeKeep(f *testing.F) {
	for _, b := range keepGolden() {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if again, errs := decodeKeep(b); again != nil && !bytes.Equal(again, b) {
			t.Errorf("%q read as %q (%v)", b, again, errs)
		}
	})
}
