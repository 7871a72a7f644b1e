package bpf

import (
	"errors"
	"fmt"
	"os"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
)

// Offsets in struct bpf_sock_addr.
const (
	sockIP4      = 4
	sockIP6      = 8
	sockPort     = 24
	sockProtocol = 36
)

// Offsets on the stack, below those of the others.
const (
	atGroup = atNamed - 8 // key of groups
	atTry   = atGroup - trySize
)

// Offsets in the part of an event that says who tried.
const (
	tryPID  = eventSize
	tryUID  = eventSize + 4
	tryName = eventSize + 8
	trySize = eventSize + 24
)

// deepest is how far below the root of the machine a sandbox's control group may be.
const deepest = 12

// hook refuses what a program tries to reach before a packet is made. It saves
// nobody from the judgement of packets, which sees more; but only it knows who it
// was, and that program is told at once.
type hook struct {
	name string
	at   ebpf.AttachType
	v6   bool
}

var hooks = []hook{
	{"dsec_connect4", ebpf.AttachCGroupInet4Connect, false},
	{"dsec_connect6", ebpf.AttachCGroupInet6Connect, true},
	{"dsec_sendmsg4", ebpf.AttachCGroupUDP4Sendmsg, false},
	{"dsec_sendmsg6", ebpf.AttachCGroupUDP6Sendmsg, true},
}

// Guard hooks what the control groups below a directory of the v2 tree try, now and
// when nobody runs this code, instead of an earlier version's. Groups that nobody
// has bound are let be.
func (g *Gate) Guard(root *os.File) error {
	for _, h := range hooks {
		p, err := ebpf.NewProgram(h.program(g.maps))
		if err != nil {
			return fmt.Errorf("load %s: %w", h.name, err)
		}
		err = link.RawAttachProgram(link.RawAttachProgramOptions{Target: int(root.Fd()), Program: p, Attach: h.at})
		if err = errors.Join(err, p.Close()); err != nil {
			return fmt.Errorf("attach %s to %s: %w", h.name, root.Name(), err)
		}
	}
	return nil
}

// Bind implements netpolicy.Binder.
func (g *Gate) Bind(index int, group uint64) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	l := g.links[uint32(index)]
	if l == nil {
		return fmt.Errorf("bind control group to link %d: no sandbox has it", index)
	}
	if err := g.maps.Groups.Update(group, uint32(index), ebpf.UpdateAny); err != nil {
		return fmt.Errorf("bind control group to link %d: %w", index, err)
	}
	l.group = group
	return nil
}

// unbind forgets the group of a link, if that is not another's by now.
func (g *Gate) unbind(index uint32, group uint64) error {
	var now uint32
	err := g.maps.Groups.Lookup(group, &now)
	if err == nil && now == index {
		err = g.maps.Groups.Delete(group)
	}
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("forget control group of link %d: %w", index, err)
	}
	return nil
}

// adoptGroups reads which groups are bound. One of a link that is gone goes.
func (g *Gate) adoptGroups() error {
	var group uint64
	var index uint32
	var gone []uint64
	it := g.maps.Groups.Iterate()
	for it.Next(&group, &index) {
		if l := g.links[index]; l != nil {
			l.group = group
		} else {
			gone = append(gone, group)
		}
	}
	err := it.Err()
	for _, group := range gone {
		err = errors.Join(err, g.maps.Groups.Delete(group))
	}
	if err != nil {
		return fmt.Errorf("read control groups: %w", err)
	}
	return nil
}

// program judges what is tried as if it were a packet from the sandbox; its
// registers are those of direction.program.
func (h hook) program(m *Maps) *ebpf.ProgramSpec {
	p := asm.Instructions{asm.Mov.Reg(asm.R6, asm.R1)}
	p = append(p, whose(m)...)
	p = append(p, h.read()...)
	p = append(p, fromSandbox.lookUp(m)...)
	p = append(p, symbol("refuse", count(m, "r", 24, -1))...)
	p = append(p, tell(m)...)
	p = append(p,
		asm.Mov.Imm(asm.R0, 0), asm.Return(),
		asm.Mov.Imm(asm.R0, 1).WithSymbol("open"), asm.Return(),
		asm.Mov.Imm(asm.R0, 1).WithSymbol("named"), asm.Return())
	return &ebpf.ProgramSpec{Name: h.name, Type: ebpf.CGroupSockAddr, AttachType: h.at, Instructions: p, License: "MIT"}
}

