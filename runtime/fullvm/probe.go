package fullvm

import (
	"context"
	"os"

	"github.com/opendsec/dsec/runtime"
)

// Probe looks for what machines are made of.
func (r *Runtime) Probe(context.Context) runtime.Report {
	rep := runtime.Report{Tier: r.Tier(), OK: true}
	add := func(name string, fatal bool, err error, detail string) {
		c := runtime.Check{Name: name, OK: err == nil, Detail: detail, Fatal: fatal}
		if err != nil {
			c.Detail = err.Error()
			rep.OK = rep.OK && !fatal
		}
		rep.Checks = append(rep.Checks, c)
	}
	add("machines", true, nil, "QEMU, a user and namespaces of its own for each, kept by dsec-hold")
	_, err := os.Stat(r.cfg.BIOS)
	add("firmware bios", true, err, r.cfg.BIOS)
	_, err = os.Stat(r.cfg.UEFI)
	add("firmware uefi", false, err, r.cfg.UEFI+"; its variables live as long as the machine is on")
	add("disk limit", true, nil, r.cfg.Disks.Mechanism())
	add("control groups", true, nil, r.cfg.Groups.Describe())
	return rep
}
