package confine

import (
	"encoding/binary"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/opendsec/dsec"
)

// instruction is struct sock_filter.
type instruction struct {
	code   uint16
	jt, jf uint8
	k      uint32
}

// Opcodes of classic BPF, as far as needed.
const (
	opLoad  = 0x20 // A = 32 bits of the data at k
	opAnd   = 0x54 // A &= k
	opJump  = 0x05 // skip k
	opIfEq  = 0x15 // A == k
	opIfGe  = 0x35 // A >= k
	opIfAny = 0x45 // A & k
	opRet   = 0x06

	atNumber = 0
	atArch   = 4
	atArgs   = 16 // low halves: both machines are little-endian

	retAllow = 0x7fff0000
	retErrno = 0x00050000
	retKill  = 0x80000000 // the process, by SIGSYS
)

// lowHalf is where the low 32 bits of an argument are.
func lowHalf(arg int) uint32 { return atArgs + 8*uint32(arg) }

func (a action) ret() instruction {
	if a.allow {
		return instruction{code: opRet, k: retAllow}
	}
	if a.notice {
		return instruction{code: opRet, k: retNotice | uint32(a.tell)<<tellShift | uint32(a.errno)}
	}
	return instruction{code: opRet, k: retErrno | uint32(a.errno)}
}

// unknown is the answer to numbers that no table has: as an older kernel.
var unknown = refuse(eNOSYS, "the call is newer than this version of dsec", "programs fall back as on an older kernel")

// rulesOf decides every call of a profile by name. The result is shared.
func rulesOf(p Profile) map[string]rule { return ruleSets()[p] }

var ruleSets = sync.OnceValue(func() map[Profile]map[string]rule {
	sets := map[Profile]map[string]rule{}
	for _, p := range Profiles {
		sets[p] = makeRules(p)
	}
	return sets
})

func makeRules(p Profile) map[string]rule {
	rules := map[string]rule{}
	allow := func(calls string) {
		for name := range strings.FieldsSeq(calls) {
			rules[name] = rule{otherwise: allowed}
		}
	}
	allow(plainCalls)
	for _, r := range append([]refusal{tracing}, refusals...) {
		for name := range strings.FieldsSeq(r.calls) {
			rules[name] = rule{otherwise: refuse(r.errno, r.reason, r.way)}
		}
	}
	if p.Gives(Trace) {
		allow(tracing.calls)
	}
	if p.Gives(Mounts) {
		allow(containerCalls)
	}
	maps.Copy(rules, conditions(p))
	mark(rules)
	return rules
}

// span is a run of numbers with one rule.
type span struct {
	first uint32
	rule  rule
}

// spans orders a profile by number, neighbours with equal plain answers joined.
func spans(m *machine, rules map[string]rule) []span {
	var all []span
	for nr := range m.last + 2 {
		r, ok := rules[m.name[nr]]
		if !ok {
			r = rule{otherwise: unknown}
		}
		if n := len(all); n > 0 && r.clauses == nil && all[n-1].rule.clauses == nil &&
			all[n-1].rule.otherwise.ret() == r.otherwise.ret() {
			continue
		}
		all = append(all, span{nr, r})
	}
	return all
}

// compile makes a binary search over the numbers. The kernel runs the whole
// program once for each number when it is loaded, so its depth is part of the
// cost of every command; a list would be thirty times dearer.
func compile(m *machine, rules map[string]rule) []instruction {
	p := []instruction{
		{code: opLoad, k: atArch},
		{code: opIfEq, jt: 1, k: m.audit},
		{code: opRet, k: retKill},
		{code: opLoad, k: atNumber},
	}
	if m.x32 {
		p = append(p, instruction{code: opIfGe, jf: 1, k: x32Bit}, refuse(eNOSYS, "", "").ret())
	}
	return append(p, search(spans(m, rules))...)
}

func search(all []span) []instruction {
	if len(all) == 1 {
		return all[0].rule.code()
	}
	mid := len(all) / 2
	low, high := search(all[:mid]), search(all[mid:])
	head := []instruction{{code: opIfGe, jt: 0, jf: 1, k: all[mid].first}, {code: opJump, k: uint32(len(low))}}
	if len(low) < 256 {
		head = []instruction{{code: opIfGe, jt: uint8(len(low)), k: all[mid].first}}
	}
	return slices.Concat(head, low, high)
}

