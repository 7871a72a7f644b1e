package container

import (
	"encoding/json"
	"os"
	"reflect"
	"testing"
)

// TestTheNoteOfAHiddenPathIsAsItWas reads what an earlier version has written.
func TestTheNoteOfAHiddenPathIsAsItWas(t *testing.T) {
	b, err := os.ReadFile("testdata/note-1.golden")
	must(t, err)
	n, err := decodeNote(b)
	must(t, err)
	want := &shelved{Format: 1, Path: "/repo/tests", Pristine: true, Links: []linked{{[]byte("tests/a"), [][]byte{[]byte("var/b")}}}}
	if !reflect.DeepEqual(n, want) {
		t.Errorf("%+v, want %+v", n, want)
	}
	again, err := json.Marshal(n)
	if err != nil || string(again) != string(b) {
		t.Errorf("written as %s, %v; was %s", again, err, b)
	}
	for _, bad := range []string{"", "{}", `{"format":2,"path":"/a"}`, `{"format":1,"path":"a"}`} {
		if n, err := decodeNote([]byte(bad)); err == nil {
			t.Errorf("%s is %+v", bad, n)
		}
	}
}

func FuzzNote(f *testing.F) {
	f.Add([]byte(`{"format":1,"path":"/repo/tests","pristine":true,"links":[{"name":"dGVzdHMvYQ==","others":["dmFyL2I="]}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		n, err := decodeNote(b)
		if err != nil {
			return
		}
		again, err := json.Marshal(n)
		must(t, err)
		m, err := decodeNote(again)
		must(t, err)
		if last, err := json.Marshal(m); err != nil || string(last) != string(again) {
			t.Fatalf("%s became %s, %v", again, last, err)
		}
	})
}

func TestAncestorsComeFirst(t *testing.T) {
	if got := ancestors([]string{"/a/b/c", "/a-b", "/a/d"}); !reflect.DeepEqual(got, []string{"/a", "/a-b", "/a/b", "/a/b/c", "/a/d"}) {
		t.Errorf("%q", got)
	}
	if got := splitPath("/"); len(got) != 0 {
		t.Errorf("the root has parts %q", got)
	}
	if got := splitPath("/a/b"); !reflect.DeepEqual(got, []string{"a", "b"}) {
		t.Errorf("%q", got)
	}
}
