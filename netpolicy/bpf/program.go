package bpf

import (
	"fmt"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/opendsec/dsec/netpolicy"
)

// Offsets in struct __sk_buff.
const (
	skbLen      = 0
	skbMark     = 8
	skbProtocol = 16
	skbVLAN     = 20
	skbLink     = 40
)

// Offsets on the stack.
const (
	atLink  = -8  // key of links and counts
	atIP    = -32 // header of 20 bytes
	atPorts = -40
	atPlan  = -56 // key of plans
	atPin   = -64 // key of pins
	atNow   = -72
	atEvent = -72 - eventSize
	atNamed = atEvent - 8 // not 0: a name opens it, and is to be looked for
)

// Offsets in an IPv4 header, and protocols on the wire.
const (
	ipFragment = 6
	ipProtocol = 9
	ipSource   = 12
	ipTarget   = 16
	ipLength   = 20

	etherLength = 14
	etherIPv4   = 0x0008 // as a little-endian machine reads it
	etherARP    = 0x0608

	protoICMP = 1
	protoTCP  = 6
	protoUDP  = 17
)

// laterFragment stands for the port of what has none with it; its first part was
// judged, and without that nothing is put together.
const laterFragment = 0x10000

// prolonged is how long a pin lasts at least after it was used.
const prolonged = 5 * time.Minute

// direction says which end of a packet is the sandbox's.
type direction struct {
	name       string
	own, other int16 // offsets of addresses in the IP header
	port       int16 // of the other, in the ports
	out        bool  // from the sandbox
}

var (
	fromSandbox = direction{"dsec_from", ipSource, ipTarget, 2, true}
	toSandbox   = direction{"dsec_to", ipTarget, ipSource, 0, false}
)

// program judges the packets of one direction:
//
//	R6 the packet, R7 what the link has, R8 the protocol, R9 the other's port
func (d direction) program(m *Maps) *ebpf.ProgramSpec {
	p := asm.Instructions{asm.Mov.Reg(asm.R6, asm.R1)}
	p = append(p, d.read(m)...)
	p = append(p, d.lookUp(m)...)
	p = append(p, d.verdicts(m)...)
	return &ebpf.ProgramSpec{Name: d.name, Type: ebpf.SchedCLS, Instructions: p, License: "MIT"}
}

// read takes the packet apart and lets through what is no matter of a plan.
func (d direction) read(m *Maps) asm.Instructions {
	p := asm.Instructions{
		asm.LoadMem(asm.R2, asm.R6, skbProtocol, asm.Word),
		asm.JEq.Imm(asm.R2, etherARP, "pass"),
		asm.JNE.Imm(asm.R2, etherIPv4, "drop"),
		asm.LoadMem(asm.R2, asm.R6, skbVLAN, asm.Word),
		asm.JNE.Imm(asm.R2, 0, "drop"),
		asm.LoadMem(asm.R2, asm.R6, skbLink, asm.Word),
		asm.StoreMem(asm.RFP, atLink, asm.R2, asm.Word),
		asm.LoadMapPtr(asm.R1, m.Links.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, atLink),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "drop"),
		asm.Mov.Reg(asm.R7, asm.R0),
	}
	p = append(p, load(etherLength, atIP, ipLength)...)
	p = append(p,
		asm.LoadMem(asm.R8, asm.RFP, atIP, asm.Byte),
		asm.Mov.Reg(asm.R1, asm.R8),
		asm.RSh.Imm(asm.R1, 4),
		asm.JNE.Imm(asm.R1, 4, "drop"),
		asm.And.Imm(asm.R8, 0xf),
		asm.LSh.Imm(asm.R8, 2),
		asm.JLT.Imm(asm.R8, ipLength, "drop"),
		asm.Add.Imm(asm.R8, etherLength),
		// Somebody else's address: neither from the sandbox nor for it.
		asm.LoadMem(asm.R1, asm.RFP, atIP+d.own, asm.Word),
		asm.LoadMem(asm.R2, asm.R7, linkAddr, asm.Word),
		asm.JNE.Reg(asm.R1, asm.R2, "drop"),
	)
	if !d.out {
		p = append(p, asm.LoadMem(asm.R1, asm.R6, skbMark, asm.Word), mov32(asm.R2, netpolicy.MarkRouter), asm.JEq.Reg(asm.R1, asm.R2, "pass"))
	}
	return append(p, d.ports()...)
}

