package boot

import (
	"bytes"
	"crypto/sha256"
	"debug/elf"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"strings"
	"testing"

	"github.com/pierrec/lz4/v4"

	"github.com/opendsec/dsec/internal/debian/debiantest"
)

// fakeELF is a file for x86-64 with one section, and with the same bytes as a
// segment of notes if that is asked for.
func fakeELF(t testing.TB, kind elf.Type, section string, content []byte, note bool) []byte {
	t.Helper()
	names := "\x00" + section + "\x00.shstrtab\x00"
	const head, phdr, shdr = 64, 56, 64
	at := uint64(head + phdr)
	namesAt := at + uint64(len(content))
	tableAt := namesAt + uint64(len(names))
	h := elf.Header64{Type: uint16(kind), Machine: uint16(elf.EM_X86_64), Version: 1, Phoff: head, Shoff: tableAt, Ehsize: head,
		Phentsize: phdr, Phnum: 1, Shentsize: shdr, Shnum: 3, Shstrndx: 2}
	copy(h.Ident[:], "\x7fELF\x02\x01\x01")
	seg := elf.Prog64{Type: uint32(elf.PT_LOAD), Off: at, Filesz: uint64(len(content)), Memsz: uint64(len(content))}
	if note {
		seg.Type = uint32(elf.PT_NOTE)
	}
	var b bytes.Buffer
	for _, part := range []any{h, seg, content, []byte(names), elf.Section64{},
		elf.Section64{Name: 1, Type: uint32(elf.SHT_PROGBITS), Off: at, Size: uint64(len(content))},
		elf.Section64{Name: uint32(2 + len(section)), Type: uint32(elf.SHT_STRTAB), Off: namesAt, Size: uint64(len(names))}} {
		if err := binary.Write(&b, binary.LittleEndian, part); err != nil {
			t.Fatal(err)
		}
	}
	return b.Bytes()
}

// fakeModule says of itself what a module of the kernel does.
func fakeModule(t testing.TB, release, name string, depends ...string) []byte {
	t.Helper()
	info := fmt.Sprintf("license=GPL\x00depends=%s\x00name=%s\x00vermagic=%s SMP mod_unload \x00", strings.Join(depends, ","), name, release)
	return fakeELF(t, elf.ET_REL, ".modinfo", []byte(info), false)
}

// fakeVmlinux has an entry for PVH and some bytes of its own.
func fakeVmlinux(t testing.TB, own string) []byte {
	t.Helper()
	note := []byte("\x04\x00\x00\x00\x03\x00\x00\x00\x05\x00\x00\x00GNU\x00abc\x00" + "\x04\x00\x00\x00\x08\x00\x00\x00\x12\x00\x00\x00Xen\x00\x00\x00\x00\x01\x00\x00\x00\x00")
	return fakeELF(t, elf.ET_EXEC, ".notes", append(note, strings.Repeat(own, 1000)...), true)
}

// pack compresses a kernel as the kernel's build does.
func pack(t testing.TB, how string, plain []byte) []byte {
	t.Helper()
	if how == ".gz" {
		return debiantest.Compress(t, how, plain)
	}
	packed := plain
	if how == ".lz4" {
		var b bytes.Buffer
		w := lz4.NewWriter(&b)
		if err := w.Apply(lz4.LegacyOption(true)); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(plain); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		packed = b.Bytes()
	} else {
		packed = debiantest.Compress(t, how, plain)
	}
	return binary.LittleEndian.AppendUint32(packed, uint32(len(plain)))
}

// vmlinuz puts a boot header before a payload.
func vmlinuz(payload []byte) []byte {
	b := make([]byte, 1024+100)
	b[atSetupSects] = 1
	le := binary.LittleEndian
	le.PutUint16(b[atBootFlag:], 0xaa55)
	copy(b[atMagic:], "HdrS")
	le.PutUint16(b[atVersion:], 0x20f)
	le.PutUint32(b[atPayload:], 100)
	le.PutUint32(b[atPayloadLen:], uint32(len(payload)))
	return append(append(b, payload...), "what follows"...)
}

// kernelDeb is a package of a kernel with a few modules.
func kernelDeb(t testing.TB, release string, more ...debiantest.File) []byte {
	t.Helper()
	dir := "./lib/modules/" + release + "/kernel/"
	files := []debiantest.File{
		{Name: "./boot/config-" + release, Content: []byte("CONFIG_PVH=y\n")},
		{Name: "./boot/vmlinuz-" + release, Content: vmlinuz(pack(t, ".lz4", fakeVmlinux(t, release)))},
		{Name: "./lib/modules/" + release + "/modules.builtin", Content: []byte("kernel/fs/ext4/ext4.ko\nkernel/lib/crc-16.ko\n")},
		{Name: dir + "drivers/virtio/virtio.ko", Content: fakeModule(t, release, "virtio")},
		{Name: dir + "drivers/virtio/virtio_ring.ko", Content: fakeModule(t, release, "virtio_ring", "virtio")},
		{Name: dir + "drivers/virtio/virtio-pci.ko.xz", Content: debiantest.Compress(t, ".xz", fakeModule(t, release, "virtio_pci", "virtio_ring", "virtio", "crc-16"))},
	}
	return debiantest.Deb(t, ".xz", append(files, more...)...)
}

func sum(b []byte) string { h := sha256.Sum256(b); return hex.EncodeToString(h[:]) }

const (
	release       = "6.1.0-57-cloud-amd64"
	kernelPackage = "linux-image-" + release
)

// world is an archive with a kernel, and what builds it.
func world(t testing.TB) (*debiantest.Archive, Config) {
	t.Helper()
	a := debiantest.New(t, "book")
	deb := kernelDeb(t, release)
	a.Suites[0].Packages = []debiantest.Package{
		{Name: "linux-image-cloud-amd64", Version: "6.1.192-3", Depends: kernelPackage + " (= 6.1.192-3)", Deb: []byte("meta")},
		{Name: kernelPackage, Version: "6.1.192-3", Deb: deb},
	}
	a.Publish()
	lock := Lock{Format: 1, Arch: "amd64", Codename: "book", Newest: "linux-image-cloud-amd64", Package: kernelPackage, Version: "6.1.192-3",
		Deb: sum(deb), Vmlinux: sum(fakeVmlinux(t, release))}
	return a, Config{Cache: t.TempDir(), Lock: lock, Modules: []string{"virtio-pci"}, Init: []byte("#!/bin/sh\n"), Pause: 1,
		Files: []File{{Name: "etc/z", Mode: 0o644, Content: []byte("z")}, {Name: "bin/a", Mode: 0o755, Content: []byte("a")}}, Apt: a.Apt, Keyring: a.Keyring}
}

// newer changes the archive so that the pinned version is replaced by another.
func newer(t testing.TB, a *debiantest.Archive, version string) {
	t.Helper()
	next := strings.Replace(release, "57", "58", 1)
	a.Suites[0].Packages = []debiantest.Package{
		{Name: "linux-image-cloud-amd64", Version: "6.1.9-1", Depends: "linux-image-6.1.0-1-cloud-amd64 (= 6.1.9-1)", Deb: []byte("old")},
		{Name: "linux-image-cloud-amd64", Version: version, Depends: "linux-image-" + next + " (= " + version + ")", Deb: []byte("meta")},
		{Name: "linux-image-" + next, Version: version, Deb: kernelDeb(t, next)},
	}
	a.Publish()
}
