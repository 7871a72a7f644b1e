package snapshot

import (
	"bytes"
	"cmp"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/image/erofs"
	"github.com/opendsec/dsec/layer"
)

// mergeOf merges layers that stand on others.
func mergeOf(t testing.TB, on, layers []layer.Local) made {
	t.Helper()
	below, err := OpenBelow(on)
	must(t, err)
	defer below.Close()
	var images []*erofs.Image
	for _, l := range layers {
		meta, err := os.Open(l.Meta)
		must(t, err)
		defer meta.Close()
		data, err := os.Open(cmp.Or(l.Data, os.DevNull))
		must(t, err)
		defer data.Close()
		im, err := erofs.Open(meta, l.MetaSize, data)
		must(t, err)
		images = append(images, im)
	}
	m, err := written(t, func(f image.Files) (Result, error) {
		r, err := image.Merge(t.Context(), images, f, image.MergeOptions{KeepWhiteouts: true, Hides: below.Has})
		return Result{Entries: r.Entries, MetaSize: r.MetaSize, DataSize: r.DataSize}, err
	})
	must(t, err)
	return m
}

// TestMergedLayersShowTheSame changes a disk at random, layer after layer, and
// compares what the merged ones show with what they show one on the other.
func TestMergedLayersShowTheSame(t *testing.T) {
	m := openMounts(t)
	base := []layer.Local{treeLayer(t, fillBase)}
	for seed := range uint64(6) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 7))
			chain := base
			for range 5 {
				s := newStack(t, m, chain...)
				for range 60 {
					change(s, r)
				}
				chain = append(chain[:len(chain):len(chain)], s.pack(Options{}).Local)
			}
			want := tree(t, newStack(t, m, chain...).path("."))
			merged := mergeOf(t, base, chain[1:])
			sameTrees(t, want, tree(t, newStack(t, m, base[0], merged.Local).path(".")))
			if t.Failed() {
				return
			}
			unused(t, base, merged)
		})
	}
}

// unused looks for whiteouts that hide nothing.
func unused(t *testing.T, base []layer.Local, merged made) {
	t.Helper()
	below, err := OpenBelow(base)
	must(t, err)
	defer below.Close()
	im, err := erofs.Open(bytes.NewReader(merged.meta), merged.MetaSize, nil)
	must(t, err)
	must(t, im.Walk(func(p string, n *erofs.Node) error {
		if !n.IsWhiteout() {
			return nil
		}
		was, err := below.Find(p)
		if was == nil {
			t.Errorf("the whiteout /%s hides nothing", p)
		}
		return err
	}))
}

// change does one thing to a disk; that it cannot is fine.
func change(s *stack, r *rand.Rand) {
	names := []string{"etc", "gone", "gone/deep", "gone1", "replaced", "replaced/x", "moved", "moved/a", "moved/a/b", "moved/g", "merged", "merged/f", "merged/sub",
		"kept", "swap/one", "swap", "file", "new1", "new2", "new2/in", "new2/in/deep", "new3"}
	a, b := s.path(names[r.IntN(len(names))]), s.path(names[r.IntN(len(names))])
	switch r.IntN(8) {
	case 0, 1:
		_ = os.RemoveAll(a)
	case 2, 3:
		_ = os.MkdirAll(filepath.Dir(a), 0o755)
		_ = os.WriteFile(a, []byte(strings.Repeat("c", r.IntN(9000))), 0o644)
	case 4:
		_ = os.MkdirAll(a, os.FileMode(0o700|r.IntN(64)))
	case 5:
		if !strings.HasPrefix(b, a+"/") {
			_ = os.Rename(a, b)
		}
	case 6:
		_ = os.Symlink("target", a)
	case 7:
		_ = os.Chmod(a, os.FileMode(0o700|r.IntN(64)))
	}
}

func TestMergedLinksAndHolesStay(t *testing.T) {
	m := openMounts(t)
	base := treeLayer(t, fillBase)
	s := newStack(t, m, base)
	nasty(s)
	one := s.pack(Options{}).Local
	s2 := newStack(t, m, base, one)
	s2.write("top", "top")
	must(t, os.Remove(s2.path("setuid")))
	two := s2.pack(Options{}).Local
	want := tree(t, newStack(t, m, base, one, two).path("."))
	merged := mergeOf(t, []layer.Local{base}, []layer.Local{one, two})
	sameTrees(t, want, tree(t, newStack(t, m, base, merged.Local).path(".")))
	if bytes.Contains(merged.data, []byte("#!/bin/sh")) {
		t.Error("the contents of a removed file are in the merged layer")
	}
}

func TestChangesAreThose(t *testing.T) {
	m := openMounts(t)
	base := treeLayer(t, fillBase)
	s := newStack(t, m, base)
	must(t, os.RemoveAll(s.path("gone")))
	must(t, os.RemoveAll(s.path("replaced")))
	s.write("replaced/new", "12345")
	s.write("replaced/x/y", "again") // there before, and again
	must(t, os.Rename(s.path("moved"), s.path("renamed")))
	s.write("merged/f", "longer")
	must(t, os.Chmod(s.path("merged/sub"), 0o700))
	must(t, os.Chmod(s.path("kept/k"), 0o600))
	s.write("etc/added", "a")
	f, err := os.OpenFile(s.path("etc/passwd"), os.O_RDWR, 0) // copied up, not changed
	must(t, err)
	f.Close()
	src := s.source()
	src.Below, err = OpenBelow(s.layers)
	must(t, err)
	defer src.Below.Close()
	got, err := Changes(t.Context(), src, 1000)
	must(t, err)
	want := []string{"A /etc/added 1 0", "D /gone/ 0 0", "M /kept/k 1 1", "M /merged/f 6 1", "M /merged/sub/ 0 0", "D /moved/ 0 0", "A /renamed/ 0 0", "A /renamed/a/ 0 0",
		"A /renamed/a/b/ 0 0", "A /renamed/a/b/f 5 0", "A /renamed/a/h 1 0", "A /renamed/g 1 0", "A /replaced/new 5 0", "M /replaced/x/y 5 1"}
	compare := func(what string, got dsec.Changes) {
		t.Helper()
		var lines []string
		for _, c := range got.List {
			lines = append(lines, fmt.Sprint(c.Kind, " ", c.Path, " ", c.Size, " ", c.Was))
		}
		if strings.Join(lines, "\n") != strings.Join(want, "\n") {
			t.Errorf("%s:\n%s\nwant\n%s", what, strings.Join(lines, "\n"), strings.Join(want, "\n"))
		}
	}
	compare("of the disk", got)
	if got.Added != 8 || got.Modified != 4 || got.Deleted != 2 {
		t.Errorf("counts %+v", got)
	}
	packed := s.pack(Options{})
	im, err := erofs.Open(bytes.NewReader(packed.meta), packed.MetaSize, nil)
	must(t, err)
	of, err := ChangesOf(t.Context(), im, src.Below, 1000)
	must(t, err)
	compare("of the packed layer", of)
	if cut, err := Changes(t.Context(), src, 3); err != nil || len(cut.List) != 3 || !cut.Cut || cut.Added != 8 {
		t.Errorf("cut %+v %v", cut, err)
	}
}
