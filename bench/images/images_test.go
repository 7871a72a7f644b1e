package images

import (
	"os"
	"path/filepath"
	"testing"
)

func TestTablesNameEachOther(t *testing.T) {
	dir := t.TempDir()
	rows, err := table(imageTable)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range rows {
		if err := os.WriteFile(filepath.Join(dir, r[0]+".tar"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	all, err := Found(dir)
	if err != nil || len(all) != len(rows) {
		t.Fatalf("%d images of %d: %v", len(all), len(rows), err)
	}
	runs, err := Runs(all)
	if err != nil {
		t.Fatal(err)
	}
	want, err := table(runTable)
	if err != nil {
		t.Fatal(err)
	}
	if len(runs) != len(want) {
		t.Errorf("%d runs of %d have their images in the table", len(runs), len(want))
	}
	if _, err := Found(t.TempDir()); err == nil {
		t.Error("no images and no error")
	}
	if some, err := Runs(all[:1]); err != nil || len(some) != 0 {
		t.Errorf("runs of one image of wheels: %v %v", some, err)
	}
}
