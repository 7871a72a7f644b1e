package daemon

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/internal/diskpool"
	"github.com/opendsec/dsec/internal/lifecycle"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/fullvm"
	"github.com/opendsec/dsec/runtime/microvm/qemu"
)

// full is what sandboxes of the full VM tier are made of, if this machine can.
type full struct {
	tier   *fullvm.Runtime // nil: it cannot
	why    error           // then
	groups *cgroup.Root
	disks  diskpool.Pool
	driver *qemu.Driver
}

// fullUsers are for QEMUs, below those of sandboxes.
const fullUsers = 8192

func (s *settings) fullDir() string    { return filepath.Join(s.Data, "fullvm") }
func (s *settings) fullGroups() string { return s.cgroupName() + "-fullvm" }

// openFull opens the tier after what it shares with others. That a machine has no QEMU is no error.
func (m *machine) openFull(s *settings, log *slog.Logger) lifecycle.Step {
	f := &m.full
	return lifecycle.Step{Name: "fullvm", Do: func(ctx context.Context) error {
		steps := []lifecycle.Step{
			{Name: "cgroup", Do: func(context.Context) (err error) {
				f.groups, err = cgroup.Open(s.fullGroups())
				return err
			}, Undo: func(context.Context) error { return f.groups.Close() }},
			{Name: "qemu", Do: func(ctx context.Context) (err error) {
				if s.Node.UIDBase < 1<<16+fullUsers {
					return dsec.Errorf(dsec.Unsupported, "open full VM runtime", "node.uid_base", "%d leaves no users for QEMU below it", s.Node.UIDBase)
				}
				f.driver, err = qemu.New(ctx, qemu.Config{Dir: filepath.Join(s.fullDir(), "vm"), UID: s.Node.UIDBase - fullUsers, UIDs: fullUsers / 2,
					Keep: &qemu.Keep{Hold: m.hold, Place: fullvm.Place(f.groups), OOMScoreAdj: 500}})
				return err
			}, Undo: func(context.Context) error { f.driver.Close(); return nil }},
			{Name: "disks", Do: func(ctx context.Context) error {
				size, _, err := poolSize(s)
				if err != nil {
					return err
				}
				f.disks, err = diskpool.Open(ctx, diskpool.Options{Dir: filepath.Join(s.fullDir(), "pool"), Size: size, Keeper: prefixed{m.mounts.Keeper(), "fullvm-"}})
				return err
			}, Undo: func(context.Context) error { return f.disks.Close() }},
			{Name: "runtime", Do: func(ctx context.Context) (err error) {
				f.tier, err = fullvm.Open(ctx, fullvm.Config{Dir: filepath.Join(s.fullDir(), "sandboxes"), Machines: f.driver, Groups: f.groups, Disks: f.disks, Mounts: m.mounts,
					Lost: m.hold.Done(), Since: m.hold.Info().Started, Log: log})
				return err
			}},
		}
		if _, f.why = lifecycle.Run(ctx, "fullvm.open", steps...); f.why == nil {
			return nil
		}
		f.tier = nil
		if ctx.Err() != nil || f.has(s) { // whose sandboxes would be lost
			return f.why
		}
		log.Info("there is no full VM tier on this machine", "why", f.why)
		return nil
	}, Undo: func(context.Context) error {
		if f.tier == nil {
			return nil
		}
		err := f.tier.Close()
		f.driver.Close()
		return errors.Join(err, f.disks.Close(), f.groups.Close())
	}}
}

// has says whether there are sandboxes of the tier.
func (f *full) has(s *settings) bool {
	all, err := os.ReadDir(filepath.Join(s.fullDir(), "sandboxes"))
	return err == nil && len(all) > 0
}

// into adds the tier to those that a node has.
func (f *full) into(all map[dsec.Tier]runtime.Runtime) map[dsec.Tier]runtime.Runtime {
	if f.tier != nil {
		all[dsec.TierFullVM] = f.tier
	}
	return all
}

// reports adds what doctor says of the tier, or why there is none.
func (f *full) reports(ctx context.Context, first runtime.Report) []runtime.Report {
	if f.tier == nil {
		c := runtime.Check{Name: "tier fullvm"}
		if f.why != nil {
			c.Detail = f.why.Error()
		}
		first.Checks = append(first.Checks, c)
		return []runtime.Report{first}
	}
	return []runtime.Report{first, f.tier.Probe(ctx)}
}

// destroyAll removes every sandbox of the tier.
func (f *full) destroyAll(ctx context.Context) error {
	if f.tier == nil {
		return nil
	}
	list, err := f.tier.List(ctx)
	for _, st := range list {
		err = errors.Join(err, f.tier.Destroy(ctx, st.ID))
	}
	return err
}

// prefixed is a Keeper for one of several pools.
type prefixed struct {
	diskpool.Keeper
	prefix string
}

func (p prefixed) Get(ctx context.Context, name string) (*os.File, error) {
	return p.Keeper.Get(ctx, p.prefix+name)
}

func (p prefixed) Put(ctx context.Context, name string, f *os.File) error {
	return p.Keeper.Put(ctx, p.prefix+name, f)
}

func (p prefixed) Drop(ctx context.Context, name string) error {
	return p.Keeper.Drop(ctx, p.prefix+name)
}
