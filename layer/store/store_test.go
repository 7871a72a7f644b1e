package store

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
)

func openStore(t testing.TB, dir string, opts Options) *Store {
	t.Helper()
	s, err := Open(dir, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func tree(t testing.TB, files map[string]string) string {
	t.Helper()
	d := t.TempDir()
	for name, body := range files {
		p := filepath.Join(d, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(body), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return d
}

func TestLeaseSurvivesRestartAndATagThatMoves(t *testing.T) {
	ctx, dir := context.Background(), t.TempDir()
	s := openStore(t, dir, Options{})
	one, err := s.Import(ctx, tree(t, map[string]string{"a/b": "one"}), "base:1", image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	set, err := s.Acquire(ctx, "sb1", []dsec.LayerRef{"base:1"})
	if err != nil {
		t.Fatal(err)
	}
	if len(set.Layers) != 1 || set.Layers[0].Digest != one.Digest || set.Layers[0].Data == "" {
		t.Fatalf("set: %+v", set)
	}
	two, err := s.Import(ctx, tree(t, map[string]string{"a/b": "two"}), "base:1", image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if two.Digest == one.Digest {
		t.Fatal("different trees, one digest")
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = openStore(t, dir, Options{})
	set, err = s.Acquire(ctx, "sb1", []dsec.LayerRef{"base:1"})
	if err != nil || set.Layers[0].Digest != one.Digest {
		t.Errorf("after restart: %+v, %v", set, err)
	}
	if _, err := s.Acquire(ctx, "sb1", []dsec.LayerRef{dsec.LayerRef(two.Digest)}); !errors.Is(err, dsec.Conflict.Err()) {
		t.Errorf("other refs under one name: %v", err)
	}
	if _, err := s.Acquire(ctx, "sb2", []dsec.LayerRef{"nothing"}); !errors.Is(err, dsec.NotFound.Err()) {
		t.Errorf("unknown tag: %v", err)
	}
	names, err := s.Leases(ctx)
	if err != nil || len(names) != 1 || names[0] != "sb1" {
		t.Errorf("leases: %v, %v", names, err)
	}
	if err := errors.Join(s.Release(ctx, "sb1"), s.Release(ctx, "sb1")); err != nil {
		t.Error(err)
	}
}
