package boot

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/debian"
)

// maxVmlinux bounds an uncompressed kernel, in bytes; Debian's have 40 to 70 MB.
const maxVmlinux = 256 << 20

// Places in the boot header of a bzImage (Linux, Documentation/arch/x86/boot.rst).
const (
	atSetupSects = 0x1f1
	atBootFlag   = 0x1fe
	atMagic      = 0x202
	atVersion    = 0x206
	atPayload    = 0x248
	atPayloadLen = 0x24c
	headerEnd    = 0x250
)

// Vmlinux returns the ELF kernel inside a vmlinuz. corrupt if it is not one;
// unsupported if it is compressed in a way that is not read here, or cannot be
// started by PVH.
func Vmlinux(vmlinuz []byte) ([]byte, error) {
	const op, object = "unpack", "vmlinuz"
	packed, size, err := payload(vmlinuz)
	if err != nil {
		return nil, dsec.E(dsec.Corrupt, op, object, err)
	}
	r, err := unpacker(packed)
	if err != nil {
		return nil, dsec.E(dsec.ClassOf(err), op, object, err)
	}
	out := make([]byte, size)
	if _, err := io.ReadFull(r, out); err != nil {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return nil, dsec.E(dsec.Corrupt, op, object, err)
	}
	if n, err := r.Read(make([]byte, 1)); n != 0 || (err != nil && err != io.EOF) {
		return nil, dsec.Errorf(dsec.Corrupt, op, object, "more than the %d bytes that its header says, or damaged: %w", size, err)
	}
	if err := checkPVH(out); err != nil {
		return nil, dsec.E(dsec.ClassOf(err), op, object, err)
	}
	return out, nil
}

// payload returns the compressed kernel and its plain size, which its last four
// bytes say.
func payload(b []byte) (packed []byte, size int, err error) {
	le := binary.LittleEndian
	if len(b) < headerEnd || le.Uint16(b[atBootFlag:]) != 0xaa55 || string(b[atMagic:atMagic+4]) != "HdrS" {
		return nil, 0, errors.New("no boot header")
	}
	if v := le.Uint16(b[atVersion:]); v < 0x208 {
		return nil, 0, fmt.Errorf("boot protocol %#x, 0x208 or later tells where the kernel is", v)
	}
	sects := uint64(b[atSetupSects])
	if sects == 0 {
		sects = 4
	}
	from := (sects+1)*512 + uint64(le.Uint32(b[atPayload:]))
	to := from + uint64(le.Uint32(b[atPayloadLen:]))
	if to > uint64(len(b)) || to < from+16 {
		return nil, 0, fmt.Errorf("its header places the kernel at %d to %d of %d bytes", from, to, len(b))
	}
	packed = b[from:to]
	n := le.Uint32(packed[len(packed)-4:])
	if n > maxVmlinux {
		return nil, 0, fmt.Errorf("the kernel has %d bytes, at most %d", n, maxVmlinux)
	}
	return packed, int(n), nil
}

// unpacker reads a payload. Only gzip has the size as a part of its format.
func unpacker(packed []byte) (io.Reader, error) {
	alone := bytes.NewReader(packed[:len(packed)-4])
	switch {
	case bytes.HasPrefix(packed, []byte("\xfd7zXZ\x00")):
		return debian.Unxz(alone)
	case bytes.HasPrefix(packed, []byte{0x02, 0x21, 0x4c, 0x18}):
		return lz4.NewReader(alone), nil
	case bytes.HasPrefix(packed, []byte{0x28, 0xb5, 0x2f, 0xfd}):
		r, err := zstd.NewReader(alone, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxVmlinux))
		if err != nil {
			return nil, dsec.E(dsec.Corrupt, "decompress", "zstd", err)
		}
		return r.IOReadCloser(), nil
	case bytes.HasPrefix(packed, []byte{0x1f, 0x8b}):
		r, err := gzip.NewReader(bytes.NewReader(packed))
		if err != nil {
			return nil, dsec.E(dsec.Corrupt, "decompress", "gzip", err)
		}
		r.Multistream(false)
		return r, nil
	}
	return nil, dsec.Errorf(dsec.Unsupported, "decompress", "kernel", "it begins with %x: neither xz, lz4, zstd nor gzip", packed[:4])
}

// pvhEntry is the type of the note with the address where PVH starts a kernel.
const pvhEntry = 18

// checkPVH wants an ELF kernel for x86-64 with that note, of the owner "Xen".
func checkPVH(b []byte) error {
	f, err := elf.NewFile(bytes.NewReader(b))
	if err != nil {
		return dsec.E(dsec.Corrupt, "parse", "vmlinux", err)
	}
	if f.Machine != elf.EM_X86_64 || f.Type != elf.ET_EXEC {
		return dsec.Errorf(dsec.Unsupported, "check", "vmlinux", "it is %v for %v", f.Type, f.Machine)
	}
	for _, p := range f.Progs {
		if p.Type != elf.PT_NOTE || p.Filesz > 1<<20 {
			continue
		}
		notes := make([]byte, p.Filesz)
		if _, err := p.ReadAt(notes, 0); err != nil {
			return dsec.E(dsec.Corrupt, "read notes of", "vmlinux", err)
		}
		if hasNote(notes, "Xen\x00", pvhEntry) {
			return nil
		}
	}
	return dsec.Errorf(dsec.Unsupported, "check", "vmlinux", "it has no entry for PVH (CONFIG_PVH)")
}

// hasNote walks notes: sizes of name and content and a type, then both, each
// padded to four bytes.
func hasNote(notes []byte, name string, kind uint32) bool {
	le := binary.LittleEndian
	for len(notes) >= 12 {
		n, d, t := uint64(le.Uint32(notes)), uint64(le.Uint32(notes[4:])), le.Uint32(notes[8:])
		notes = notes[12:]
		end := (n+3)&^3 + (d+3)&^3
		if end > uint64(len(notes)) {
			return false
		}
		if t == kind && string(notes[:n]) == name {
			return true
		}
		notes = notes[end:]
	}
	return false
}
