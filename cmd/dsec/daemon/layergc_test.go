package daemon

import (
	"bytes"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob/bucket"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/layer/gc"
	"github.com/opendsec/dsec/layer/store"
)

// verb runs a verb as root does, with the flag that all have.
func verb(t *testing.T, make func() *cobra.Command, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	c := make()
	c.Flags().StringP("output", "o", "table", "")
	c.SetOut(&out)
	c.SetErr(&bytes.Buffer{})
	c.SetArgs(args)
	c.SilenceErrors, c.SilenceUsage = true, true
	err := c.ExecuteContext(t.Context())
	return out.String(), err
}

// aged makes all files but roots an hour old.
func aged(t *testing.T, dir string) {
	t.Helper()
	old := time.Now().Add(-time.Hour)
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || strings.Contains(path, "/roots/") {
			return err
		}
		return os.Chtimes(path, old, old)
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestLayerVerbs: a layer that nobody has any more is listed, condemned and
// removed; what is damaged is found, and is the exit code.
func TestLayerVerbs(t *testing.T) {
	ctx, data, tree := t.Context(), t.TempDir(), t.TempDir()
	config := filepath.Join(t.TempDir(), "dsec.yaml")
	if err := os.WriteFile(config, []byte("data: "+data+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	blobs, err := bucket.Open(ctx, "file://"+filepath.Join(data, "blobs"))
	if err != nil {
		t.Fatal(err)
	}
	s, err := store.Open(filepath.Join(data, "layers"), store.Options{Blobs: blobs, Name: "n1"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = errors.Join(s.Close(), blobs.Close()) })
	for _, tag := range []string{"kept", "gone"} {
		if err := os.WriteFile(filepath.Join(tree, "f"), []byte("x"+tag), 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Import(ctx, tree, tag, image.Options{}); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(s.Remove(ctx, "gone"), s.Renew(ctx)); err != nil {
		t.Fatal(err)
	}
	run := func(args ...string) gc.Report {
		t.Helper()
		aged(t, filepath.Join(data, "blobs"))
		out, err := verb(t, LayerGC, append(args, "--config", config, "--grace", "1m", "--wait", "1m", "-o", "json")...)
		var r gc.Report
		if err != nil || json.Unmarshal([]byte(out), &r) != nil {
			t.Fatal(out, err)
		}
		return r
	}
	for i, want := range []struct{ condemn, remove int64 }{{1, 0}, {0, 1}, {0, 0}} {
		dry, wet := run(), run("--delete")
		for _, r := range []gc.Report{dry, wet} {
			if m := r.Rows[2]; m.Condemn.Objects != want.condemn || m.Delete.Objects != want.remove || m.Kept.Objects != 1 {
				t.Errorf("run %d: %+v", i, m)
			}
		}
	}
	if out, err := verb(t, LayerGC, "--config", config); err != nil || !strings.Contains(out, "nothing was changed") || !strings.Contains(out, `kept by "n1"`) {
		t.Errorf("%v\n%s", err, out)
	}
	if _, err := verb(t, LayerGC, "--config", config, "--grace", "0s"); !errors.Is(err, dsec.Invalid.Err()) {
		t.Errorf("no grace: %v", err)
	}
	if out, err := verb(t, LayerVerify, "--config", config, "--all", "--store"); err != nil || !strings.Contains(out, "0 damaged") || !strings.Contains(out, "good: ") {
		t.Errorf("%v\n%s", err, out)
	}
	for _, pattern := range []string{"blobs/packs/*", "layers/layers/*/data"} {
		paths, err := filepath.Glob(filepath.Join(data, pattern))
		if err != nil || len(paths) != 1 {
			t.Fatal(paths, err)
		}
		if err := os.WriteFile(paths[0], []byte("damage"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, args := range [][]string{{"kept"}, {"--all"}, {"--store"}} {
		out, err := verb(t, LayerVerify, append(args, "--config", config)...)
		if !errors.Is(err, dsec.Corrupt.Err()) || !strings.Contains(out, "damaged: ") {
			t.Errorf("%v: %v\n%s", args, err, out)
		}
	}
	if _, err := verb(t, LayerVerify, "--config", config); !errors.Is(err, dsec.Invalid.Err()) {
		t.Errorf("nothing to verify: %v", err)
	}
}

// TestObjectStorageThatIsNotThere is not made by who looks at it.
func TestObjectStorageThatIsNotThere(t *testing.T) {
	data := filepath.Join(t.TempDir(), "none")
	config := filepath.Join(t.TempDir(), "dsec.yaml")
	if err := os.WriteFile(config, []byte("data: "+data+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, run := range map[string]func() (string, error){
		"gc":     func() (string, error) { return verb(t, LayerGC, "--config", config) },
		"verify": func() (string, error) { return verb(t, LayerVerify, "--store", "--config", config) },
	} {
		out, err := run()
		if dsec.ClassOf(err) != dsec.NotFound || !strings.Contains(err.Error(), "there is none") || !strings.Contains(err.Error(), "--config") {
			t.Errorf("%s: %v\n%s", name, err, out)
		}
	}
	if _, err := os.Stat(data); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s was made: %v", data, err)
	}
	for _, c := range []*cobra.Command{LayerGC(), LayerVerify()} {
		if !strings.Contains(c.Example, "--config") || !strings.Contains(c.Long, "not the socket") {
			t.Errorf("%s says not what it reads:\n%s\n%s", c.Name(), c.Long, c.Example)
		}
	}
}

func TestRootsAreFoldedByNode(t *testing.T) {
	var b bytes.Buffer
	printRoots(&b, []gc.RootInfo{{Node: "n1", Keeps: 3, Age: time.Minute}, {Node: "n2", Keeps: 7, Age: time.Second},
		{Node: "n1", Keeps: 1, Age: 2 * time.Second}, {Node: "n1", Keeps: 9, Age: 24 * time.Hour, Expired: true}})
	want := "kept by \"n1\": 4 objects in 2 lists, said 2s ago\nkept by \"n2\": 7 objects, said 1s ago\nkept by \"n1\": 9 objects, said 24h0m0s ago: expired\n"
	if b.String() != want {
		t.Errorf("%s, want\n%s", b.String(), want)
	}
}
