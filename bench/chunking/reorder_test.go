package chunking

import (
	"bytes"
	"slices"
	"testing"
)

func TestReorderedDataHasTheSameFilesTouchedOnesFirst(t *testing.T) {
	d := tree("a", 0)
	d.Bytes = d.Bytes[:len(d.Bytes)-1<<20] // what belongs to no file is left out
	a, err := RandomFiles(d, 0.1)
	if err != nil {
		t.Fatal(err)
	}
	other := Read{"other", Extent{4096, 4096}}
	a.Reads = append(a.Reads, other)
	e, moved := Reorder(d, "b", []Access{a})
	if len(e.Bytes) != len(d.Bytes) || len(e.Files) != len(d.Files) {
		t.Fatalf("%d bytes of %d, %d files of %d", len(e.Bytes), len(d.Bytes), len(e.Files), len(d.Files))
	}
	end := int64(0)
	for i, r := range moved[0].Reads {
		was := a.Reads[i]
		if was == other {
			if r != other {
				t.Errorf("a read of another layer became %+v", r)
			}
			continue
		}
		if r.Layer != "b" || r.Off != end {
			t.Fatalf("read %d is at %d of %s, the one before ends at %d", i, r.Off, r.Layer, end)
		}
		end = r.Off + r.Len
		if !bytes.Equal(e.Bytes[r.Off:end], d.Bytes[was.Off:was.Off+was.Len]) {
			t.Fatalf("read %d has other bytes", i)
		}
	}
	sum := func(d *Data) (all []string) {
		for _, f := range d.Files {
			all = append(all, string(d.Bytes[f.Off:f.Off+f.Len]))
		}
		slices.Sort(all)
		return all
	}
	if !slices.Equal(sum(d), sum(e)) {
		t.Error("the files are not the same")
	}
}
