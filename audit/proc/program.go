package proc

import (
	"fmt"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
)

const (
	mostStarts   = 2000 // of a sandbox in a second that are told
	mostSubjects = 1 << 16

	// ringBytes are at least 16,384 starts, as many as when each was 64 bytes: what can be
	// long is told only while less than richBytes wait, and 96 bytes of each from then on.
	ringBytes = 4 << 20
	richBytes = ringBytes / 2
)

// Offsets in the value of a subject.
const (
	atSince  = 0  // when its second began
	atCount  = 8  // starts in it
	atMissed = 16 // starts that were not told, ever

	subjectSize = 24
)

// Offsets on the stack.
const (
	onKey   = -8  // key of a map
	onAsked = -16 // address of the path that was asked for
	onNr    = -24 // a number that was read
)

func subjectsSpec() *ebpf.MapSpec {
	return &ebpf.MapSpec{Name: "dsec_audited", Type: ebpf.Hash, KeySize: 4, ValueSize: subjectSize, MaxEntries: mostSubjects, Flags: 1} // BPF_F_NO_PREALLOC
}

func toldSpec() *ebpf.MapSpec {
	return &ebpf.MapSpec{Name: "dsec_told", Type: ebpf.Hash, KeySize: 4, ValueSize: 8, MaxEntries: mostSubjects, Flags: 1}
}

func ringSpec() *ebpf.MapSpec {
	return &ebpf.MapSpec{Name: "dsec_starts", Type: ebpf.RingBuf, MaxEntries: ringBytes}
}

// scratchSpec is where a CPU puts together what it tells; it goes with the program.
func scratchSpec() *ebpf.MapSpec {
	return &ebpf.MapSpec{Name: "dsec_start", Type: ebpf.PerCPUArray, KeySize: 4, ValueSize: mostStarted, MaxEntries: 1}
}

// maps are what the program works with.
type maps struct{ subjects, ring, scratch *ebpf.Map }

// tracepoint is told of each program when it is started, and everything of it is in place.
const tracepoint = "sched_process_exec"

// program tells the ring of each start of a process whose uid is in the range of a subject.
// Without offsets it tells no more than helpers do, and needs none that is for GPL only.
//
//	R6 uid, then the time, then the bytes after the header; R7 uid and gid, then what is told;
//	R8 the arguments of the tracepoint, then the task; R9 the subject
func program(base uint32, m maps, o *offsets) *ebpf.ProgramSpec {
	p := asm.Instructions{
		asm.Mov.Reg(asm.R8, asm.R1),
		asm.FnGetCurrentUidGid.Call(),
		asm.Mov.Reg(asm.R7, asm.R0),
		asm.Mov.Reg32(asm.R6, asm.R0),
		asm.LoadImm(asm.R1, int64(base), asm.DWord),
		asm.JLT.Reg(asm.R6, asm.R1, "exit"),
		asm.Sub.Reg(asm.R6, asm.R1),
		asm.RSh.Imm(asm.R6, idsOf),
		asm.StoreMem(asm.RFP, onKey, asm.R6, asm.Word),
	}
	p = append(p, lookup(m.subjects)...)
	p = append(p, asm.JEq.Imm(asm.R0, 0, "exit"),
		asm.Mov.Reg(asm.R9, asm.R0),
		asm.FnKtimeGetNs.Call(),
		asm.Mov.Reg(asm.R6, asm.R0))
	p = append(p, limit()...)
	p = append(p, header(m.scratch)...)
	if o != nil {
		p = append(p, o.ids()...)
		p = append(p, o.texts(m.ring)...)
	}
	addMissed := asm.StoreXAdd(asm.R9, asm.R1, asm.DWord)
	addMissed.Offset = atMissed
	p = append(p,
		asm.LoadMapPtr(asm.R1, m.ring.FD()).WithSymbol("send"), asm.Mov.Reg(asm.R2, asm.R7),
		asm.Mov.Reg(asm.R3, asm.R6), asm.Add.Imm(asm.R3, headerSize), asm.Mov.Imm(asm.R4, 0), asm.FnRingbufOutput.Call(),
		asm.JEq.Imm(asm.R0, 0, "exit"),
		asm.Mov.Imm(asm.R1, 1).WithSymbol("missed"),
		addMissed,
		asm.Mov.Imm(asm.R0, 0).WithSymbol("exit"), asm.Return())
	s := &ebpf.ProgramSpec{Name: "dsec_exec", Type: ebpf.RawTracepoint, Instructions: p, License: "MIT"}
	if o != nil { // typed pointers, and reads of a program's memory, the kernel gives to these only
		s.Type, s.AttachType, s.AttachTo, s.License = ebpf.Tracing, ebpf.AttachTraceRawTp, tracepoint, "Dual MIT/GPL"
	}
	return s
}

// lookup finds the value of the key on the stack.
func lookup(m *ebpf.Map) asm.Instructions {
	return asm.Instructions{
		asm.LoadMapPtr(asm.R1, m.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, onKey),
		asm.FnMapLookupElem.Call(),
	}
}

