package microvm

import (
	"context"
	"fmt"
	"os/exec"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
)

// Probe boots a machine.
func (r *Runtime) Probe(ctx context.Context) runtime.Report {
	rep := runtime.Report{Tier: dsec.TierMicroVM, OK: true}
	add := func(name string, err error, detail string) {
		c := runtime.Check{Name: name, OK: err == nil, Detail: detail, Fatal: true}
		if err != nil {
			c.Detail, rep.OK = err.Error(), false
		}
		rep.Checks = append(rep.Checks, c)
	}
	_, err := exec.LookPath("mkfs.ext4")
	add("disks", err, "ext4 in a sparse file of "+r.disks.Mechanism())
	m, err := r.open(ctx)
	if err != nil {
		add("virtual machines", err, "")
		return rep
	}
	r.mu.Lock()
	caps := r.caps
	r.mu.Unlock()
	accel := caps.Accel
	if caps.NoKVM != "" {
		accel = caps.Accel + ", because " + caps.NoKVM
	}
	add("virtual machines", nil, fmt.Sprintf("%s, Linux %s, %s", caps.Version, m.Release, accel))
	began := time.Now()
	err = r.tryMachine(ctx, m)
	add("boot", err, fmt.Sprintf("a clone of a template answered in %d ms", time.Since(began).Milliseconds()))
	return rep
}

// tryMachine has a clone answer.
func (r *Runtime) tryMachine(ctx context.Context, m Machinery) error {
	t, err := m.VMM.BuildTemplate(ctx, probeShape(m), ready)
	if err != nil {
		return err
	}
	vm, err := m.VMM.Clone(ctx, t, vmm.Devices{})
	if err != nil {
		return err
	}
	defer vm.Kill()
	return ready(ctx, vm.Channel())
}