// code tests the clauses one after the other.
func (r rule) code() []instruction {
	var p []instruction
	for _, c := range r.clauses {
		p = append(p, c.code()...)
	}
	return append(p, r.otherwise.ret())
}

// code ends with the answer; a test that does not hold jumps behind it.
func (c clause) code() []instruction {
	var p []instruction
	size := 1
	for _, t := range c.tests {
		size += t.size()
	}
	for _, t := range c.tests {
		p = append(p, instruction{code: opLoad, k: lowHalf(t.arg)})
		if !t.any && t.mask != 0xffffffff {
			p = append(p, instruction{code: opAnd, k: t.mask})
		}
		behind := uint8(size - len(p) - 1)
		if t.any {
			p = append(p, instruction{code: opIfAny, jf: behind, k: t.mask})
		} else {
			p = append(p, instruction{code: opIfEq, jf: behind, k: t.value})
		}
	}
	return append(p, c.action.ret())
}

func (t test) size() int {
	if t.any || t.mask == 0xffffffff {
		return 2
	}
	return 3
}

// Filter is what is compiled: a profile, and what is added to it.
type Filter struct {
	Profile Profile
	Arch    Arch
	Notice  bool // refusals of interest ask the listener of the filter, see Noticing
	// Listed is for commands of which only listed files may be started (PathRules):
	// landlock knows files of a disk, and would let be what is in memory only.
	Listed bool
	Local  bool // of sockets only those of AF_UNIX, whose state ends with the processes
	Enter  bool // setns is allowed, which whoever has no rights can do nothing with
}

var programs sync.Map // Filter → []byte

// Program compiles a profile to the bytes of an array of struct sock_filter,
// for seccomp(2) or PR_SET_SECCOMP; the number of instructions is len/8. The
// caller must not change the result.
func Program(p Profile, a Arch) ([]byte, error) { return Filter{Profile: p, Arch: a}.Program() }

// sealedMemory makes files of memory that are not executable and never will be
// (MFD_NOEXEC_SEAL, Linux 6.3); without it is refused, by which programs take a file.
var sealedMemory = rule{clauses: []clause{{label: "MFD_NOEXEC_SEAL", tests: []test{{arg: 1, mask: 8, value: 8}}, action: allowed}},
	otherwise: refuse(eACCES, "a program in memory is none of those that may be started", "MFD_NOEXEC_SEAL works")}

var localSockets = rule{clauses: []clause{{"AF_UNIX", []test{isValue(0, afUnix)}, allowed}},
	otherwise: refuse(eAFNOSUPPORT, "what other sockets leave behind may outlive a call", `network="loopback" gives each call a network of its own`)}

// Program is like the function of that name.
func (f Filter) Program() ([]byte, error) {
	if b, ok := programs.Load(f); ok {
		return b.([]byte), nil
	}
	if _, err := ParseProfile(string(f.Profile)); err != nil {
		return nil, err
	}
	m, err := machineOf(f.Arch)
	if err != nil {
		return nil, err
	}
	rules := rulesOf(f.Profile)
	if !f.Notice {
		rules = unmarked(rules)
	}
	if f.Listed {
		rules = maps.Clone(rules)
		rules["memfd_create"] = sealedMemory
	}
	if f.Local || f.Enter {
		rules = maps.Clone(rules)
	}
	if f.Local {
		rules["socket"] = localSockets
	}
	if f.Enter {
		rules["setns"] = rule{otherwise: allowed}
	}
	code := compile(m, rules)
	if len(code) > 4096 {
		return nil, dsec.Errorf(dsec.Internal, "compile seccomp profile", string(f.Profile), "%d instructions, the kernel takes 4096", len(code))
	}
	var b []byte
	for _, i := range code {
		b = binary.LittleEndian.AppendUint16(b, i.code)
		b = append(b, i.jt, i.jf)
		b = binary.LittleEndian.AppendUint32(b, i.k)
	}
	programs.Store(f, b)
	return b, nil
}
