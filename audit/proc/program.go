package proc

import (
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
)

const (
	mostStarts   = 2000 // of a sandbox in a second that are told
	mostSubjects = 1 << 16
	ringBytes    = 1 << 20
)

// Offsets in the value of a subject.
const (
	atSince  = 0  // when its second began
	atCount  = 8  // starts in it
	atMissed = 16 // starts that were not told, ever

	subjectSize = 24
)

// Offsets on the stack: started, and the key.
const (
	atStarted = -64
	atKey     = atStarted + 48 // which is in it
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

// program tells the ring of each start of a process whose uid is in the range of a subject:
//
//	R6 uid, later the time; R7 uid and gid; R9 the subject
func program(base uint32, subjects, ring *ebpf.Map) *ebpf.ProgramSpec {
	p := asm.Instructions{
		asm.FnGetCurrentUidGid.Call(),
		asm.Mov.Reg(asm.R7, asm.R0),
		asm.Mov.Reg32(asm.R6, asm.R0),
		asm.LoadImm(asm.R1, int64(base), asm.DWord),
		asm.JLT.Reg(asm.R6, asm.R1, "exit"),
		asm.Sub.Reg(asm.R6, asm.R1),
		asm.RSh.Imm(asm.R6, idsOf),
		asm.StoreMem(asm.RFP, atKey, asm.R6, asm.Word),
		asm.Mov.Imm(asm.R1, 0),
		asm.StoreMem(asm.RFP, atKey+4, asm.R1, asm.Word),
		asm.LoadMapPtr(asm.R1, subjects.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, atKey),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "exit"),
		asm.Mov.Reg(asm.R9, asm.R0),
		asm.FnKtimeGetNs.Call(),
		asm.Mov.Reg(asm.R6, asm.R0),
		asm.StoreMem(asm.RFP, atStarted, asm.R0, asm.DWord),
	}
	addMissed := asm.StoreXAdd(asm.R9, asm.R1, asm.DWord)
	addMissed.Offset = atMissed
	p = append(p, limit()...)
	p = append(p, asm.FnGetCurrentPidTgid.Call(), asm.StoreMem(asm.RFP, atStarted+8, asm.R0, asm.DWord),
		asm.StoreMem(asm.RFP, atStarted+16, asm.R7, asm.DWord),
		asm.FnGetCurrentCgroupId.Call(), asm.StoreMem(asm.RFP, atStarted+24, asm.R0, asm.DWord),
		asm.Mov.Reg(asm.R1, asm.RFP), asm.Add.Imm(asm.R1, atStarted+32), asm.Mov.Imm(asm.R2, 16), asm.FnGetCurrentComm.Call(),
		asm.LoadMapPtr(asm.R1, ring.FD()), asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, atStarted),
		asm.Mov.Imm(asm.R3, startedSize), asm.Mov.Imm(asm.R4, 0), asm.FnRingbufOutput.Call(),
		asm.JEq.Imm(asm.R0, 0, "exit"),
		asm.Mov.Imm(asm.R1, 1).WithSymbol("missed"),
		addMissed,
		asm.Mov.Imm(asm.R0, 0).WithSymbol("exit"), asm.Return())
	return &ebpf.ProgramSpec{Name: "dsec_exec", Type: ebpf.RawTracepoint, Instructions: p, License: "MIT"}
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
