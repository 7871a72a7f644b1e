package qcow2

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
)

// qemuImg runs the judge.
func qemuImg(t testing.TB, args ...string) string {
	t.Helper()
	if _, err := exec.LookPath("qemu-img"); err != nil {
		t.Skip("no judge: ", err, " (package qemu-utils)")
	}
	out, err := exec.Command("qemu-img", args...).CombinedOutput()
	if err != nil {
		t.Fatalf("qemu-img %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// disk is a raw one with data, zeros and holes; its last cluster is short.
func disk(t testing.TB) (name string, content []byte) {
	t.Helper()
	content = make([]byte, 5<<20+512*3)
	r := rand.NewChaCha8([32]byte{1})
	for _, at := range []int{0, 1 << 20, 3<<20 + 4096, len(content) - 700} {
		_, _ = r.Read(content[at : at+700])
	}
	copy(content[2<<20:], bytes.Repeat([]byte("text that packs well. "), 40000))
	name = filepath.Join(t.TempDir(), "raw")
	if err := os.WriteFile(name, content, 0o600); err != nil {
		t.Fatal(err)
	}
	return name, content
}

func open(t testing.TB, name string) (*Image, error) {
	t.Helper()
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	st, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	return Open(f, st.Size())
}

func TestWhatQEMUWroteIsReadAsItWas(t *testing.T) {
	raw, want := disk(t)
	for name, args := range map[string][]string{
		"version 3": {"-o", "compat=1.1"}, "version 2": {"-o", "compat=0.10"}, "small clusters": {"-o", "cluster_size=512"}, "large clusters": {"-o", "cluster_size=2M"},
		"deflate": {"-c"}, "zstd": {"-c", "-o", "compression_type=zstd"}, "deflate, small": {"-c", "-o", "cluster_size=4k"}, "preallocated": {"-o", "preallocation=metadata"},
	} {
		t.Run(name, func(t *testing.T) {
			at := filepath.Join(t.TempDir(), "q")
			qemuImg(t, append(append([]string{"convert", "-f", "raw", "-O", "qcow2"}, args...), raw, at)...)
			i, err := open(t, at)
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(i.Reader())
			if err != nil || !bytes.Equal(got, want) {
				t.Fatalf("read %d bytes, %v; want %d, equal: %v", len(got), err, len(want), bytes.Equal(got, want))
			}
			b := make([]byte, 100_000)
			if n, err := i.ReadAt(b, 2<<20-5); err != nil || !bytes.Equal(b[:n], want[2<<20-5:2<<20-5+len(b)]) {
				t.Error("ReadAt in the middle:", n, err)
			}
			if n, err := i.ReadAt(b, int64(len(want))-10); n != 10 || err != io.EOF {
				t.Error("ReadAt over the end:", n, err)
			}
		})
	}
}

func TestWhatLeadsElsewhereIsRefused(t *testing.T) {
	raw, _ := disk(t)
	dir := t.TempDir()
	made := func(name string, args ...string) string {
		at := filepath.Join(dir, name)
		qemuImg(t, append(args, at)...)
		return at
	}
	plain := made("plain", "convert", "-f", "raw", "-O", "qcow2", raw)
	backed := filepath.Join(dir, "backed")
	qemuImg(t, "create", "-q", "-f", "qcow2", "-b", "/etc/shadow", "-F", "raw", "-u", backed, "1M")
	data := filepath.Join(dir, "data")
	qemuImg(t, "create", "-q", "-f", "qcow2", "-o", "data_file="+data+".raw,data_file_raw=on", data, "1M")
	snapped := made("snapped", "convert", "-f", "raw", "-O", "qcow2", raw)
	qemuImg(t, "snapshot", "-c", "s", snapped)
	// QEMU needs quiet seconds to encrypt one; what it writes into the head is this.
	luks := made("luks", "convert", "-f", "raw", "-O", "qcow2", raw)
	head, err := os.OpenFile(luks, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := head.WriteAt([]byte{0, 0, 0, 2}, 32); err != nil {
		t.Fatal(err)
	}
	_ = head.Close()
	wide := filepath.Join(dir, "wide")
	qemuImg(t, "create", "-q", "-f", "qcow2", "-o", "extended_l2=on,cluster_size=128k", wide, "1M")
	for name, at := range map[string]string{"backing file": backed, "data file": data, "snapshots": snapped, "encryption": luks, "extended entries": wide} {
		if _, err := open(t, at); dsec.ClassOf(err) != dsec.Unsupported {
			t.Errorf("%s: %v, want unsupported", name, err)
		}
	}
	text, err := os.ReadFile(plain)
	if err != nil {
		t.Fatal(err)
	}
	be := binary.BigEndian
	for name, damage := range map[string]func(b []byte){
		"magic":                func(b []byte) { b[0] = 0 },
		"tiny clusters":        func(b []byte) { be.PutUint32(b[20:], 3) },
		"huge clusters":        func(b []byte) { be.PutUint32(b[20:], 63) },
		"negative size":        func(b []byte) { be.PutUint64(b[24:], 1<<63) },
		"size without a table": func(b []byte) { be.PutUint64(b[24:], 1<<43) },
		"no size":              func(b []byte) { be.PutUint64(b[24:], 0) },
		"table beyond the end": func(b []byte) { be.PutUint64(b[40:], 1<<40) },
		"table that wraps":     func(b []byte) { be.PutUint64(b[40:], 1<<64-1<<16) },
		"table off its border": func(b []byte) { be.PutUint64(b[40:], 12345) },
		"huge table":           func(b []byte) { be.PutUint32(b[36:], 1<<31) },
		"marked":               func(b []byte) { b[79] |= corrupt },
	} {
		b := bytes.Clone(text)
		damage(b)
		if _, err := Open(bytes.NewReader(b), int64(len(b))); dsec.ClassOf(err) != dsec.Corrupt {
			t.Errorf("%s: %v, want corrupt", name, err)
		}
	}
	if _, err := Open(bytes.NewReader(text[:50]), 50); dsec.ClassOf(err) != dsec.Corrupt {
		t.Error("cut short:", err)
	}
}

// TestMoreThanAFileHoldsIsRefused: every entry of every table leads to the same cluster.
func TestMoreThanAFileHoldsIsRefused(t *testing.T) {
	const cluster = 1 << 16
	b := make([]byte, 6*cluster)
	f := writerAt(b)
	if err := Create(f, 1<<40); err != nil {
		t.Fatal(err)
	}
	be := binary.BigEndian
	for i := range int64(cluster / 8) {
		be.PutUint64(b[3*cluster+8*i:], 4*cluster|1<<63)
		be.PutUint64(b[4*cluster+8*i:], 5*cluster|1<<63)
	}
	i, err := Open(bytes.NewReader(b), int64(len(b)))
	if err != nil {
		t.Fatal(err)
	}
	n, err := io.Copy(io.Discard, i.Reader())
	if dsec.ClassOf(err) != dsec.Corrupt || n > int64(len(b))+2*cluster {
		t.Errorf("%d bytes were read before: %v", n, err)
	}
}

type writerAt []byte

func (w writerAt) WriteAt(p []byte, off int64) (int, error) {
	if off+int64(len(p)) > int64(len(w)) {
		return 0, errors.New("beyond the end")
	}
	return copy(w[off:], p), nil
}

func TestWhatIsMadeIsSoundAndEmpty(t *testing.T) {
	for _, size := range []int64{512, 1 << 20, 5<<30 + 512, MaxSize} {
		name := filepath.Join(t.TempDir(), "q")
		f, err := os.Create(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := Create(f, size); err != nil {
			t.Fatal(err)
		}
		_ = f.Close()
		qemuImg(t, "check", "-q", "-f", "qcow2", name)
		i, err := open(t, name)
		if err != nil || i.Size() != size {
			t.Fatal(size, err)
		}
		b := []byte{1, 2, 3}
		if _, err := i.ReadAt(b, size/2); err != nil || !bytes.Equal(b, []byte{0, 0, 0}) {
			t.Error(b, err)
		}
	}
	if err := Create(writerAt(nil), 513); dsec.ClassOf(err) != dsec.Invalid {
		t.Error(err)
	}
}

func FuzzImage(f *testing.F) {
	b := make([]byte, 6<<16)
	if err := Create(writerAt(b), 1<<20); err != nil {
		f.Fatal(err)
	}
	f.Add(b[:1<<10], uint64(1<<17))
	f.Fuzz(func(t *testing.T, head []byte, table uint64) {
		b := make([]byte, 1<<17)
		copy(b, head)
		i, err := Open(bytes.NewReader(b), int64(len(b)))
		if err != nil {
			return
		}
		_, _ = io.CopyN(io.Discard, i.Reader(), 1<<20) // must end, and not crash
		_, _ = i.ReadAt(make([]byte, 100), int64(table>>1))
	})
}
