package confine

import (
	_ "embed"
	"strconv"
	"strings"
	"sync"

	"github.com/opendsec/dsec"
)

// The tables are "name number" lines, ascending by number, from the kernel's
// own lists as golang.org/x/sys v0.50.0 (Linux 7.0) has them.
var (
	//go:embed syscalls_amd64.txt
	tableAMD64 string
	//go:embed syscalls_arm64.txt
	tableARM64 string
)

// machine is what the compiler needs to know of an architecture.
type machine struct {
	audit  uint32 // AUDIT_ARCH_…
	x32    bool   // numbers with bit 30 are another calling convention
	number map[string]uint32
	name   map[uint32]string
	last   uint32 // largest known number
}

const (
	auditAMD64 = 0xc000003e
	auditARM64 = 0xc00000b7
	x32Bit     = 0x40000000
)

var machines = sync.OnceValue(func() map[Arch]*machine {
	return map[Arch]*machine{
		AMD64: newMachine(auditAMD64, true, tableAMD64),
		ARM64: newMachine(auditARM64, false, tableARM64),
	}
})

func newMachine(audit uint32, x32 bool, table string) *machine {
	m := &machine{audit: audit, x32: x32, number: map[string]uint32{}, name: map[uint32]string{}}
	for line := range strings.Lines(table) {
		name, n, _ := strings.Cut(strings.TrimSpace(line), " ")
		v, err := strconv.ParseUint(n, 10, 32)
		if err != nil {
			panic("confine: bad line in syscall table: " + line) // embedded: a test reads it all
		}
		nr := uint32(v)
		m.number[name], m.name[nr] = nr, name
		m.last = max(m.last, nr)
	}
	return m
}

func machineOf(a Arch) (*machine, error) {
	m := machines()[a]
	if m == nil {
		return nil, dsec.Errorf(dsec.Unsupported, "compile seccomp profile", string(a), "unknown architecture")
	}
	return m, nil
}
