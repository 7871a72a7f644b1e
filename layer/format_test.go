package layer

import (
	"bytes"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
)

var update = flag.Bool("update", false, "write the golden files")

func sampleManifest() Manifest {
	return Manifest{
		Version: ManifestVersion, Entries: 3,
		Meta:   Content{Digest: DigestOf([]byte("meta")), Size: 8192},
		Data:   Chunked{Size: ChunkSize + 4096, ChunkSize: ChunkSize, Chunks: DigestOf(sampleIndex().Sums())},
		Config: &image.Config{Env: []string{"PATH=/bin", "X=<&>"}, User: "1000:1000", Workdir: "/work", Cmd: []string{"sh"}, Arch: "amd64"},
	}
}

func sampleIndex() Index {
	return Index{Packs: []Digest{DigestOf([]byte("pack"))}, Chunks: []Chunk{
		{Sum: [32]byte{1}, Pack: 0, Length: 1000, Off: 0}, {Sum: [32]byte{2}, Length: 0, Off: 1000}}}
}

// TestGoldenFiles: what was written once is written, and read, the same for ever.
func TestGoldenFiles(t *testing.T) {
	index, err := sampleIndex().Encode()
	if err != nil {
		t.Fatal(err)
	}
	for name, b := range map[string][]byte{"manifest-v1.json": sampleManifest().Encode(), "index-v1.bin": index} {
		file := filepath.Join("testdata", name)
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
			t.Errorf("%s: now %q", name, b)
		}
	}
	m, err := DecodeManifest(sampleManifest().Encode(), sampleManifest().Digest())
	if err != nil || m.Data != sampleManifest().Data || m.Config.User != "1000:1000" {
		t.Errorf("manifest: %+v, %v", m, err)
	}
	ix, err := DecodeIndex(index, m.Data)
	if err != nil || len(ix.Chunks) != 2 || ix.Chunks[0] != sampleIndex().Chunks[0] || ix.Packs[0] != sampleIndex().Packs[0] {
		t.Errorf("index: %+v, %v", ix, err)
	}
}

func TestManifestsThatAreRefused(t *testing.T) {
	good := string(sampleManifest().Encode())
	for what, bad := range map[string]string{
		"version":       strings.Replace(good, `"version":1`, `"version":2`, 1),
		"unknown field": strings.Replace(good, `"version":1`, `"version":1,"more":1`, 1),
		"spaces":        strings.Replace(good, `{"version"`, `{ "version"`, 1),
		"trailing":      good + "{}",
		"digest":        strings.Replace(good, "sha256:", "sha256:../", 1),
		"negative size": strings.Replace(good, `"size":8192`, `"size":-1`, 1),
		"chunk size":    strings.Replace(good, `"chunk_size":262144`, `"chunk_size":1`, 1),
		"empty":         "",
	} {
		if _, err := DecodeManifest([]byte(bad), DigestOf([]byte(bad))); !errors.Is(err, dsec.Corrupt.Err()) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := DecodeManifest([]byte(good), DigestOf([]byte("other"))); !errors.Is(err, dsec.Corrupt.Err()) {
		t.Errorf("wrong digest: %v", err)
	}
}

// TestE16_DigestIsNoPath: nothing but a digest passes for one.
func TestE16_DigestIsNoPath(t *testing.T) {
	for _, s := range []string{"", "sha256:", "sha256:../../escape", "sha512:" + strings.Repeat("a", 128), "sha256:" + strings.Repeat("A", 64),
		"sha256:" + strings.Repeat("a", 63), "sha256:" + strings.Repeat("a", 65), " sha256:" + strings.Repeat("a", 64)} {
		if _, err := ParseDigest(s); !errors.Is(err, dsec.Invalid.Err()) {
			t.Errorf("%q: %v", s, err)
		}
	}
	d := "sha256:" + strings.Repeat("0a", 32)
	if got, err := ParseDigest(d); err != nil || string(got) != d {
		t.Errorf("%q: %v", got, err)
	}
}

func FuzzDecodeManifest(f *testing.F) {
	f.Add(sampleManifest().Encode())
	f.Add([]byte(`{"version":1}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := DecodeManifest(b, DigestOf(b))
		if err == nil && !bytes.Equal(m.Encode(), b) {
			t.Error("accepted what it would not write")
		}
	})
}

func FuzzDecodeIndex(f *testing.F) {
	b, err := sampleIndex().Encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		ix, err := decodeIndex(b)
		if err != nil {
			return
		}
		again, err := ix.Encode()
		if err != nil || !bytes.Equal(again, b) {
			t.Errorf("accepted what it would not write: %v", err)
		}
	})
}
