package bpf

import (
	"errors"
	"fmt"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// attach puts both programs on a link of the thread's network namespace, where
// they stay until it goes. Packets from the sandbox come in by it. clsact is first:
// each program that tcx attaches waits for an RCU grace period, 20 ms and more, and
// a sandbox is made in a tenth of that.
func attach(index int, from, to *ebpf.Program) error {
	err := classic(index, from, to)
	if err != nil { // a kernel without sch_ingress or cls_bpf
		if both(index, from, to) == nil {
			return nil
		}
		return fmt.Errorf("judge packets of link %d: %w", index, err)
	}
	return nil
}

func both(index int, from, to *ebpf.Program) error {
	return errors.Join(raw(index, from, ebpf.AttachTCXIngress), raw(index, to, ebpf.AttachTCXEgress))
}

// raw attaches a program instead of those of the same name.
func raw(index int, p *ebpf.Program, at ebpf.AttachType) error {
	before, err := link.QueryPrograms(link.QueryOptions{Target: index, Attach: at})
	if err != nil {
		return err
	}
	info, err := p.Info()
	if err != nil {
		return err
	}
	if id, ok := info.ID(); ok && slices.ContainsFunc(before.Programs, func(b link.AttachedProgram) bool { return b.ID == id }) {
		return nil
	}
	if err := link.RawAttachProgram(link.RawAttachProgramOptions{Target: index, Program: p, Attach: at}); err != nil {
		return err
	}
	for _, b := range before.Programs {
		if err := replaced(index, b.ID, p, at); err != nil {
			return err
		}
	}
	return nil
}

// replaced takes a program away if it is an older one of ours.
func replaced(index int, id ebpf.ProgramID, by *ebpf.Program, at ebpf.AttachType) error {
	old, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return err
	}
	defer func() { _ = old.Close() }()
	was, err := old.Info()
	if err != nil {
		return err
	}
	is, err := by.Info()
	if err != nil || was.Name != is.Name {
		return err
	}
	return link.RawDetachProgram(link.RawDetachProgramOptions{Target: index, Program: old, Attach: at})
}

// classic does it by a queueing discipline without a queue, in which a program of
// ours replaces an older one.
func classic(index int, from, to *ebpf.Program) error {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer h.Close()
	q := netlink.QdiscAttrs{LinkIndex: index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}
	if err := h.QdiscAdd(&netlink.Clsact{QdiscAttrs: q}); err != nil && !errors.Is(err, unix.EEXIST) {
		return err
	}
	for _, f := range []struct {
		p      *ebpf.Program
		parent uint32
	}{{from, netlink.HANDLE_MIN_INGRESS}, {to, netlink.HANDLE_MIN_EGRESS}} {
		if err := h.FilterReplace(&netlink.BpfFilter{FilterAttrs: netlink.FilterAttrs{LinkIndex: index, Parent: f.parent, Handle: 1, Protocol: unix.ETH_P_ALL, Priority: 1},
			Fd: f.p.FD(), Name: "dsec", DirectAction: true}); err != nil {
			return err
		}
	}
	return nil
}
