package cgroup

import (
	"os"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// The device wall of v2 is a program on the group. Programs on groups above
// are asked as well, and every one must agree.

// Bits and offsets of struct bpf_cgroup_dev_ctx.
const (
	devBlock = 1
	devChar  = 2
	accMknod = 1
	accRead  = 2
	accWrite = 4

	ctxAccess = 0 // type in the low, access in the high 16 bits
	ctxMajor  = 4
	ctxMinor  = 8
)

// wallProgram compiles an allow-list: 1 if a line allows all of the asked
// access, else 0.
func wallProgram(list []Device) asm.Instructions {
	p := asm.Instructions{
		asm.LoadMem(asm.R2, asm.R1, ctxAccess, asm.Word),
		asm.Mov.Reg(asm.R3, asm.R2),
		asm.And.Imm(asm.R2, 0xffff),
		asm.RSh.Imm(asm.R3, 16),
		asm.LoadMem(asm.R4, asm.R1, ctxMajor, asm.Word),
		asm.LoadMem(asm.R5, asm.R1, ctxMinor, asm.Word),
	}
	for i, d := range list {
		next := "next" + string(rune('A'+i%26)) + strings.Repeat("x", i/26)
		kind, allowed := int32(devChar), int32(0)
		if d.Block {
			kind = devBlock
		}
		for bit, letter := range map[int32]string{accMknod: "m", accRead: "r", accWrite: "w"} {
			if strings.Contains(d.Access, letter) {
				allowed |= bit
			}
		}
		p = append(p,
			asm.JNE.Imm(asm.R2, kind, next),
			asm.JNE.Imm(asm.R4, int32(d.Major), next))
		if d.Minor >= 0 {
			p = append(p, asm.JNE.Imm(asm.R5, int32(d.Minor), next))
		}
		p = append(p,
			asm.Mov.Reg(asm.R0, asm.R3),
			asm.And.Imm(asm.R0, ^allowed),
			asm.JNE.Imm(asm.R0, 0, next),
			asm.Mov.Imm(asm.R0, 1),
			asm.Return(),
			// A label needs an instruction; this one is also the answer if nothing follows.
			asm.Mov.Imm(asm.R0, 0).WithSymbol(next))
	}
	return append(p, asm.Mov.Imm(asm.R0, 0), asm.Return())
}

// attachWall puts the program of an allow-list on a v2 group. It stays there
// until the group is removed, also when this process ends.
func (r *Root) attachWall(name string, list []Device) error {
	if list == nil {
		return nil
	}
	prog, err := r.wall(list)
	if err != nil {
		return err
	}
	d, err := r.unified.open(name, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }()
	err = link.RawAttachProgram(link.RawAttachProgramOptions{
		Target: int(d.Fd()), Program: prog, Attach: ebpf.AttachCGroupDevice, Flags: unix.BPF_F_ALLOW_MULTI})
	if err != nil {
		return &os.PathError{Op: "attach device program to", Path: d.Name(), Err: err}
	}
	return nil
}

// wall loads the program of a list once.
func (r *Root) wall(list []Device) (*ebpf.Program, error) {
	key := devicesGroup(list)
	r.mu.Lock()
	defer r.mu.Unlock()
	if p := r.walls[key]; p != nil {
		return p, nil
	}
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "dsec_devices", Type: ebpf.CGroupDevice,
		AttachType: ebpf.AttachCGroupDevice, Instructions: wallProgram(list), License: "MIT"})
	if err != nil {
		return nil, &os.PathError{Op: "load", Path: "device program", Err: err}
	}
	r.walls[key] = p
	return p, nil
}
