package user

import (
	"archive/tar"
	"bytes"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/opendsec/dsec/client"
)

// TestADirectoryIsSentWithWhatItIsLike: an agent that is not root must be able
// to write to a workspace that its user owns.
func TestADirectoryIsSentWithWhatItIsLike(t *testing.T) {
	dir := t.TempDir()
	when := time.Unix(1_577_836_800, 0)
	for _, err := range []error{os.WriteFile(filepath.Join(dir, "f"), []byte("x"), 0o640), os.Chmod(dir, 0o2750), os.Chtimes(dir, when, when)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	var sent []byte
	_, err := sendDir(t.Context(), dir, true, func(r io.Reader) (client.Layer, error) {
		b, err := io.ReadAll(r)
		sent = b
		return client.Layer{}, err
	})
	if err != nil {
		t.Fatal(err)
	}
	tr := tar.NewReader(bytes.NewReader(sent))
	top, err := tr.Next()
	if err != nil || top.Name != "./" || top.Mode != 0o2750 && top.Mode != 0o750 || !top.ModTime.Equal(when) || top.Uid != os.Getuid() {
		t.Fatalf("%+v %v", top, err)
	}
	if f, err := tr.Next(); err != nil || f.Name != "f" || f.Mode != 0o640 {
		t.Fatalf("%+v %v", f, err)
	}
	if _, err := tr.Next(); err != io.EOF {
		t.Fatal(err)
	}
}
