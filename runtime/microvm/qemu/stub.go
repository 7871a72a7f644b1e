package qemu

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"os"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/linux"
)

// stub is the smallest kernel that QEMU takes for PVH. A machine that begins with a
// state has the same devices with it as with the real one, and nothing to
// read; it is never run, and would stop at once.
func stub() []byte {
	const (
		head  = 64
		entry = 1 << 20
		notes = head + 2*56
		code  = notes + 28
		size  = code + 3
	)
	var b bytes.Buffer
	put := func(v any) { _ = binary.Write(&b, binary.LittleEndian, v) } // a Buffer takes all
	put(elf.Header64{Ident: [16]byte{0x7f, 'E', 'L', 'F', byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), 1}, Type: uint16(elf.ET_EXEC),
		Machine: uint16(elf.EM_X86_64), Version: 1, Entry: entry, Phoff: head, Ehsize: head, Phentsize: 56, Phnum: 2, Shentsize: 64})
	put(elf.Prog64{Type: uint32(elf.PT_LOAD), Flags: uint32(elf.PF_R | elf.PF_X), Off: code, Vaddr: entry, Paddr: entry, Filesz: size - code, Memsz: size - code, Align: 1})
	put(elf.Prog64{Type: uint32(elf.PT_NOTE), Flags: uint32(elf.PF_R), Off: notes, Filesz: code - notes, Memsz: code - notes, Align: 4})
	put([]uint32{4, 8, 18}) // Xen's note of the entry: length of its name, of its value, its type
	b.WriteString("Xen\x00")
	put(uint64(entry))
	put(uint32(0))
	b.Write([]byte{0xf4, 0xeb, 0xfd}) // hlt; jmp to it
	return b.Bytes()
}

func openStub() (*os.File, error) {
	f, err := linux.SealedFile("dsec-vm-stub", stub())
	if err != nil {
		return nil, dsec.E(dsec.Internal, "make", "stub kernel", err)
	}
	return f, nil
}
