package store

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/opendsec/dsec/image"
)

func TestWhatWasImportedIsAnImage(t *testing.T) {
	ctx, dir := context.Background(), t.TempDir()
	s := openStore(t, dir, Options{})
	stands := image.Options{KeepWhiteouts: true}
	src := tree(t, map[string]string{"a": "base"})
	images := func(want string) {
		t.Helper()
		all, err := s.List(ctx)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, e := range all {
			if e.Image {
				got = append(got, e.Tags...)
			}
		}
		if strings.Join(got, " ") != want {
			t.Errorf("images %q, want %q", got, want)
		}
	}
	var upper bytes.Buffer
	w := tar.NewWriter(&upper)
	if err := errors.Join(w.WriteHeader(&tar.Header{Name: "b", Typeflag: tar.TypeReg, Mode: 0o644}), w.Close()); err != nil {
		t.Fatal(err)
	}
	made, err := s.Import(ctx, src, "tree:1", stands)
	if err != nil || made.Image {
		t.Fatalf("built: %+v, %v", made, err)
	}
	config := &image.Config{Cmd: []string{"sh"}}
	if _, err := s.ImportTar(ctx, Tar{R: &upper, Name: "commit", Config: config}, "commit:1", image.Options{KeepWhiteouts: true}); err != nil {
		t.Fatal(err)
	}
	images("")
	// The same bytes, now as an image that has no configuration.
	made, err = s.Import(ctx, src, "rootfs:1", image.Options{})
	if err != nil || !made.Image || made.Config != nil {
		t.Fatalf("imported: %+v, %v", made, err)
	}
	images("rootfs:1 tree:1")
	if _, err := s.Import(ctx, src, "", stands); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = openStore(t, dir, Options{})
	images("rootfs:1 tree:1")
}

func TestAnImageThatNobodyCalledOneHasAConfig(t *testing.T) {
	for _, c := range []struct {
		config *image.Config
		want   bool
	}{{nil, false}, {&image.Config{Cmd: []string{"sh"}}, true}} {
		if got := (about{}).image(c.config); got != c.want {
			t.Errorf("config %v: image %v", c.config, got)
		}
	}
}
