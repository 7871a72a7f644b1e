package store

import (
	"context"
	"os"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
)

// sees acquires a tag under a lease of its own.
func sees(s *Store, tag string) error {
	l := s.For(s.project)
	_, err := l.Acquire(context.Background(), "lease", []dsec.LayerRef{dsec.LayerRef(tag)})
	_ = l.Release(context.Background(), "lease")
	return err
}

func TestTagsBelongToTheProjectThatMadeThem(t *testing.T) {
	s, ctx := openStore(t, t.TempDir(), Options{}), t.Context()
	p1, p2 := s.View("p1"), s.View("p2")
	old, err := s.Import(ctx, tree(t, map[string]string{"a": "old"}), "base:1", image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	mine, err := p1.Import(ctx, tree(t, map[string]string{"a": "mine"}), "mine:1", image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	converted := 0
	s.opts.Convert = func(ctx context.Context, l image.Location, f image.Files, o image.Options) (image.Result, error) {
		converted++
		return image.Convert(ctx, l, f, o)
	}
	_, imported := p1.Import(ctx, tree(t, map[string]string{"a": "x"}), "base:1", image.Options{})
	_, another := p2.ImportTar(ctx, Tar{R: strings.NewReader(""), Name: "x"}, "mine:1", image.Options{})
	_, admins := p2.ImportTar(ctx, Tar{R: strings.NewReader(""), Name: "x"}, "base:1", image.Options{})
	for name, err := range map[string]error{
		"tag of an admin":          p1.Tag(ctx, "base:1", mine.Digest),
		"untag of an admin":        p1.Untag(ctx, "base:1"),
		"tag of another project":   p2.Tag(ctx, "mine:1", old.Digest),
		"untag of another project": p2.Untag(ctx, "mine:1"),
		"asking for it":            p2.MayTag("mine:1"),
		"import over an admin's":   imported,
		"upload over another's":    another,
		"upload over an admin's":   admins,
	} {
		if dsec.ClassOf(err) != dsec.PermissionDenied {
			t.Errorf("%s: %v", name, err)
		}
	}
	if converted != 0 {
		t.Errorf("%d conversions were begun for tags that were refused", converted)
	}
	if err := p1.Tag(ctx, "mine:1", old.Digest); err != nil {
		t.Errorf("a project moves its own tag: %v", err)
	}
	for _, x := range []struct {
		who *Store
		tag string
		ok  bool
	}{{p1, "base:1", true}, {p1, "mine:1", true}, {p2, "base:1", true}, {p2, "mine:1", false}, {s, "mine:1", true}} {
		if err := sees(x.who, x.tag); (err == nil) != x.ok || err != nil && dsec.ClassOf(err) != dsec.NotFound {
			t.Errorf("%q uses %s: %v", x.who.project, x.tag, err)
		}
		_, err := x.who.Inspect(ctx, dsec.LayerRef(x.tag))
		if tags, _ := x.who.Tags(ctx); (err == nil) != x.ok || (tags[x.tag] != "") != x.ok {
			t.Errorf("%q looks at %s: %v, %v", x.who.project, x.tag, err, tags)
		}
	}
	if e, err := p2.Inspect(ctx, dsec.LayerRef(old.Digest)); err != nil || len(e.Tags) != 1 {
		t.Errorf("tags of others are told: %v, %v", e.Tags, err)
	}
	if list, err := p2.List(ctx); err != nil || len(list) != 1 {
		t.Errorf("layers of others are listed: %v, %v", list, err)
	}
	if err := s.Tag(ctx, "mine:1", mine.Digest); err != nil { // an admin's from now on
		t.Fatal(err)
	}
	if err := p1.Tag(ctx, "mine:1", old.Digest); dsec.ClassOf(err) != dsec.PermissionDenied {
		t.Errorf("a tag that an admin took: %v", err)
	}
}

func TestTagsWithoutAnOwnerAreTheAdmins(t *testing.T) {
	dir := t.TempDir()
	s, ctx := openStore(t, dir, Options{}), t.Context()
	l, err := s.Import(ctx, tree(t, map[string]string{"a": "x"}), "", image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(s.path("tags", "old:1"), []byte(l.Digest+"\n"), 0o600); err != nil { // as before there were owners
		t.Fatal(err)
	}
	if err := s.View("p").Tag(ctx, "old:1", l.Digest); dsec.ClassOf(err) != dsec.PermissionDenied {
		t.Errorf("moved by a project: %v", err)
	}
	if err := sees(s.View("p"), "old:1"); err != nil {
		t.Errorf("not seen by a project: %v", err)
	}
	if err := s.Tag(ctx, "old:1", l.Digest); err != nil {
		t.Errorf("moved by an admin: %v", err)
	}
}

func TestACollectionSeesTheTagsOfEveryProject(t *testing.T) {
	s, ctx := openStore(t, t.TempDir(), Options{Grace: 1}), t.Context()
	l, err := s.View("p1").Import(ctx, tree(t, map[string]string{"a": "x"}), "mine:1", image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for _, dry := range []bool{true, false} {
		if gone, err := s.View("p2").Collect(ctx, dry); err != nil || len(gone) != 0 {
			t.Errorf("dry %t: %v, %v", dry, gone, err)
		}
	}
	if err := s.View("p2").Remove(ctx, dsec.LayerRef(l.Digest)); dsec.ClassOf(err) != dsec.IllegalState {
		t.Errorf("removed: %v", err)
	}
}

func TestANameThatMeansNothingSaysWhereToLook(t *testing.T) {
	s := openStore(t, t.TempDir(), Options{})
	for ref, want := range map[dsec.LayerRef]string{
		"python:3.12": "dsec layer ls shows what there is, docker.io/library/python:3.12 is the form that pulls",
		"acme/tool:1": ", docker.io/acme/tool:1 is the form that pulls",
		"ghcr.io/a:1": "dsec layer ls shows what there is",
	} {
		for _, view := range []*Store{s, s.View("p")} {
			_, err := view.Inspect(t.Context(), ref)
			if dsec.ClassOf(err) != dsec.NotFound || !strings.HasSuffix(err.Error(), want) {
				t.Errorf("%s: %v", ref, err)
			}
		}
	}
}