// whose finds the link of the group, or of one above, that the program is in.
func whose(m *Maps) (p asm.Instructions) {
	for level := range int32(deepest) {
		p = append(p,
			asm.Mov.Imm(asm.R1, level+1),
			asm.FnGetCurrentAncestorCgroupId.Call(),
			asm.JEq.Imm(asm.R0, 0, "open"),
			asm.StoreMem(asm.RFP, atGroup, asm.R0, asm.DWord),
			asm.LoadMapPtr(asm.R1, m.Groups.FD()),
			asm.Mov.Reg(asm.R2, asm.RFP),
			asm.Add.Imm(asm.R2, atGroup),
			asm.FnMapLookupElem.Call(),
			asm.JNE.Imm(asm.R0, 0, "bound"))
	}
	return append(p,
		asm.Ja.Label("open"),
		asm.LoadMem(asm.R1, asm.R0, 0, asm.Word).WithSymbol("bound"),
		asm.StoreMem(asm.RFP, atLink, asm.R1, asm.Word),
		asm.LoadMapPtr(asm.R1, m.Links.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, atLink),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "open"),
		asm.Mov.Reg(asm.R7, asm.R0))
}

// read takes the target apart, and lets be what stays in the sandbox, and what is
// not IPv4, for which it has no way.
func (h hook) read() (p asm.Instructions) {
	ip := int16(sockIP4)
	if h.v6 { // ::ffff:a.b.c.d
		ip = sockIP6 + 12
		p = append(p,
			asm.LoadMem(asm.R1, asm.R6, sockIP6, asm.Word),
			asm.JNE.Imm(asm.R1, 0, "open"),
			asm.LoadMem(asm.R1, asm.R6, sockIP6+4, asm.Word),
			asm.JNE.Imm(asm.R1, 0, "open"),
			asm.LoadMem(asm.R1, asm.R6, sockIP6+8, asm.Word),
			asm.HostTo(asm.BE, asm.R1, asm.Word),
			asm.JNE.Imm(asm.R1, 0xffff, "open"))
	}
	return append(p,
		asm.LoadMem(asm.R1, asm.R6, ip, asm.Word),
		asm.JEq.Imm(asm.R1, 0, "open"), // itself
		asm.StoreMem(asm.RFP, atIP+ipTarget, asm.R1, asm.Word),
		asm.LoadMem(asm.R2, asm.R7, linkAddr, asm.Word),
		asm.JEq.Reg(asm.R1, asm.R2, "open"),
		asm.HostTo(asm.BE, asm.R1, asm.Word),
		asm.RSh.Imm(asm.R1, 24),
		asm.JEq.Imm(asm.R1, 127, "open"),
		asm.LoadMem(asm.R8, asm.R6, sockProtocol, asm.Word),
		asm.LoadMem(asm.R9, asm.R6, sockPort, asm.Word),
		asm.HostTo(asm.BE, asm.R9, asm.Half))
}

// tell says who has tried what.
func tell(m *Maps) asm.Instructions {
	return asm.Instructions{
		asm.LoadMem(asm.R1, asm.RFP, atLink, asm.Word),
		asm.StoreMem(asm.RFP, atTry, asm.R1, asm.Word),
		asm.LoadMem(asm.R1, asm.RFP, atIP+ipTarget, asm.Word),
		asm.StoreMem(asm.RFP, atTry+4, asm.R1, asm.Word),
		asm.LoadMem(asm.R1, asm.R7, linkGen, asm.DWord),
		asm.StoreMem(asm.RFP, atTry+8, asm.R1, asm.DWord),
		asm.StoreMem(asm.RFP, atTry+16, asm.R9, asm.Word),
		asm.StoreMem(asm.RFP, atTry+20, asm.R8, asm.Word),
		asm.FnGetCurrentPidTgid.Call(),
		asm.RSh.Imm(asm.R0, 32),
		asm.StoreMem(asm.RFP, atTry+tryPID, asm.R0, asm.Word),
		asm.FnGetCurrentUidGid.Call(),
		asm.StoreMem(asm.RFP, atTry+tryUID, asm.R0, asm.Word),
		asm.Mov.Reg(asm.R1, asm.RFP),
		asm.Add.Imm(asm.R1, atTry+tryName),
		asm.Mov.Imm(asm.R2, trySize-tryName),
		asm.FnGetCurrentComm.Call(),
		asm.LoadMapPtr(asm.R1, m.Events.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, atTry),
		asm.Mov.Imm(asm.R3, trySize),
		asm.Mov.Imm(asm.R4, 0),
		asm.FnRingbufOutput.Call(),
	}
}
