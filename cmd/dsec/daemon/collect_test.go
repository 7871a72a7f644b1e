package daemon

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/layer/store"
)

func TestUnusedLayersWithoutATagAreRemoved(t *testing.T) {
	tree := t.TempDir()
	s, err := store.Open(t.TempDir(), store.Options{Grace: time.Nanosecond})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	for _, tag := range []string{"kept:1", ""} {
		if err := os.WriteFile(filepath.Join(tree, "f"), []byte("x"+tag), 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Import(t.Context(), tree, tag, image.Options{}); err != nil {
			t.Fatal(err)
		}
	}
	stop := collecting(s, time.Millisecond, slog.New(slog.DiscardHandler))
	defer stop()
	for end := time.Now().Add(10 * time.Second); ; {
		all, err := s.List(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if len(all) == 1 && len(all[0].Tags) == 1 && all[0].Tags[0] == "kept:1" {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%+v", all)
		}
	}
}
