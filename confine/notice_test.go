package confine

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestNoticingProgramsAreGolden(t *testing.T) {
	each(t, func(t *testing.T, p Profile, a Arch) {
		prog, err := Noticing(p, a)
		if err != nil {
			t.Fatal(err)
		}
		var b strings.Builder
		for i, in := range decode(t, prog) {
			fmt.Fprintf(&b, "%4d %02x %3d %3d %08x\n", i, in.code, in.jt, in.jf, in.k)
		}
		file := filepath.Join("testdata", string(p)+"-"+string(a)+"-notice.bpf.txt")
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

// A refusal is the same whether it is the kernel's, a listener's or a program's that
// has lost its listener before it was loaded.
func TestNoticingAnswersAsTheProgramItself(t *testing.T) {
	args := interesting()
	each(t, func(t *testing.T, p Profile, a Arch) {
		m := machines()[a]
		plain, err := Program(p, a)
		if err != nil {
			t.Fatal(err)
		}
		prog, err := Noticing(p, a)
		if err != nil {
			t.Fatal(err)
		}
		rules, told := rulesOf(p), 0
		code, asks, stripped := decode(t, plain), decode(t, prog), decode(t, Plain(prog))
		for nr := range m.last + 20 {
			try := args[:1]
			if rules[m.name[nr]].clauses != nil {
				try = args
			}
			for _, v := range try {
				want, _, _ := run(code, m.audit, nr, v)
				got, _, err := run(asks, m.audit, nr, v)
				again, _, _ := run(stripped, m.audit, nr, v)
				n, jerr := Judge(prog, m.audit, nr, v)
				if got&retAction == retNotice {
					told++
					got = retErrno | uint32(n.Errno)
				} else if jerr == nil {
					t.Fatalf("%s(%#x) is judged, and nobody was asked", m.name[nr], v)
				}
				if err != nil || got != want || again != want {
					t.Fatalf("%s(%#x): %#x with notice, %#x without listener, %v; want %#x", m.name[nr], v, got, again, err, want)
				}
			}
		}
		if told < 5 {
			t.Errorf("%d calls are of interest", told)
		}
	})
}

func TestWhatIsOfInterest(t *testing.T) {
	m := machines()[AMD64]
	prog, err := Noticing(Build, AMD64)
	if err != nil {
		t.Fatal(err)
	}
	for call, want := range map[string]struct {
		args [6]uint64
		n    Notice
	}{
		"mount":             {n: Notice{Errno: 1, Arg: -1}},
		"unshare":           {[6]uint64{newUser}, Notice{Errno: 1, Arg: 0}},
		"clone":             {[6]uint64{newUser | 17}, Notice{Errno: 1, Arg: 0}},
		"setns":             {n: Notice{Errno: 1, Arg: 1}},
		"ptrace":            {[6]uint64{16, 1}, Notice{Errno: 1, Arg: 0}},
		"keyctl":            {n: Notice{Errno: 38, Arg: 0}},
		"ioctl":             {[6]uint64{0, 0x5412}, Notice{Errno: 1, Arg: 1}},
		"socket":            {[6]uint64{afPacket, 3}, Notice{Errno: 97, Arg: 0}},
		"open_by_handle_at": {n: Notice{Errno: 1, Arg: -1}},
		"reboot":            {n: Notice{Errno: 1, Arg: 2}},
	} {
		n, err := Judge(prog, m.audit, m.number[call], want.args)
		n.Clause = 0
		if err != nil || n != want.n {
			t.Errorf("%s: %+v %v, want %+v", call, n, err, want.n)
		}
	}
	for call, args := range map[string][6]uint64{"clone3": {}, "io_uring_setup": {}, "userfaultfd": {}, "sync": {}, "read": {}, "kcmp": {},
		"socket": {afInet, sockStream, 262}, "fanotify_init": {}, "adjtimex": {}, "unshare": {0x400}, "personality": {}} {
		if n, err := Judge(prog, m.audit, m.number[call], args); err == nil {
			t.Errorf("%s%v is of interest: %+v", call, args, n)
		}
	}
	if n, err := Judge(prog, m.audit, m.number["socket"], [6]uint64{afNetlink, sockRaw, 9}); err == nil {
		t.Errorf("a socket of the audit is of interest: %+v", n)
	}
}

func TestEveryNameOfInterestIsOfACallThatBuildRefuses(t *testing.T) {
	rules := rulesOf(Build)
	for entry := range strings.FieldsSeq(noticedCalls) {
		name, _, _ := strings.Cut(entry, ":")
		r, ok := rules[name]
		found := !r.otherwise.allow && r.otherwise.notice
		for _, c := range r.clauses {
			found = found || c.action.notice
		}
		if name == "setsockopt" { // Desktop refuses some
			found = ok
		}
		if !found {
			t.Errorf("%s is refused nowhere", name)
		}
	}
}

func FuzzJudge(f *testing.F) {
	prog, err := Noticing(Build, AMD64)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(prog, uint32(auditAMD64), uint32(165), uint64(1))
	f.Add([]byte{5, 0, 0, 0, 255, 255, 255, 255, 6, 0, 0, 0, 1, 0, 0xc0, 0x7f}, uint32(1), uint32(1), uint64(1))
	f.Fuzz(func(t *testing.T, prog []byte, arch, nr uint32, arg uint64) {
		n, err := Judge(prog, arch, nr, [6]uint64{arg, arg, arg})
		if n.Errno <= 0 || n.Errno > noticeWord || n.Arg < -1 || n.Arg > 6 {
			t.Errorf("%+v %v", n, err)
		}
	})
}
