package container

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	goruntime "runtime"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/confine"
	"github.com/opendsec/dsec/internal/accounts"
	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/internal/diskpool"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/runtime"
)

// Probe tries what the tier needs.
func (r *Runtime) Probe(ctx context.Context) runtime.Report {
	rep := runtime.Report{Tier: dsec.TierContainer, OK: true}
	for _, c := range []func(context.Context) runtime.Check{r.probeKernel, r.probeUserNS, r.probePlan, r.probeErofs, r.probeDisk,
		r.probeCgroup, r.probeSeccomp, r.probeAppArmor, r.probeHold, r.probeNetwork} {
		check := c(ctx)
		rep.Checks = append(rep.Checks, check)
		if check.Fatal && !check.OK {
			rep.OK = false
		}
	}
	return rep
}

func (r *Runtime) probeKernel(context.Context) runtime.Check {
	v := linux.Kernel()
	return runtime.Check{Name: "kernel", OK: v.AtLeast(6, 1), Fatal: true,
		Detail: fmt.Sprintf("Linux %v on %s; 6.1 is the oldest that works", v, goruntime.GOARCH)}
}

// probeUserNS makes a user namespace with a mapping, as every sandbox has.
func (r *Runtime) probeUserNS(ctx context.Context) runtime.Check {
	c := runtime.Check{Name: "user namespaces", Fatal: true}
	cmd := exec.CommandContext(ctx, "/proc/self/exe")
	cmd.Path = "/nonexistent" // the clone is what is tried; nothing is to be run
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: int(r.cfg.UIDBase), Size: accounts.IDs}}
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER, UidMappings: ids, GidMappings: ids}
	err := cmd.Start()
	if c.OK = errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EACCES); c.OK { // it came as far as looking for the program
		c.Detail = fmt.Sprintf("uids from %d, %d for each sandbox, %d sandboxes", r.cfg.UIDBase, accounts.IDs, r.uids.Count())
	} else {
		c.Detail = fmt.Sprintf("%v; look at user.max_user_namespaces", err)
	}
	return c
}

func (r *Runtime) probePlan(context.Context) runtime.Check {
	return runtime.Check{Name: "mount plan", OK: true, Detail: r.mounts.Plan().Name() + " (descriptors need Linux 6.15)"}
}

func (r *Runtime) probeErofs(context.Context) runtime.Check {
	c := runtime.Check{Name: "erofs and overlay", Fatal: true}
	b, err := os.ReadFile("/proc/filesystems")
	if err != nil {
		c.Detail = err.Error()
		return c
	}
	var missing []string
	for _, fs := range []string{"erofs", "overlay"} {
		// A module that is not loaded yet is loaded by asking for it.
		if !strings.Contains(string(b), "\t"+fs+"\n") {
			f := linux.NewFS(fs)
			f.Discard()
			if f.Err() != nil {
				missing = append(missing, fs)
			}
		}
	}
	if c.OK = len(missing) == 0; !c.OK {
		c.Detail = "the kernel has no " + strings.Join(missing, ", ")
		return c
	}
	c.Detail = "images mounted from files"
	if !linux.Kernel().AtLeast(6, 12) {
		c.Detail = "images mounted through loop devices (files need Linux 6.12)"
	}
	return c
}

func (r *Runtime) probeDisk(ctx context.Context) runtime.Check {
	s, err := r.disks.Space(ctx)
	if err != nil {
		return runtime.Check{Name: "disk limit", Detail: err.Error(), Fatal: true}
	}
	return runtime.Check{Name: "disk limit", OK: true, Fatal: true,
		Detail: fmt.Sprintf("%s, %d of %d MiB free: %s", r.disks.Mechanism(), s.Free>>20, s.Size>>20, r.disks.Why())}
}

// DiskFailed implements runtime.DiskWatcher.
func (r *Runtime) DiskFailed(ctx context.Context) error {
	if _, err := r.disks.Space(ctx); errors.Is(err, diskpool.ErrFailed) {
		return err
	}
	return nil
}

// DiskFull implements runtime.DiskWatcher.
func (r *Runtime) DiskFull(ctx context.Context) error {
	s, err := r.disks.Space(ctx)
	if err == nil && s.Free < diskSpare {
		err = dsec.Errorf(dsec.NoSpace, "look at disk pool", r.disks.Mechanism(), "%d MiB are free for all sandboxes", s.Free>>20)
	}
	return err
}

// diskSpare is what file systems keep to themselves, about.
const diskSpare = 64 << 20

func (r *Runtime) probeCgroup(context.Context) runtime.Check {
	wall := "devices by the v1 controller"
	if r.groups.Version() == cgroup.V2 {
		wall = "devices by BPF"
	}
	return runtime.Check{Name: "control groups", OK: true, Fatal: true, Detail: r.groups.Describe() + "; " + wall}
}

func (r *Runtime) probeSeccomp(context.Context) runtime.Check {
	b, err := os.ReadFile("/proc/sys/kernel/seccomp/actions_avail")
	ok := err == nil && strings.Contains(string(b), "errno")
	var names []string
	for _, p := range confine.Profiles {
		name := fmt.Sprintf("%s (%d instructions)", p, len(r.programs[p])/8)
		if confine.Require(p, dsec.TierContainer) != nil {
			name = fmt.Sprintf("not %s (needs %v)", p, confine.Minimum(p))
		} else if _, err := r.profile(string(p)); err != nil {
			name = fmt.Sprintf("not %s (%v)", p, err)
		}
		names = append(names, name)
	}
	detail := "profiles " + strings.Join(names, ", ")
	switch {
	case r.cfg.Refused == nil:
	case strings.Contains(string(b), "user_notif"):
		detail += "; refused calls of interest are told"
	default:
		detail += "; refused calls are not told: the kernel has no user_notif"
	}
	if !ok {
		detail = fmt.Sprintf("the kernel has no seccomp filters: %v", err)
	}
	return runtime.Check{Name: "seccomp", OK: ok, Fatal: true, Detail: detail}
}

func (r *Runtime) probeHold(ctx context.Context) runtime.Check {
	if _, err := r.hold.List(ctx); err != nil {
		return runtime.Check{Name: "hold", Fatal: true, Detail: err.Error()}
	}
	i := r.hold.Info()
	return runtime.Check{Name: "hold", OK: true, Fatal: true, Detail: fmt.Sprintf("%s, protocol %d, since %s", i.Version, i.Protocol, i.Started.Format("2006-01-02 15:04:05"))}
}

func (r *Runtime) probeNetwork(context.Context) runtime.Check {
	if r.cfg.Network == nil {
		return runtime.Check{Name: "network", Detail: "only network \"none\": the node was started without one"}
	}
	return runtime.Check{Name: "network", OK: true, Detail: "none, allow-list and open"}
}
