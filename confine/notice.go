package confine

import (
	"encoding/binary"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/opendsec/dsec"
)

// noticedCalls are those whose refusal is worth a line of evidence: no honest
// program needs them, and none tries them as a matter of course, as libraries do
// with io_uring or clone3. The number is the argument that says what was wanted.
const noticedCalls = `
mount umount2 pivot_root open_tree open_tree_attr move_mount fsopen fsconfig fsmount fspick mount_setattr setns:1
clone:0 unshare:0 bpf:0 perf_event_open kexec_load kexec_file_load reboot:2 init_module finit_module delete_module
add_key request_key keyctl:0 open_by_handle_at file_setattr swapon swapoff acct settimeofday clock_settime:0
syslog:0 iopl ioperm ptrace:0 process_vm_readv process_vm_writev pidfd_getfd personality:0 socket:0 ioctl:1 setsockopt:2`

// unnoticed are refused clauses of those calls that are tried as a matter of course:
// MPTCP by Go, the audit by sudo, F2FS by SQLite.
var unnoticed = []string{"ICMP echo", "other protocol", "netlink", "other netlink", "an F2FS control", "PACKET_RX_RING", "PACKET_TX_RING"}

// mark sets which refusals are of interest, in rules that are not shared yet.
func mark(rules map[string]rule) {
	for entry := range strings.FieldsSeq(noticedCalls) {
		name, arg, _ := strings.Cut(entry, ":")
		r, ok := rules[name]
		if !ok {
			continue
		}
		tell := uint8(0)
		if n, err := strconv.ParseUint(arg, 10, 3); err == nil {
			tell = uint8(n) + 1
		}
		r.clauses = slices.Clone(r.clauses)
		for i := range r.clauses {
			if c := &r.clauses[i]; !c.action.allow && !slices.Contains(unnoticed, c.label) {
				c.action.notice, c.action.tell = true, tell
			}
		}
		if !r.otherwise.allow {
			r.otherwise.notice, r.otherwise.tell = true, tell
		}
		rules[name] = r
	}
}

// unmarked are the same rules without marks.
func unmarked(rules map[string]rule) map[string]rule {
	rules = maps.Clone(rules)
	for name, r := range rules {
		r.otherwise.notice = false
		r.clauses = slices.Clone(r.clauses)
		for i := range r.clauses {
			r.clauses[i].action.notice = false
		}
		rules[name] = r
	}
	return rules
}

// Answers of a filter with notice: the errno in the low byte of the answer's data,
// which the kernel does not look at, and above it the argument that tells, from 1.
const (
	retNotice  = 0x7fc00000
	retAction  = 0xffff0000
	noticeWord = 0xff
	tellShift  = 8
)

// Noticing is Program, but refusals of interest ask the listener of the filter
// (seccomp_unotify(2)), which is to answer what Judge says. Without a listener
// the kernel answers ENOSYS. Plain makes the one of the other.
func Noticing(p Profile, a Arch) ([]byte, error) {
	return Filter{Profile: p, Arch: a, Notice: true}.Program()
}

// Plain is a program of Noticing with the refusals as the kernel's own: the answers
// are the same, and nobody is asked. The C program that installs filters does so too.
func Plain(program []byte) []byte {
	out := slices.Clone(program)
	for b := out; len(b) >= 8; b = b[8:] {
		k := binary.LittleEndian.Uint32(b[4:])
		if binary.LittleEndian.Uint16(b) == opRet && k&retAction == retNotice {
			binary.LittleEndian.PutUint32(b[4:], retErrno|k&noticeWord)
		}
	}
	return out
}

// Notice is what a filter with notice says about one call.
type Notice struct {
	Errno  int // to answer; never 0
	Arg    int // the argument that says what was wanted; -1: none does
	Clause int // of the filter: calls with the same one are refused for the same reason
}

// Judge runs a program of Noticing on a call that its listener was asked about.
// Anything else than a refusal of interest is Internal: answer EPERM.
func Judge(program []byte, arch, nr uint32, args [6]uint64) (Notice, error) {
	bad := func(pc int, why string) (Notice, error) {
		return Notice{Errno: int(ePERM), Arg: -1, Clause: pc}, dsec.Errorf(dsec.Internal, "judge system call", strconv.Itoa(int(nr)), "%s at instruction %d", why, pc)
	}
	var a uint32
	for pc := 0; pc >= 0 && pc < len(program)/8; pc++ {
		b := program[8*pc:]
		in := instruction{binary.LittleEndian.Uint16(b), b[2], b[3], binary.LittleEndian.Uint32(b[4:])}
		skip, is := uint32(in.jf), false
		switch in.code {
		case opLoad:
			var ok bool
			if a, ok = word(in.k, arch, nr, args); !ok {
				return bad(pc, "a load from elsewhere")
			}
			continue
		case opAnd:
			a &= in.k
			continue
		case opJump:
			skip = in.k
		case opIfEq:
			is = a == in.k
		case opIfGe:
			is = a >= in.k
		case opIfAny:
			is = a&in.k != 0
		case opRet:
			if in.k&retAction != retNotice || in.k&noticeWord == 0 {
				return bad(pc, "another answer")
			}
			return Notice{Errno: int(in.k & noticeWord), Arg: int(in.k>>tellShift&7) - 1, Clause: pc}, nil
		default:
			return bad(pc, "an unknown instruction")
		}
		if is {
			skip = uint32(in.jt)
		}
		if skip > uint32(len(program)) {
			return bad(pc, "a jump too far")
		}
		pc += int(skip)
	}
	return bad(len(program)/8, "no answer")
}

// word is 32 bits of struct seccomp_data.
func word(at, arch, nr uint32, args [6]uint64) (uint32, bool) {
	switch {
	case at == atNumber:
		return nr, true
	case at == atArch:
		return arch, true
	case at >= atArgs && at < atArgs+8*6 && at%4 == 0:
		return uint32(args[(at-atArgs)/8] >> (8 * (at % 8))), true
	}
	return 0, false
}
