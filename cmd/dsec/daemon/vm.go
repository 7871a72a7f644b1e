package daemon

import (
	"context"
	"log/slog"

	"github.com/opendsec/dsec/internal/config"
	"github.com/opendsec/dsec/internal/embedded"
	"github.com/opendsec/dsec/internal/lifecycle"
	"github.com/opendsec/dsec/runtime/microvm"
	"github.com/opendsec/dsec/runtime/microvm/boot"
	"github.com/opendsec/dsec/runtime/microvm/qemu"
)

// machineOOM is how willingly the kernel ends a virtual machine when memory is short: as
// willingly as a sandbox's commands.
const machineOOM = 500

// openVMs opens the tier of microVMs. What it lacks is told when a sandbox is asked for, and
// by doctor: no machine needs to have it.
func (m *machine) openVMs(s *settings, log *slog.Logger) lifecycle.Step {
	return lifecycle.Step{Name: "microvm", Do: func(ctx context.Context) (err error) {
		c := microvm.Config{Dir: s.machineDir(), Hold: m.hold, Cgroups: m.groups, Disks: m.disks, Log: log,
			Open: func(ctx context.Context) (microvm.Machinery, error) { return m.openMachinery(ctx, s) }}
		if m.loader != nil {
			c.Devices, c.Complete = m.loader, m.complete
		}
		if m.network != nil {
			c.Network = m.network
		}
		m.vms, err = microvm.Open(ctx, c)
		return err
	}, Undo: func(context.Context) error {
		err := m.vms.Close()
		if m.driver != nil {
			m.driver.Close()
		}
		return err
	}}
}

// openMachinery finds QEMU, and makes a kernel and an initramfs with the agent of guests.
func (m *machine) openMachinery(ctx context.Context, s *settings) (none microvm.Machinery, err error) {
	driver, err := qemu.New(ctx, qemu.Config{Path: s.Node.QEMU, Dir: s.templateDir(), UID: s.machineUID(), UIDs: config.MachineUIDs,
		Keep: &qemu.Keep{Hold: m.hold, Place: microvm.Place(m.groups), OOMScoreAdj: machineOOM}})
	if err != nil {
		return none, err
	}
	defer func() {
		if err != nil {
			driver.Close()
		}
	}()
	agent, err := embedded.Guest()
	if err != nil {
		return none, err
	}
	k, err := boot.Build(ctx, boot.Config{Cache: s.kernelDir(), Init: agent, Modules: microvm.Modules})
	if err != nil {
		return none, err
	}
	out := microvm.Machinery{VMM: driver, Release: k.Release}
	if out.Kernel, err = microvm.FileOf(ctx, k.Image); err != nil {
		return none, err
	}
	if out.Initramfs, err = microvm.FileOf(ctx, k.Initramfs); err != nil {
		return none, err
	}
	m.driver = driver
	return out, nil
}