// ports puts the protocol into R8, in which the length of the headers is, and
// the other's port into R9.
func (d direction) ports() asm.Instructions {
	p := asm.Instructions{
		asm.LoadMem(asm.R1, asm.RFP, atIP+ipFragment, asm.Half),
		asm.HostTo(asm.BE, asm.R1, asm.Half),
		asm.And.Imm(asm.R1, 0x1fff),
		asm.Mov.Imm(asm.R9, laterFragment),
		asm.Mov.Reg(asm.R2, asm.R8), // where the ports begin
		asm.LoadMem(asm.R8, asm.RFP, atIP+ipProtocol, asm.Byte),
		asm.JNE.Imm(asm.R1, 0, "judge"),
		asm.Mov.Imm(asm.R9, 0),
	}
	if !d.out { // what routers say of packets that were let out
		p = append(p, asm.JEq.Imm(asm.R8, protoICMP, "icmp"))
	}
	p = append(p,
		asm.JEq.Imm(asm.R8, protoTCP, "ports"),
		asm.JNE.Imm(asm.R8, protoUDP, "judge"))
	p = append(p, symbol("ports", loadAt(atPorts, 4))...)
	p = append(p,
		asm.LoadMem(asm.R9, asm.RFP, atPorts+d.port, asm.Half),
		asm.HostTo(asm.BE, asm.R9, asm.Half))
	if d.out {
		return p
	}
	p = append(p, asm.Ja.Label("judge"))
	p = append(p, symbol("icmp", loadAt(atPorts, 1))...)
	return append(p,
		asm.LoadMem(asm.R1, asm.RFP, atPorts, asm.Byte),
		asm.JEq.Imm(asm.R1, 3, "pass"),  // unreachable, with the size that fits
		asm.JEq.Imm(asm.R1, 11, "pass"), // time exceeded
		asm.JEq.Imm(asm.R1, 12, "pass")) // bad parameter
}

// lookUp asks the pins, then the plan.
func (d direction) lookUp(m *Maps) asm.Instructions {
	p := asm.Instructions{
		asm.FnKtimeGetBootNs.Call().WithSymbol("judge"),
		asm.StoreMem(asm.RFP, atNow, asm.R0, asm.DWord),
		asm.StoreImm(asm.RFP, atNamed, 0, asm.Word),
		asm.LoadMem(asm.R1, asm.RFP, atLink, asm.Word),
		asm.StoreMem(asm.RFP, atPin, asm.R1, asm.Word),
		asm.LoadMem(asm.R1, asm.RFP, atIP+d.other, asm.Word),
		asm.StoreMem(asm.RFP, atPin+4, asm.R1, asm.Word),
		asm.StoreMem(asm.RFP, atPlan+8, asm.R1, asm.Word),
		asm.StoreImm(asm.RFP, atPlan, 64, asm.Word),
		asm.LoadMem(asm.R1, asm.R7, linkPlan, asm.Word),
		asm.StoreMem(asm.RFP, atPlan+4, asm.R1, asm.Word),
		asm.LoadMapPtr(asm.R1, m.Pins.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, atPin),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "plan"),
		asm.LoadMem(asm.R1, asm.R0, 0, asm.DWord),
		asm.LoadMem(asm.R2, asm.RFP, atNow, asm.DWord),
		asm.JGT.Reg(asm.R2, asm.R1, "plan"),
	}
	p = append(p, matches("pin", 8, "used", "plan")...)
	p = append(p, d.prolong()...)
	p = append(p,
		asm.LoadMapPtr(asm.R1, m.Plans.FD()).WithSymbol("plan"),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, atPlan),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "unplanned"))
	p = append(p, matches("plan", 0, "open", "unplanned")...)
	return append(p,
		asm.LoadMem(asm.R1, asm.RFP, atNamed, asm.Word).WithSymbol("unplanned"),
		asm.JEq.Imm(asm.R1, 0, "refuse"),
		asm.Ja.Label("named"))
}

// prolong has a pin that is used last: a connection may outlive the time of a name,
// and who answered knows nothing of it.
func (d direction) prolong() asm.Instructions {
	return asm.Instructions{
		asm.LoadMem(asm.R1, asm.R0, 0, asm.DWord).WithSymbol("used"),
		asm.LoadMem(asm.R2, asm.RFP, atNow, asm.DWord),
		mov32(asm.R3, int64(prolonged)),
		asm.Add.Reg(asm.R2, asm.R3),
		asm.JGE.Reg(asm.R1, asm.R2, "pinned"),
		asm.StoreMem(asm.R0, 0, asm.R2, asm.DWord),
		// Where names are said they are looked at, unless a rule of addresses opens it.
		asm.JNE.Imm(asm.R8, protoTCP, "open").WithSymbol("pinned"),
		asm.JEq.Imm(asm.R9, netpolicy.HTTPPort, "says"),
		asm.JNE.Imm(asm.R9, netpolicy.TLSPort, "open"),
		asm.StoreImm(asm.RFP, atNamed, 1, asm.Word).WithSymbol("says"),
	}
}

// matches goes to one place if one of the ranges at R0 has the packet, and to
// another if none has.
func matches(name string, at int16, one, none string) asm.Instructions {
	var p asm.Instructions
	for i := range int16(netpolicy.MaxOpen) {
		next, ports, off := fmt.Sprint(name, "next", i), fmt.Sprint(name, "ports", i), at+i*rangeSize
		if i == netpolicy.MaxOpen-1 {
			next = none
		}
		first := asm.LoadMem(asm.R2, asm.R0, off+2, asm.Half)
		if i > 0 {
			first = first.WithSymbol(fmt.Sprint(name, "next", i-1))
		}
		p = append(p,
			first,
			asm.LoadMem(asm.R3, asm.R0, off+4, asm.Half),
			asm.JGT.Reg(asm.R2, asm.R3, none), // the end of them
			asm.LoadMem(asm.R1, asm.R0, off, asm.Byte),
			asm.JEq.Imm(asm.R1, 0, ports),
			asm.JNE.Reg(asm.R1, asm.R8, next),
			asm.JEq.Imm(asm.R9, laterFragment, one).WithSymbol(ports),
			asm.JLT.Reg(asm.R9, asm.R2, next),
			asm.JLE.Reg(asm.R9, asm.R3, one))
	}
	return append(p, asm.Ja.Label(none))
}

