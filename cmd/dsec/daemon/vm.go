package daemon

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/config"
	"github.com/opendsec/dsec/internal/embedded"
	"github.com/opendsec/dsec/internal/lifecycle"
	"github.com/opendsec/dsec/internal/within"
	"github.com/opendsec/dsec/layer"
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
			Open: func(ctx context.Context) (microvm.Machinery, error) { return m.openMachinery(ctx, s) }, Fill: m.fill}
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

// promoted is how long it may take after the last read of a layer until it is plain files.
const promoted = 30 * time.Second

// fill makes a layer whole: a virtual machine maps its files, and nobody could answer if
// something was not there.
func (m *machine) fill(ctx context.Context, l layer.Local) error {
	const op = "bring all data of layer"
	whole, err := l.Whole()
	if err != nil || whole {
		return err
	}
	if m.loader == nil {
		return dsec.Errorf(dsec.Unavailable, op, string(l.Digest), "nobody brings them here")
	}
	d, err := m.loader.Device(ctx, l)
	if err != nil {
		return err
	}
	if d.Mount != nil {
		defer func() { _ = d.Mount.Close() }()
	}
	f, err := os.Open(d.Path)
	if err != nil {
		return dsec.E(dsec.Internal, op, string(l.Digest), err)
	}
	_, err = io.Copy(io.Discard, within.Reader(ctx, io.LimitReader(f, l.DataSize)))
	if err = errors.Join(err, f.Close()); err != nil {
		class := dsec.ClassOf(err)
		if class == dsec.Internal {
			class = dsec.Unavailable
		}
		return dsec.E(class, op, string(l.Digest), err)
	}
	ctx, cancel := context.WithTimeout(ctx, promoted)
	defer cancel()
	for wait := time.Millisecond; ; wait = min(2*wait, 100*time.Millisecond) {
		if whole, err = l.Whole(); err != nil || whole {
			return err
		}
		if err := within.Sleep(ctx, wait); err != nil {
			return dsec.Errorf(dsec.Unavailable, op, string(l.Digest), "they have been read, and are not all kept: %w", err)
		}
	}
}
