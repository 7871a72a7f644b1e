package confine

import (
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
)

var update = flag.Bool("update", false, "write the golden files")

var arches = []Arch{AMD64, ARM64}

// each runs a test for every profile and architecture.
func each(t *testing.T, f func(t *testing.T, p Profile, a Arch)) {
	for _, p := range Profiles {
		for _, a := range arches {
			t.Run(string(p)+"-"+string(a), func(t *testing.T) { f(t, p, a) })
		}
	}
}

func TestEveryKnownCallIsDecidedOnPurpose(t *testing.T) {
	each(t, func(t *testing.T, p Profile, a Arch) {
		rules := rulesOf(p)
		for name := range machines()[a].number {
			if _, ok := rules[name]; !ok {
				t.Errorf("%s is in no list", name)
			}
		}
	})
}

func TestEveryRuleNamesACallOfAMachine(t *testing.T) {
	for name := range rulesOf(Build) {
		known := name == "sync_file_range2" || name == "fstatat"
		for _, a := range arches {
			_, ok := machines()[a].number[name]
			known = known || ok
		}
		if !known {
			t.Errorf("%s is a call of no machine", name)
		}
	}
}

func TestNoCallIsInTwoLists(t *testing.T) {
	seen := map[string]string{}
	note := func(list, name string) {
		if other, ok := seen[name]; ok {
			t.Errorf("%s is in %s and in %s", name, other, list)
		}
		seen[name] = list
	}
	for name := range strings.FieldsSeq(plainCalls) {
		note("the plain calls", name)
	}
	for _, r := range append([]refusal{tracing}, refusals...) {
		for name := range strings.FieldsSeq(r.calls) {
			note("refusals: "+r.reason, name)
		}
	}
	for name := range conditions(Build) {
		note("the conditions", name)
	}
}

func TestRefusalsSayWhyAndWhatToDo(t *testing.T) {
	each(t, func(t *testing.T, p Profile, a Arch) {
		for _, r := range Refusals(p, a) {
			if r.Call == "" || r.Errno == "" || r.Reason == "" || r.Way == "" || r.Profile != p {
				t.Errorf("incomplete: %+v", r)
			}
		}
	})
}

// decode is the inverse of the last step of Program.
func decode(t testing.TB, b []byte) []instruction {
	t.Helper()
	if len(b) == 0 || len(b)%8 != 0 {
		t.Fatalf("a program of %d bytes", len(b))
	}
	var p []instruction
	for ; len(b) > 0; b = b[8:] {
		p = append(p, instruction{binary.LittleEndian.Uint16(b), b[2], b[3], binary.LittleEndian.Uint32(b[4:])})
	}
	return p
}

// run interprets a program as the kernel does; steps is how long it took.
func run(p []instruction, arch, nr uint32, args [6]uint64) (answer uint32, steps int, err error) {
	data := binary.LittleEndian.AppendUint32(nil, nr)
	data = binary.LittleEndian.AppendUint32(data, arch)
	data = binary.LittleEndian.AppendUint64(data, 0x400000)
	for _, a := range args {
		data = binary.LittleEndian.AppendUint64(data, a)
	}
	var acc uint32
	for pc := 0; pc < len(p); steps++ {
		i := p[pc]
		pc++
		hit := false
		switch i.code {
		case opLoad:
			if i.k%4 != 0 || int(i.k)+4 > len(data) {
				return 0, steps, fmt.Errorf("load at %d", i.k)
			}
			acc = binary.LittleEndian.Uint32(data[i.k:])
			continue
		case opAnd:
			acc &= i.k
			continue
		case opJump:
			pc += int(i.k)
			continue
		case opRet:
			return i.k, steps, nil
		case opIfEq:
			hit = acc == i.k
		case opIfGe:
			hit = acc >= i.k
		case opIfAny:
			hit = acc&i.k != 0
		default:
			return 0, steps, fmt.Errorf("opcode %#x", i.code)
		}
		if hit {
			pc += int(i.jt)
		} else {
			pc += int(i.jf)
		}
	}
	return 0, steps, errors.New("ran off the end")
}

func answerOf(r Refusal) uint32 {
	for _, e := range []errno{ignored, ePERM, eACCES, eNOSYS, ePROTONOSUPPORT, eOPNOTSUPP, eAFNOSUPPORT} {
		if r.Errno == e.String() {
			return retErrno | uint32(e)
		}
	}
	return retAllow
}

