package layer

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
)

func sampleStack() Stack {
	return Stack{Version: StackVersion, Layers: []Part{
		{Digest: DigestOf([]byte("a")), Role: RoleBase, Ref: "debian:12"}, {Digest: DigestOf([]byte("b")), Role: RoleWorkspace, Ref: "repo:v1"},
		{Digest: DigestOf([]byte("c")), Role: RoleToolkit, Ref: "<tools>:v3"}},
		Config: &image.Config{Env: []string{"PATH=/bin"}, Workdir: "/work"}}
}

// TestGoldenStack: what was written once is written, and read, the same for ever.
func TestGoldenStack(t *testing.T) {
	file := filepath.Join("testdata", "stack-v1.json")
	if *update {
		if err := os.WriteFile(file, sampleStack().Encode(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if got := sampleStack().Encode(); !bytes.Equal(got, want) {
		t.Errorf("now %q", got)
	}
	s, err := DecodeStack(want, sampleStack().Digest())
	if err != nil || !slices.Equal(s.Layers, sampleStack().Layers) || s.Config.Workdir != "/work" || !s.IsTemplate() {
		t.Errorf("%+v, %v", s, err)
	}
}

func TestStacksThatAreRefused(t *testing.T) {
	good := string(sampleStack().Encode())
	a, b := string(DigestOf([]byte("a"))), string(DigestOf([]byte("b")))
	many := sampleStack()
	many.Layers = make([]Part, MaxStack+1)
	for i := range many.Layers {
		many.Layers[i] = Part{Digest: DigestOf([]byte{byte(i), byte(i >> 8)})}
	}
	for what, bad := range map[string]string{
		"version":       strings.Replace(good, `"version":1`, `"version":2`, 1),
		"unknown field": strings.Replace(good, `"version":1`, `"version":1,"more":1`, 1),
		"spaces":        strings.Replace(good, `{"version"`, `{ "version"`, 1),
		"trailing":      good + "{}",
		"a path":        strings.Replace(good, a, "sha256:../../escape", 1),
		"twice":         strings.Replace(good, b, a, 1),
		"role":          strings.Replace(good, `"role":"base"`, `"role":"top"`, 1),
		"order":         strings.Replace(strings.Replace(good, `"role":"base"`, `"role":"toolkit"`, 1), `"role":"toolkit"`, `"role":"toolkit"`, 1),
		"some roles":    strings.Replace(good, `,"role":"base"`, "", 1),
		"long ref":      strings.Replace(good, "debian:12", strings.Repeat("x", 257), 1),
		"no layers":     "{\"version\":1,\"layers\":[]}\n",
		"many layers":   string(many.Encode()),
		"large":         strings.Repeat(" ", MaxStackSize+1),
		"empty":         "",
	} {
		if _, err := DecodeStack([]byte(bad), DigestOf([]byte(bad))); !errors.Is(err, dsec.Corrupt.Err()) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := DecodeStack([]byte(good), DigestOf([]byte("other"))); !errors.Is(err, dsec.Corrupt.Err()) {
		t.Errorf("wrong digest: %v", err)
	}
}

func TestALayerThatIsThereTwiceCountsWhereItIsHighest(t *testing.T) {
	part := func(s string) Part { return Part{Digest: DigestOf([]byte(s))} }
	got := TopMost([]Part{part("a"), part("b"), part("a"), part("c"), part("b")})
	if want := []Part{part("a"), part("c"), part("b")}; !slices.Equal(got, want) {
		t.Errorf("%v", got)
	}
}

func FuzzDecodeStack(f *testing.F) {
	f.Add(sampleStack().Encode())
	f.Add([]byte(`{"version":1,"layers":[]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := DecodeStack(b, DigestOf(b))
		if err == nil && !bytes.Equal(s.Encode(), b) {
			t.Error("accepted what it would not write")
		}
	})
}
