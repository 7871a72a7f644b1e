package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/layer"
)

func TestATemplateBindsANameToDigests(t *testing.T) {
	ctx, reg := context.Background(), newRegistry(t)
	ref, _ := reg.push(t, "base:1", tarOf(t, "etc/", "etc/a=base", "etc/b=base"), tarOf(t, "etc/", "etc/c=base"))
	s := openStore(t, t.TempDir(), Options{})
	if _, err := s.Ensure(ctx, ref, EnsureOptions{}, nil); err != nil {
		t.Fatal(err)
	}
	config := &image.Config{Env: []string{"T=1"}}
	toolkit := func(tag string, members ...string) {
		t.Helper()
		src := filepath.Join(t.TempDir(), "tar")
		if err := os.WriteFile(src, tarOf(t, members...), 0o600); err != nil {
			t.Fatal(err)
		}
		loc := image.Location{Source: tag, Path: src, Kind: image.KindFile, Tar: true, Whiteouts: true}
		info, err := s.convert(ctx, loc, config, image.Files{}, image.Options{KeepWhiteouts: true})
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Tag(ctx, tag, info.Digest); err != nil {
			t.Fatal(err)
		}
	}
	toolkit("repo:1", "work/", "work/f=repo")
	toolkit("tools:1", "etc/", "etc/a=tools1", "etc/.wh.b")
	parts := Template{Image: dsec.LayerRef(ref), Workspace: "repo:1", Toolkits: []dsec.LayerRef{"tools:1"}}
	made, err := s.Bind(ctx, "env:1", parts)
	if err != nil {
		t.Fatal(err)
	}
	var roles []layer.Role
	for _, p := range made.Layers {
		roles = append(roles, p.Role)
	}
	if want := []layer.Role{"base", "base", "workspace", "toolkit"}; !slices.Equal(roles, want) || made.Config.Workdir != "/w" || made.Layers[3].Ref != "tools:1" {
		t.Errorf("%+v %+v", made.Layers, made.Config)
	}
	// A toolkit shadows and deletes.
	if got, want := layout(t, s, "env:1"), "etc= etc/a=tools1 etc/c=base work= work/f=repo"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	set, err := s.Acquire(ctx, "running", []dsec.LayerRef{"env:1"})
	if err != nil {
		t.Fatal(err)
	}
	toolkit("tools:1", "etc/", "etc/a=tools2")
	if got := layout(t, s, "env:1"); got != "etc= etc/a=tools1 etc/c=base work= work/f=repo" {
		t.Errorf("a tag that moved: %s", got)
	}
	if _, err := s.Bind(ctx, "env:1", parts); err != nil {
		t.Fatal(err)
	}
	if got := layout(t, s, "env:1"); got != "etc= etc/a=tools2 etc/b=base etc/c=base work= work/f=repo" {
		t.Errorf("bound anew: %s", got)
	}
	if again, err := s.Acquire(ctx, "running", []dsec.LayerRef{"env:1"}); err != nil || again.Layers[3].Digest != set.Layers[3].Digest {
		t.Errorf("who runs has another: %v", err)
	}
	for what, bad := range map[string]Template{"no image": {}, "unknown": {Image: "nope:1"}} {
		if _, err := s.Bind(ctx, "x", bad); err == nil {
			t.Error(what)
		}
	}
}

func TestPrefixesOfManyImagesAreMerged(t *testing.T) {
	ctx, reg := context.Background(), newRegistry(t)
	base := [][]byte{tarOf(t, "a=1", "gone=1", "d/", "d/x=1"), tarOf(t, ".wh.gone", "a="+noise(100_000)), tarOf(t, "d/", "d/y=1")}
	one, _ := reg.push(t, "one:1", append(slices.Clone(base), tarOf(t, "one=1"))...)
	two, _ := reg.push(t, "two:1", append(slices.Clone(base), tarOf(t, "two=1"), tarOf(t, ".wh.a"))...)
	three, _ := reg.push(t, "three:1", tarOf(t, "three=1"))
	s := openStore(t, t.TempDir(), Options{})
	before := map[string]string{}
	for _, ref := range []string{one, two, three} {
		if _, err := s.Ensure(ctx, ref, EnsureOptions{}, nil); err != nil {
			t.Fatal(err)
		}
		before[ref] = layout(t, s, ref)
	}
	would, err := s.MergePrefixes(ctx, nil, true)
	if err != nil || len(would) != 1 || len(would[0].Layers) != 3 || would[0].Layer != "" {
		t.Fatalf("%+v, %v", would, err)
	}
	did, err := s.MergePrefixes(ctx, nil, false)
	if err != nil || len(did) != 1 || did[0].After == 0 || did[0].After >= did[0].Before || len(did[0].Images) != 2 {
		t.Fatalf("%+v, %v", did, err)
	}
	for ref, want := range before {
		if got := layout(t, s, ref); got != want {
			t.Errorf("%s: %.200s, want %.200s", ref, got, want)
		}
	}
	e, err := s.Inspect(ctx, dsec.LayerRef(two))
	if err != nil || len(e.Layers) != 3 || e.Layers[0].Digest != did[0].Layer {
		t.Errorf("%+v, %v", e.Layers, err)
	}
	// It stays merged when it is looked at again, and for images to come.
	four, _ := reg.push(t, "four:1", append(slices.Clone(base), tarOf(t, "four=1"))...)
	for _, ref := range []string{one, four} {
		info, err := s.Ensure(ctx, ref, EnsureOptions{}, nil)
		if err != nil || len(info.Layers) != 2 || info.Layers[0].Digest != did[0].Layer {
			t.Errorf("%s: %+v, %v", ref, info.Layers, err)
		}
	}
	if _, err := s.MergePrefixes(ctx, []dsec.LayerRef{dsec.LayerRef(three)}, false); !errors.Is(err, dsec.Invalid.Err()) {
		t.Errorf("one layer: %v", err)
	}
}

