package qemu

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/fault"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
)

const (
	kvmDevice = "/dev/kvm"
	kvmTime   = 5 * time.Second // a template boots in a tenth of it where KVM works
)

// probed is what a probe found, for one boot of this machine.
type probed struct {
	Format int    `json:"format"`
	BootID string `json:"boot_id"`
	QEMU   string `json:"qemu"`
	Kernel string `json:"kernel"` // digest
	UID    uint32 `json:"uid"`
	NoKVM  string `json:"no_kvm"` // "": it works
}

// Probe boots the guest with KVM, as a template would be, and nothing less: there are
// machines on which the device opens, a virtual machine is made, and no kernel
// gets further than its first second. What was found is kept in kvm.json until the
// machine boots again, or QEMU, its user or the kernel is another.
func (d *Driver) Probe(ctx context.Context, s vmm.Shape, ready vmm.Ready) (vmm.Caps, error) {
	if err := s.Check(); err != nil {
		return vmm.Caps{}, err
	}
	why, err := d.noKVM(ctx, s, ready)
	if err != nil {
		return vmm.Caps{}, err
	}
	c := vmm.Caps{Version: d.version, Accel: kvm}
	if why != "" {
		c.Accel, c.NoKVM = tcg, "no KVM: "+why
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.accel[s.Kernel.SHA256] = c
	return c, nil
}

// noKVM says why there is none, or "".
func (d *Driver) noKVM(ctx context.Context, s vmm.Shape, ready vmm.Ready) (string, error) {
	if d.cfg.NoKVM {
		return "it is switched off", nil
	}
	f, err := os.OpenFile(kvmDevice, os.O_RDWR, 0)
	if err != nil {
		return err.Error(), nil
	}
	_ = f.Close()
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", dsec.E(dsec.Internal, "read", "boot id", err)
	}
	now := probed{Format: format, BootID: strings.TrimSpace(string(id)), QEMU: d.version, Kernel: s.Kernel.SHA256, UID: d.cfg.UID}
	unlock, err := lockFile(ctx, filepath.Join(d.cfg.Dir, "lock"))
	if err != nil {
		return "", err
	}
	defer unlock()
	if err := d.sweep(); err != nil {
		return "", err
	}
	known := d.known()
	for _, k := range known {
		why := k.NoKVM
		k.NoKVM = ""
		if k == now {
			return why, nil
		}
	}
	now.NoKVM, err = d.tryKVM(ctx, s, ready)
	if err != nil {
		return "", err
	}
	if !conclusive(now.NoKVM) {
		return now.NoKVM, nil
	}
	return now.NoKVM, d.remember(append(known, now))
}

// conclusive is what does not change while this machine is up. Who may open the device
// does, and QEMU may have been killed for other reasons.
func conclusive(why string) bool {
	return !strings.Contains(why, "Permission denied") && !strings.Contains(why, "signal: killed")
}

// tryKVM boots the guest. Only what is no answer is an error: the caller went away, or
// the files to boot from are wrong.
func (d *Driver) tryKVM(ctx context.Context, s vmm.Shape, ready vmm.Ready) (string, error) {
	try, cancel := context.WithTimeout(ctx, d.probeTime)
	defer cancel()
	m, err := d.bootTemplate(try, line{accel: kvm, shape: s}, nil)
	if err == nil {
		err = m.settle(try, ready, d.probeTime)
		m.Kill()
	}
	switch {
	case err == nil:
		return "", nil
	case ctx.Err() != nil:
		return "", dsec.E(dsec.ClassOf(ctx.Err()), "probe", kvmDevice, err)
	case dsec.ClassOf(err) == dsec.Corrupt, dsec.ClassOf(err) == dsec.NotFound, dsec.ClassOf(err) == dsec.Invalid:
		return "", err
	case errors.Is(err, context.DeadlineExceeded):
		return "the guest was not ready within " + d.probeTime.String() + ": " + err.Error(), nil
	}
	return err.Error(), nil
}

// known is what earlier probes of this boot found. A file that says nothing
// sensible is none.
func (d *Driver) known() []probed {
	text, err := os.ReadFile(filepath.Join(d.cfg.Dir, "kvm.json"))
	if err != nil || len(text) > maxManifest {
		return nil
	}
	var all, good []probed
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	if dec.Decode(&all) != nil {
		return nil
	}
	id, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	for _, p := range all {
		if p.Format == format && p.BootID == strings.TrimSpace(string(id)) {
			good = append(good, p)
		}
	}
	return good[max(0, len(good)-16):]
}

func (d *Driver) remember(all []probed) error {
	name := filepath.Join(d.cfg.Dir, "kvm.json")
	text, err := json.MarshalIndent(all, "", " ")
	if err != nil {
		return dsec.E(dsec.Internal, "write", name, err)
	}
	f, err := os.CreateTemp(d.cfg.Dir, "tmp-")
	if err != nil {
		return dsec.E(fault.Class(err, dsec.Internal), "write", name, cause(err))
	}
	defer func() { _ = os.Remove(f.Name()) }()
	_, err = f.Write(append(text, '\n'))
	if err := errors.Join(err, f.Sync(), f.Close(), os.Rename(f.Name(), name)); err != nil {
		return dsec.E(fault.Class(err, dsec.Internal), "write", name, err)
	}
	return nil
}
