package image

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestWhatIsCutShortIsSaidOnce(t *testing.T) {
	plain := makeTar(t, file("a", strings.Repeat("some of it ", 10_000)))
	for _, kind := range []string{"gzip", "zstd"} {
		b := compress(t, kind, plain)
		name := filepath.Join(t.TempDir(), "x.tar")
		if err := os.WriteFile(name, b[:len(b)/2], 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := tryConvert(t, "tar:"+name, Options{})
		if err == nil || strings.Count(err.Error(), "unexpected EOF") != 1 {
			t.Errorf("%s: %v", kind, err)
		}
		r, err := decompress(bytes.NewReader(b[:len(b)/2]), 200)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := new(bytes.Buffer).ReadFrom(r); err == nil {
			t.Errorf("%s: read to the end", kind)
		}
		if err := r.Close(); err != nil {
			t.Errorf("%s: closing says %v", kind, err)
		}
	}
}
