package gvisor

import (
	"bytes"
	"strings"
	"testing"

	"github.com/opendsec/dsec/files"
)

// TestFilesOfAStoppedOneAreKept: what is written there is there after the next start,
// also if another agent serves it in between.
func TestFilesOfAStoppedOneAreKept(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	id := w.create(t)
	w.want(t, id, "echo one > /root/one", "")
	must(t, w.r.Stop(t.Context(), id, 0))
	write := func(path, text string) {
		t.Helper()
		fs, err := w.r.Files(t.Context(), id, "user")
		must(t, err)
		_, err = fs.Write(t.Context(), path, strings.NewReader(text), files.WriteOptions{})
		must(t, err)
		root, err := w.r.Files(t.Context(), id, "root")
		must(t, err)
		var b bytes.Buffer
		_, err = root.Read(t.Context(), "/root/one", 0, -1, &b)
		if must(t, err); b.String() != "one\n" {
			t.Errorf("%q", b.String())
		}
	}
	write("/home/user/two", "two\n")
	w.close(t)
	w.open(t)
	write("/home/user/three", "three\n")
	_, err := w.r.Start(t.Context(), id)
	must(t, err)
	w.want(t, id, "cat /root/one /home/user/two /home/user/three; stat -c %u /home/user/three", "one\ntwo\nthree\n1000\n")
	must(t, w.r.Stop(t.Context(), id, 0))
	write("/home/user/four", "four\n")
	must(t, w.r.Destroy(t.Context(), id)) // with its files open
	w.wantNothing(t)
}