func TestAnExportedImageIsTheSameImage(t *testing.T) {
	ctx, reg := context.Background(), newRegistry(t)
	ref, _ := reg.push(t, "img:1", tarOf(t, "a=1", "gone=1", "d/", "d/low=1"), tarOf(t, ".wh.gone", "d/", "d/.wh..wh..opq", "d/new=2"), tarOf(t, "d/implied/f=3"))
	s := openStore(t, t.TempDir(), Options{})
	info, err := s.Ensure(ctx, ref, EnsureOptions{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "out.tar")
	f, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Export(ctx, dsec.LayerRef(ref), f); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	for _, scheme := range []string{"", "oci:", "docker-archive:"} {
		again, err := s.Import(ctx, scheme+file, "again:1", image.Options{})
		if err != nil || again.Config == nil || again.Config.Workdir != "/w" {
			t.Fatalf("%s: %+v, %v", scheme, again, err)
		}
		if got, want := layout(t, s, "again:1"), layout(t, s, ref); got != want {
			t.Errorf("%s: %s, want %s", scheme, got, want)
		}
	}
	if len(info.Layers) != 3 {
		t.Errorf("%+v", info.Layers)
	}
	// A layer is exported, too.
	if err := s.Export(ctx, dsec.LayerRef(info.Layers[0].Digest), discard{}); err != nil {
		t.Error(err)
	}
	if err := s.Export(ctx, "nope:1", discard{}); !errors.Is(err, dsec.NotFound.Err()) {
		t.Errorf("what is not there: %v", err)
	}
}

func TestAReferenceBecomesKnownWhenItIsAcquired(t *testing.T) {
	reg := newRegistry(t)
	ref, _ := reg.push(t, "img:1", tarOf(t, "a=old"))
	s := openStore(t, t.TempDir(), Options{References: &EnsureOptions{MaxAge: time.Hour}})
	told := false
	ctx := layer.WithProgress(context.Background(), func(r dsec.LayerRef, _ layer.Progress) { told = told || r == dsec.LayerRef(ref) })
	refs := []dsec.LayerRef{dsec.LayerRef(ref)}
	if set, err := s.Acquire(ctx, "sb", refs); err != nil || len(set.Layers) != 1 || !told {
		t.Fatalf("%+v, %v, told %t", set, err, told)
	}
	reg.push(t, "img:1", tarOf(t, "a=new"))
	if got := layout(t, s, ref); got != "a=old" {
		t.Errorf("%s: moved silently", got)
	}
	s.opts.References.MaxAge = time.Nanosecond
	if got := layout(t, s, ref); got != "a=new" {
		t.Errorf("%s: older than it may be", got)
	}
	for _, bad := range []string{reg.host + "/none:1", "nameless:1", "no/registry:1"} {
		if _, err := s.Acquire(ctx, "other", []dsec.LayerRef{dsec.LayerRef(bad)}); !errors.Is(err, dsec.NotFound.Err()) {
			t.Errorf("%s: %v", bad, err)
		}
	}
}

type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }

func TestAnImageOfManyLayersFits(t *testing.T) {
	ctx, reg := context.Background(), newRegistry(t)
	var layers [][]byte
	for i := range 127 {
		layers = append(layers, tarOf(t, fmt.Sprintf("f%03d=%d", i, i), "last="+fmt.Sprint(i), fmt.Sprintf(".wh.f%03d", i-2)))
	}
	ref, _ := reg.push(t, "many:1", layers...)
	s := openStore(t, t.TempDir(), Options{})
	for range 2 { // the second time everything is known
		info, err := s.Ensure(ctx, ref, EnsureOptions{}, nil)
		if err != nil || len(info.Layers) != maxImageLayers {
			t.Fatalf("%d layers, %v", len(info.Layers), err)
		}
		if got, want := layout(t, s, ref), "f125=125 f126=126 last=126"; got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
}