// interesting are arguments on both sides of every condition.
func interesting() [][6]uint64 {
	var all [][6]uint64
	for _, v := range []uint64{0, 1, 2, 8, 10, 16, 17, 38, 40, 0x80, 0x11, 0x1200011, 0x10000000, 0x20000, 0x7e020000, 0x70000011, 0x70020011, 0x0040000, 0xffffffff, 0x100000000, 0x400000} {
		for _, w := range []uint64{0, 1, 2, 3, 0x80801, 0x5412, 0x541c, 0x5401, 0x801c581f, 0x401c5820, 0xc0c0586d, 0x5878, 0x40049409, 0x4020940d,
			0xc0189436, 0x80086601, 0x40086602, 0xc028660f, 0xc020660b, 0xf501, 0xbc01, 0x100005412, 0x5452, 41, 263,
			0x8913, 0x8914, 0x89a0, 0x8b01} {
			for _, x := range []uint64{0, 5, 6, 13, 17, 34, 58, 64, 66, 132, 262, 12, 9} {
				all = append(all, [6]uint64{v, w, x})
			}
		}
	}
	return all
}

func TestProgramAnswersAsExplained(t *testing.T) {
	args := interesting()
	each(t, func(t *testing.T, p Profile, a Arch) {
		m := machines()[a]
		prog, err := Program(p, a)
		if err != nil {
			t.Fatal(err)
		}
		code := decode(t, prog)
		rules := rulesOf(p)
		for nr := range m.last + 20 {
			try := args[:1]
			if rules[m.name[nr]].clauses != nil {
				try = args
			}
			for _, v := range try {
				got, steps, err := run(code, m.audit, nr, v)
				want := answerOf(Explain(p, a, nr, v))
				if err != nil || got != want || steps > 120 {
					t.Fatalf("%s(%#x): %#x after %d steps, %v; explained as %#x", m.name[nr], v, got, steps, err, want)
				}
			}
		}
	})
}

func TestOtherConventionsAreRefused(t *testing.T) {
	each(t, func(t *testing.T, p Profile, a Arch) {
		prog, err := Program(p, a)
		if err != nil {
			t.Fatal(err)
		}
		code, m := decode(t, prog), machines()[a]
		const auditI386 = 0x40000003
		for nr := range uint32(500) {
			if got, _, err := run(code, auditI386, nr, [6]uint64{}); got != retKill || err != nil {
				t.Errorf("i386 call %d: %#x %v, want kill", nr, got, err)
			}
			if got, _, err := run(code, m.audit, nr|x32Bit, [6]uint64{}); got != retErrno|uint32(eNOSYS) || err != nil {
				t.Errorf("x32 call %d: %#x %v, want ENOSYS", nr, got, err)
			}
		}
	})
}

// Numbers are written out here so that a slip in the tables shows.
func TestDangerousCallsAreRefused(t *testing.T) {
	for _, c := range []struct {
		call string
		nr   uint32
		args [6]uint64
	}{
		{"mount", 165, [6]uint64{}}, {"unshare(CLONE_NEWUSER)", 272, [6]uint64{0x10000000}}, {"clone(CLONE_NEWUSER)", 56, [6]uint64{0x10000011}},
		{"clone3", 435, [6]uint64{}}, {"bpf", 321, [6]uint64{}}, {"io_uring_setup", 425, [6]uint64{}}, {"userfaultfd", 323, [6]uint64{}},
		{"ioctl TIOCSTI", 16, [6]uint64{0, 0x5412}}, {"ioctl TIOCSTI with high bits", 16, [6]uint64{0, 0xff00005412}},
		{"ioctl XFS_IOC_SWAPEXT", 16, [6]uint64{0, 0xc0c0586d}}, {"ioctl EXT4_IOC_MOVE_EXT", 16, [6]uint64{0, 0xc028660f}},
		{"ioctl XFS_IOC_EXCHANGE_RANGE", 16, [6]uint64{0, 0x40285881}}, {"ioctl FIDEDUPERANGE", 16, [6]uint64{0, 0xc0189436}},
		{"ioctl FS_IOC_FSSETXATTR", 16, [6]uint64{0, 0x401c5820}}, {"ioctl BTRFS_IOC_SUBVOL_CREATE", 16, [6]uint64{0, 0x5000940e}},
		{"socket AF_ALG", 41, [6]uint64{38, 5, 0}}, {"socket AF_VSOCK", 41, [6]uint64{40, 1, 0}}, {"socket AF_PACKET", 41, [6]uint64{17, 3, 0}},
		{"socket netfilter", 41, [6]uint64{16, 3, 12}}, {"socket MPTCP", 41, [6]uint64{2, 1, 262}}, {"ptrace", 101, [6]uint64{}},
		{"open_by_handle_at", 304, [6]uint64{}}, {"keyctl", 250, [6]uint64{}}, {"init_module", 175, [6]uint64{}}, {"kexec_load", 246, [6]uint64{}},
		{"personality READ_IMPLIES_EXEC", 135, [6]uint64{0x400000}}, {"setns", 308, [6]uint64{}}, {"a future call", 600, [6]uint64{}},
	} {
		if r := Explain(Build, AMD64, c.nr, c.args); r.Errno == "" {
			t.Errorf("%s is allowed: %+v", c.call, r)
		}
	}
	if r := Explain(Debug, AMD64, 101, [6]uint64{}); r.Errno != "" {
		t.Errorf("ptrace under debug: %s", r.Text())
	}
	r := Explain(Build, AMD64, 101, [6]uint64{}).Text()
	for _, part := range []string{"ptrace", "EPERM", "build", `profile="debug"`} {
		if !strings.Contains(r, part) {
			t.Errorf("%q does not say %s", r, part)
		}
	}
}

