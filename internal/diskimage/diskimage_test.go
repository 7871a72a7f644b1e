package diskimage

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/qcow2"
)

func write(t *testing.T, b []byte) *os.File {
	t.Helper()
	name := filepath.Join(t.TempDir(), "image")
	if err := os.WriteFile(name, b, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func TestADiskBecomesATree(t *testing.T) {
	disk := make([]byte, 4096)
	disk[510], disk[511], disk[4000] = 0x55, 0xaa, 7
	s, err := Read(write(t, disk))
	if err != nil {
		t.Fatal(err)
	}
	m := New(s.Size)
	m.Agent = true
	var b bytes.Buffer
	if err := WriteTar(&b, m, s); err != nil {
		t.Fatal(err)
	}
	r := tar.NewReader(&b)
	if h, err := r.Next(); err != nil || h.Name != ManifestFile {
		t.Fatal(h, err)
	}
	text, _ := io.ReadAll(r)
	if got, err := Parse(text); err != nil || got != m {
		t.Fatal(got, err)
	}
	if h, err := r.Next(); err != nil || h.Name != DiskFile {
		t.Fatal(h, err)
	}
	if got, _ := io.ReadAll(r); !bytes.Equal(got, disk) {
		t.Error("the disk is another one")
	}
}

func TestWhatIsNoDiskIsRefused(t *testing.T) {
	sector := func(change func(b []byte)) []byte {
		b := make([]byte, 1024)
		change(b)
		return b
	}

	var made bytes.Buffer
	made.Write(make([]byte, 4<<16))
	if err := qcow2.Create(at(made.Bytes()), 1<<20); err != nil {
		t.Fatal(err)
	}
	backed := bytes.Clone(made.Bytes())
	backed[15], backed[19] = 200, 11
	for name, c := range map[string]struct {
		b    []byte
		want dsec.Class
	}{
		"empty":        {nil, dsec.Invalid},
		"text":         {[]byte(strings.Repeat("no disk at all ", 100)), dsec.Invalid},
		"no table":     {sector(func([]byte) {}), dsec.Invalid},
		"half sector":  {sector(func(b []byte) { b[510], b[511] = 0x55, 0xaa })[:1000], dsec.Invalid},
		"VMDK":         {sector(func(b []byte) { copy(b, "KDMV") }), dsec.Unsupported},
		"VHDX":         {sector(func(b []byte) { copy(b, "vhdxfile") }), dsec.Unsupported},
		"backing file": {backed, dsec.Unsupported},
		"broken qcow2": {sector(func(b []byte) { copy(b, "QFI\xfb\x00\x00\x00\x03") }), dsec.Corrupt},
	} {
		if _, err := Read(write(t, c.b)); dsec.ClassOf(err) != c.want {
			t.Errorf("%s: %v, want %s", name, err, c.want)
		}
	}
	if f, err := os.Open(t.TempDir()); err == nil {
		if _, err := Read(f); dsec.ClassOf(err) != dsec.Invalid {
			t.Error("directory:", err)
		}
		_ = f.Close()
	}
}

type at []byte

func (w at) WriteAt(p []byte, off int64) (int, error) { return copy(w[off:], p), nil }

func TestManifestsOfOthersAreRefused(t *testing.T) {
	good, err := json.Marshal(New(1 << 20))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Parse(good); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		from, to string
		want     dsec.Class
	}{
		{`"format":1`, `"format":2`, dsec.Unsupported}, {`"kind":"disk"`, `"kind":"tape"`, dsec.Invalid}, {`"size":1048576`, `"size":-512`, dsec.Invalid},
		{`"size":1048576`, `"size":100`, dsec.Invalid}, {`"bios"`, `"/bin/sh"`, dsec.Invalid}, {`"bus":"virtio"`, `"bus":"x,y"`, dsec.Invalid}, {`"std"`, `"qxl"`, dsec.Invalid},
		{`}`, `,"more":1}`, dsec.Invalid}, {`}`, `}{}`, dsec.Invalid},
	} {
		if _, err := Parse([]byte(strings.Replace(string(good), c.from, c.to, 1))); dsec.ClassOf(err) != c.want {
			t.Errorf("%s for %s: %v, want %s", c.to, c.from, err, c.want)
		}
	}
}