// verdicts are how a program ends.
func (d direction) verdicts(m *Maps) asm.Instructions {
	const pass, drop = 0, 2
	end := func(mark int64, verdict int32) asm.Instructions {
		return asm.Instructions{mov32(asm.R1, mark), asm.StoreMem(asm.R6, skbMark, asm.R1, asm.Word), asm.Mov.Imm(asm.R0, verdict), asm.Return()}
	}
	var p asm.Instructions
	if d.out {
		p = append(p, symbol("open", count(m, "o", 0, 8))...)
		p = append(p, end(netpolicy.MarkOpen, pass)...)
		p = append(p, symbol("named", count(m, "n", 0, 8))...)
		p = append(p, end(netpolicy.MarkName, pass)...)
		p = append(p, symbol("refuse", count(m, "r", 24, -1))...)
		p = append(p, d.event(m)...)
		p = append(p, end(netpolicy.MarkRefused, pass)...) // to be told so
	} else {
		p = append(p, symbol("open", count(m, "o", 16, -1))...)
		p = append(p, asm.Mov.Imm(asm.R0, pass), asm.Return())
		p = append(p, asm.Mov.Imm(asm.R0, drop).WithSymbol("refuse"), asm.Return())
		p = append(p, asm.Mov.Imm(asm.R0, drop).WithSymbol("named"), asm.Return()) // it has gone by who looks at it
	}
	return append(p,
		asm.Mov.Imm(asm.R0, pass).WithSymbol("pass"), asm.Return(),
		asm.Mov.Imm(asm.R0, drop).WithSymbol("drop"), asm.Return())
}

// count adds a packet, and if bytes is not negative its length there.
func count(m *Maps, name string, packets, bytes int16) asm.Instructions {
	p := asm.Instructions{
		asm.LoadMapPtr(asm.R1, m.Counts.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, atLink),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "counted"+name),
		asm.Mov.Imm(asm.R1, 1),
		asm.AddAtomic.Mem(asm.R0, asm.R1, asm.DWord, packets),
	}
	if bytes >= 0 {
		p = append(p, asm.LoadMem(asm.R1, asm.R6, skbLen, asm.Word), asm.AddAtomic.Mem(asm.R0, asm.R1, asm.DWord, bytes))
	}
	return append(p, asm.Mov.Imm(asm.R0, 0).WithSymbol("counted"+name))
}

// event tells of a refusal; if nobody takes them fast enough it is only counted.
func (d direction) event(m *Maps) asm.Instructions {
	return asm.Instructions{
		asm.LoadMem(asm.R1, asm.RFP, atLink, asm.Word),
		asm.StoreMem(asm.RFP, atEvent, asm.R1, asm.Word),
		asm.LoadMem(asm.R1, asm.RFP, atIP+d.other, asm.Word),
		asm.StoreMem(asm.RFP, atEvent+4, asm.R1, asm.Word),
		asm.LoadMem(asm.R1, asm.R7, linkGen, asm.DWord),
		asm.StoreMem(asm.RFP, atEvent+8, asm.R1, asm.DWord),
		asm.StoreMem(asm.RFP, atEvent+16, asm.R9, asm.Word),
		asm.StoreMem(asm.RFP, atEvent+20, asm.R8, asm.Word),
		asm.LoadMapPtr(asm.R1, m.Events.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, atEvent),
		asm.Mov.Imm(asm.R3, eventSize),
		asm.Mov.Imm(asm.R4, 0),
		asm.FnRingbufOutput.Call(),
	}
}

// load copies bytes of the packet to the stack, or drops what is too short.
func load(from int32, to int16, n int32) asm.Instructions {
	return append(asm.Instructions{asm.Mov.Imm(asm.R2, from)}, loadAt(to, n)...)
}

// loadAt is load from where R2 says.
func loadAt(to int16, n int32) asm.Instructions {
	return asm.Instructions{
		asm.Mov.Reg(asm.R1, asm.R6),
		asm.Mov.Reg(asm.R3, asm.RFP),
		asm.Add.Imm(asm.R3, int32(to)),
		asm.Mov.Imm(asm.R4, n),
		asm.FnSkbLoadBytes.Call(),
		asm.JSLT.Imm(asm.R0, 0, "drop"),
	}
}

func symbol(name string, p asm.Instructions) asm.Instructions {
	p[0] = p[0].WithSymbol(name)
	return p
}

// mov32 loads 32 bits without a sign.
func mov32(to asm.Register, v int64) asm.Instruction { return asm.LoadImm(to, v, asm.DWord) }