// limit begins another second when one is over, and goes on only within what is told in one.
// Two CPUs at once may count one for two, which costs nobody anything.
func limit() asm.Instructions {
	return asm.Instructions{
		asm.LoadMem(asm.R1, asm.R9, atSince, asm.DWord),
		asm.Mov.Reg(asm.R2, asm.R6),
		asm.Sub.Reg(asm.R2, asm.R1),
		asm.LoadImm(asm.R3, int64(time.Second), asm.DWord),
		asm.JLT.Reg(asm.R2, asm.R3, "same"),
		asm.StoreMem(asm.R9, atSince, asm.R6, asm.DWord),
		asm.Mov.Imm(asm.R1, 0),
		asm.StoreMem(asm.R9, atCount, asm.R1, asm.DWord),
		asm.LoadMem(asm.R1, asm.R9, atCount, asm.DWord).WithSymbol("same"),
		asm.Add.Imm(asm.R1, 1),
		asm.StoreMem(asm.R9, atCount, asm.R1, asm.DWord),
		asm.JGT.Imm(asm.R1, mostStarts, "missed"),
	}
}

// header begins what is told: all of the header is written, so that nothing of an earlier
// start is told again.
func header(scratch *ebpf.Map) asm.Instructions {
	p := asm.Instructions{
		asm.LoadMem(asm.R1, asm.RFP, onKey, asm.Word),
		asm.StoreMem(asm.RFP, onNr, asm.R1, asm.DWord), // for a moment
		asm.Mov.Imm(asm.R1, 0),
		asm.StoreMem(asm.RFP, onKey, asm.R1, asm.Word),
	}
	p = append(p, lookup(scratch)...)
	p = append(p, asm.JEq.Imm(asm.R0, 0, "missed"),
		asm.StoreMem(asm.R0, atIDs, asm.R7, asm.DWord),
		asm.Mov.Reg(asm.R7, asm.R0),
		asm.StoreMem(asm.R7, atTime, asm.R6, asm.DWord),
		asm.LoadMem(asm.R1, asm.RFP, onNr, asm.DWord),
		asm.StoreMem(asm.R7, atRange, asm.R1, asm.DWord), // and no flags
		asm.Mov.Imm(asm.R1, 0))
	for at := int16(atInner); at < headerSize; at += 8 {
		p = append(p, asm.StoreMem(asm.R7, at, asm.R1, asm.DWord))
	}
	return append(p, asm.FnGetCurrentPidTgid.Call(), asm.StoreMem(asm.R7, atPID, asm.R0, asm.DWord),
		asm.FnGetCurrentCgroupId.Call(), asm.StoreMem(asm.R7, atGroup, asm.R0, asm.DWord),
		asm.Mov.Reg(asm.R1, asm.R7), asm.Add.Imm(asm.R1, atName), asm.Mov.Imm(asm.R2, nameSize), asm.FnGetCurrentComm.Call(),
		asm.Mov.Imm(asm.R6, 0))
}

func tell(flag int32) asm.Instructions {
	return asm.Instructions{
		asm.LoadMem(asm.R1, asm.R7, atTold, asm.Word),
		asm.Or.Imm(asm.R1, flag),
		asm.StoreMem(asm.R7, atTold, asm.R1, asm.Word),
	}
}

// follow loads a pointer, and goes elsewhere if it is none.
func follow(from asm.Register, at int16, otherwise string) asm.Instructions {
	return asm.Instructions{asm.LoadMem(asm.R1, from, at, asm.DWord), asm.JEq.Imm(asm.R1, 0, otherwise)}
}

// ids tells the number in the process's own pid namespace, and who its parent is. R8 becomes the task.
func (o *offsets) ids() asm.Instructions {
	p := asm.Instructions{
		asm.LoadMem(asm.R1, asm.R8, 16, asm.DWord), // the third argument: what is started
		asm.LoadMem(asm.R1, asm.R1, o.asked, asm.DWord),
		asm.StoreMem(asm.RFP, onAsked, asm.R1, asm.DWord),
		asm.LoadMem(asm.R8, asm.R8, 0, asm.DWord), // the first: the task
	}
	p = append(p, follow(asm.R8, o.pid, "parent")...)
	p = append(p, o.innermost("own-", "parent")...)
	p = append(p, asm.StoreMem(asm.R7, atInner, asm.R2, asm.Word))
	p = append(p, tell(toldPID)...)

	parent := follow(asm.R8, o.realParent, "texts")
	parent[0] = parent[0].WithSymbol("parent")
	p = append(p, parent...)
	p = append(p, follow(asm.R1, o.leader, "texts")...)
	p = append(p, asm.LoadMem(asm.R2, asm.R1, o.tgid, asm.Word), asm.StoreMem(asm.R7, atParent, asm.R2, asm.Word),
		asm.LoadMem(asm.R3, asm.R1, o.cred, asm.DWord), asm.JEq.Imm(asm.R3, 0, "texts"),
		asm.LoadMem(asm.R2, asm.R3, o.uid, asm.Word), asm.StoreMem(asm.R7, atParentUID, asm.R2, asm.Word))
	p = append(p, follow(asm.R1, o.pid, "texts")...)
	p = append(p, o.innermost("parents-", "texts")...)
	p = append(p, asm.StoreMem(asm.R7, atParentInner, asm.R2, asm.Word))
	return append(p, tell(toldParent)...)
}

