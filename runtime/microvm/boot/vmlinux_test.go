package boot

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"os/exec"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
)

func TestKernelsOfEachCompression(t *testing.T) {
	plain := fakeVmlinux(t, "x")
	for _, how := range []string{".xz", ".lz4", ".zst", ".gz"} {
		got, err := Vmlinux(vmlinuz(pack(t, how, plain)))
		if err != nil || !bytes.Equal(got, plain) {
			t.Errorf("%s: %d bytes, %v", how, len(got), err)
		}
	}
}

func TestWhatIsNoKernel(t *testing.T) {
	plain := fakeVmlinux(t, "x")
	good := vmlinuz(pack(t, ".zst", plain))
	change := func(b []byte, fn func(b []byte)) []byte {
		b = bytes.Clone(b)
		fn(b)
		return b
	}
	le := binary.LittleEndian
	for _, c := range []struct {
		name  string
		image []byte
		class dsec.Class
		text  string
	}{
		{"empty", nil, dsec.Corrupt, "boot header"},
		{"zeros", make([]byte, 4096), dsec.Corrupt, "boot header"},
		{"cut off", good[:len(good)-60], dsec.Corrupt, "places the kernel"},
		{"an old protocol", change(good, func(b []byte) { le.PutUint16(b[atVersion:], 0x207) }), dsec.Corrupt, "0x207"},
		{"a payload elsewhere", change(good, func(b []byte) { le.PutUint32(b[atPayload:], 1<<31) }), dsec.Corrupt, "places the kernel"},
		{"a payload of nothing", change(good, func(b []byte) { le.PutUint32(b[atPayloadLen:], 0) }), dsec.Corrupt, "places the kernel"},
		{"an end that wraps", change(good, func(b []byte) { le.PutUint32(b[atPayloadLen:], 1<<32-1) }), dsec.Corrupt, "places the kernel"},
		{"a size of 4 GiB", vmlinuz(append(pack(t, ".zst", plain)[:40], 0xff, 0xff, 0xff, 0xff)), dsec.Corrupt, "at most"},
		{"less than its size", vmlinuz(le.AppendUint32(pack(t, ".zst", plain)[:len(pack(t, ".zst", plain))-4], uint32(len(plain)+1))), dsec.Corrupt, "EOF"},
		{"more than its size", vmlinuz(le.AppendUint32(pack(t, ".lz4", plain)[:len(pack(t, ".lz4", plain))-4], uint32(len(plain)-1))), dsec.Corrupt, "more than"},
		{"another compression", vmlinuz(append([]byte("BZh91AY&SY_not_read"), 1, 0, 0, 0)), dsec.Unsupported, "neither"},
		{"no ELF", vmlinuz(pack(t, ".gz", []byte("a text that is no kernel at all"))), dsec.Corrupt, "vmlinux"},
		{"no entry for PVH", vmlinuz(pack(t, ".xz", fakeELF(t, elf.ET_EXEC, ".notes", []byte("no note here"), true))), dsec.Unsupported, "PVH"},
		{"an object file", vmlinuz(pack(t, ".xz", fakeELF(t, elf.ET_REL, ".notes", nil, true))), dsec.Unsupported, "ET_REL"},
	} {
		_, err := Vmlinux(c.image)
		if dsec.ClassOf(err) != c.class || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %v (%s), want %s with %q", c.name, err, dsec.ClassOf(err), c.class, c.text)
		}
	}
}

// The kernel's build puts a filter for x86 code before LZMA2, as the real tool
// does here.
func TestAnXZWithAFilterForCodeIsSaidToBeUnsupported(t *testing.T) {
	plain := fakeVmlinux(t, "x")
	cmd := exec.Command("xz", "--check=crc32", "--x86", "--lzma2", "--stdout")
	cmd.Stdin = bytes.NewReader(plain)
	packed, err := cmd.Output()
	if err != nil {
		t.Fatalf("xz: %v", err)
	}
	_, err = Vmlinux(vmlinuz(binary.LittleEndian.AppendUint32(packed, uint32(len(plain)))))
	if dsec.ClassOf(err) != dsec.Unsupported || !strings.Contains(err.Error(), "filters") {
		t.Errorf("%v (%s)", err, dsec.ClassOf(err))
	}
}

func FuzzVmlinux(f *testing.F) {
	plain := fakeVmlinux(f, "x")
	for _, how := range []string{".xz", ".lz4", ".zst", ".gz"} {
		f.Add(vmlinuz(pack(f, how, plain)))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		// A size of hundreds of megabytes is allowed, and slow.
		if _, n, err := payload(b); err == nil && n > 1<<20 {
			return
		}
		if _, err := Vmlinux(b); err != nil && dsec.ClassOf(err) != dsec.Corrupt && dsec.ClassOf(err) != dsec.Unsupported {
			t.Errorf("%v (%s)", err, dsec.ClassOf(err))
		}
	})
}

func FuzzModule(f *testing.F) {
	f.Add(fakeModule(f, "6.1", "x", "y", "z"))
	f.Fuzz(func(t *testing.T, b []byte) { _, _, _, _ = modinfo(b) })
}