func TestProgramsAreGolden(t *testing.T) {
	each(t, func(t *testing.T, p Profile, a Arch) {
		prog, err := Program(p, a)
		if err != nil {
			t.Fatal(err)
		}
		var b strings.Builder
		for i, in := range decode(t, prog) {
			fmt.Fprintf(&b, "%4d %02x %3d %3d %08x\n", i, in.code, in.jt, in.jf, in.k)
		}
		file := filepath.Join("testdata", string(p)+"-"+string(a)+".bpf.txt")
		if *update {
			if err := os.WriteFile(file, []byte(b.String()), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(file)
		if err != nil || string(want) != b.String() {
			t.Errorf("%s differs (%v); if that is meant, run with -update and read the diff", file, err)
		}
	})
}

func TestUnknownProfilesAndMachinesAreTyped(t *testing.T) {
	if _, err := Program("nosuch", AMD64); !errors.Is(err, dsec.Invalid.Err()) {
		t.Errorf("unknown profile: %v, want invalid", err)
	}
	if _, err := Program(Build, "riscv64"); !errors.Is(err, dsec.Unsupported.Err()) {
		t.Errorf("unknown machine: %v, want unsupported", err)
	}
	if p, err := ParseProfile(""); p != Build || err != nil {
		t.Errorf("no profile is %q %v, want build", p, err)
	}
}

func TestCapabilitiesAreFew(t *testing.T) {
	for n, name := range map[int]string{2: "dac_read_search", 12: "net_admin", 16: "sys_module", 17: "sys_rawio", 19: "sys_ptrace", 21: "sys_admin",
		22: "sys_boot", 24: "sys_resource", 25: "sys_time", 34: "syslog", 38: "perfmon", 39: "bpf", 40: "checkpoint_restore"} {
		if Capabilities(Build).Has(n) {
			t.Errorf("build has cap_%s", name)
		}
	}
	for _, p := range Profiles {
		if more := Capabilities(p) &^ Capabilities(Build) &^ (1 << capSysPtrace); more != 0 && Minimum(p) < OwnKernel {
			t.Errorf("%s has capabilities %#x of a shared kernel", p, more)
		}
	}
	if d := Capabilities(Debug) &^ Capabilities(Build); d != 1<<capSysPtrace {
		t.Errorf("debug adds %#x, want sys_ptrace only", d)
	}
}

func TestRlimitsStayWithinTheHardLimit(t *testing.T) {
	for _, p := range Profiles {
		for _, r := range Rlimits(p) {
			if l := r.Within(0); l.Soft != 0 || l.Hard != 0 {
				t.Errorf("%+v within 0 is %+v", r, l)
			}
			if r.Soft > r.Hard {
				t.Errorf("%+v: soft above hard", r)
			}
			if r.Resource == limitCore && (r.Hard == 1) == p.Gives(CoreDumps) {
				t.Errorf("%s: core limit %d", p, r.Hard)
			}
		}
	}
}