// deepest is the level of pid namespaces up to which numbers are told: a sandbox is at 1,
// and containers in it are below.
const deepest = 4

// innermost loads into R2 the number that the pid in R1 has in its own namespace, 0 in ours. Offsets
// must be constants. The number is loaded, or read by a helper where the verifier lets only
// the first of the array be loaded.
func (o *offsets) innermost(prefix, otherwise string) asm.Instructions {
	test := func(level int16) string { return fmt.Sprint(prefix, level) }
	p := asm.Instructions{
		asm.LoadMem(asm.R3, asm.R1, o.level, asm.Word),
		asm.Mov.Imm(asm.R2, 0),
		asm.JEq.Imm(asm.R3, 0, prefix+"done"),
	}
	for level := int16(1); level <= deepest; level++ {
		at := o.numbers + level*o.numberSize + o.number
		p = append(p, asm.JNE.Imm(asm.R3, int32(level), test(level+1)).WithSymbol(test(level)))
		if o.open {
			p = append(p, asm.LoadMem(asm.R2, asm.R1, at, asm.Word), asm.Ja.Label(prefix+"done"))
		} else {
			p = append(p, asm.Add.Imm(asm.R1, int32(at)), asm.Ja.Label(prefix+"read"))
		}
	}
	p = append(p, asm.Ja.Label(otherwise).WithSymbol(test(deepest+1)))
	if !o.open {
		p = append(p, asm.Mov.Reg(asm.R3, asm.R1).WithSymbol(prefix+"read"),
			asm.Mov.Reg(asm.R1, asm.RFP), asm.Add.Imm(asm.R1, onNr), asm.Mov.Imm(asm.R2, 4), asm.FnProbeReadKernel.Call(),
			asm.JNE.Imm(asm.R0, 0, otherwise), asm.LoadMem(asm.R2, asm.RFP, onNr, asm.Word))
	}
	return append(p, asm.Mov.Reg(asm.R2, asm.R2).WithSymbol(prefix+"done"))
}

// texts tells the arguments, and the path that was asked for, from the memory of the new program: the
// kernel has put them there, and nothing of the program has run yet. A page that is not
// there is not waited for.
func (o *offsets) texts(ring *ebpf.Map) asm.Instructions {
	p := asm.Instructions{
		asm.LoadMapPtr(asm.R1, ring.FD()).WithSymbol("texts"), asm.Mov.Imm(asm.R2, 0), asm.FnRingbufQuery.Call(), // BPF_RB_AVAIL_DATA
		asm.JGT.Imm(asm.R0, richBytes, "send"),
	}
	p = append(p, follow(asm.R8, o.mm, "send")...)
	p = append(p, asm.LoadMem(asm.R3, asm.R1, o.argStart, asm.DWord), asm.LoadMem(asm.R2, asm.R1, o.argEnd, asm.DWord),
		asm.JLT.Reg(asm.R2, asm.R3, "asked"),
		asm.Sub.Reg(asm.R2, asm.R3),
		asm.JGT.Imm(asm.R2, mostAll, "asked"),
		asm.StoreMem(asm.R7, atAllArgs, asm.R2, asm.Word),
		asm.Mov.Reg(asm.R6, asm.R2),
		asm.JLE.Imm(asm.R6, mostArgs, "bounded"),
		asm.Mov.Imm(asm.R6, mostArgs),
		asm.Mov.Reg(asm.R1, asm.R7).WithSymbol("bounded"), asm.Add.Imm(asm.R1, headerSize), asm.Mov.Reg(asm.R2, asm.R6), asm.FnProbeReadUser.Call(),
		asm.JEq.Imm(asm.R0, 0, "read"),
		asm.Mov.Imm(asm.R6, 0),
		asm.Ja.Label("asked"),
		asm.StoreMem(asm.R7, atArgs, asm.R6, asm.Word).WithSymbol("read"))
	p = append(p, tell(toldArgs)...)
	p = append(p,
		asm.LoadMem(asm.R3, asm.RFP, onAsked, asm.DWord).WithSymbol("asked"),
		asm.Mov.Reg(asm.R1, asm.R7), asm.Add.Imm(asm.R1, headerSize), asm.Add.Reg(asm.R1, asm.R6), asm.Mov.Imm(asm.R2, mostAsked), asm.FnProbeReadUserStr.Call(),
		asm.JSLE.Imm(asm.R0, 0, "send"), asm.JSGT.Imm(asm.R0, mostAsked, "send"),
		asm.StoreMem(asm.R7, atAsked, asm.R0, asm.Word),
		asm.Add.Reg(asm.R6, asm.R0))
	return append(p, tell(toldAsked)...)
}
