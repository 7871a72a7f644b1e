package container

import (
	"context"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/accounts"
	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/internal/hold"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
)

const (
	shmMin = 64 << 20

	// mainID is the command that was asked for with the sandbox.
	mainID = "main"
)

func digests(s layer.Set) []layer.Digest {
	d := make([]layer.Digest, len(s.Layers))
	for i, l := range s.Layers {
		d[i] = l.Digest
	}
	return d
}

// groupLimits translates; a sandbox sees as many CPUs as its quota can fill.
func groupLimits(l dsec.Limits) cgroup.Limits {
	return cgroup.Limits{CPU: l.CPU, Weight: l.CPUWeight, Visible: int(math.Ceil(l.CPU)), Memory: l.Memory, Pids: l.Pids,
		Devices: cgroup.DefaultDevices()}
}

// spawnSpec describes the shell of that name in a group, with the uids from first.
func spawnSpec(name string, g *cgroup.Group, first uint32) hold.SpawnSpec {
	p := g.Paths()
	return hold.SpawnSpec{ID: name, UIDBase: first, GIDBase: first, Count: accounts.IDs, Cgroup: p.Unified, Tasks: p.Tasks,
		Account: hold.Account{OOM: p.OOM, Limit: p.Limit, Peak: p.Peak, Throttle: p.Throttle}}
}

// enter gives PID 1 its root. The sandbox keeps the descriptor of the root to
// read accounts from.
func (b *build) enter(ctx context.Context) error {
	spec := b.rec.Request.Spec
	mounts, err := b.r.hostMounts(spec.Mounts)
	if err != nil {
		return err
	}
	defer func() {
		for _, m := range mounts {
			m.Source.Close()
		}
	}()
	e := hold.EnterSpec{ID: b.rec.group(), Root: b.root, Hostname: hostname(b.sb.ID, spec), Mounts: mounts}
	if b.rec.Shell != "" {
		e.As = string(b.sb.ID)
	}
	err = b.r.hold.Enter(ctx, e)
	if err != nil {
		return err
	}
	b.r.witness(ctx, b.rec, b.root, b.dir, false)
	b.sb.Mu.Lock()
	defer b.sb.Mu.Unlock()
	b.sb.root, b.lives = b.root, true
	b.sb.locale = localeOf(b.root)
	return nil
}

func hostname(id dsec.SandboxID, s dsec.Spec) string {
	if s.Hostname == "" {
		return string(id)
	}
	return dsec.ShortHostname(s.Hostname)
}

// mainProcess is what the sandbox runs: the image's entry point, if it has
// one, with what the caller asked for.
func mainProcess(req runtime.Request) process.Spec {
	return process.Spec{ID: mainID, Main: true, Argv: slices.Concat(req.Layers.Config.Entrypoint, req.Spec.Command)}
}

// signalOf reads the image's stop signal: a number or a name of the usual ones.
func signalOf(s string) int {
	if n, err := strconv.Atoi(s); err == nil && n > 0 && n < 65 {
		return n
	}
	switch strings.TrimPrefix(strings.ToUpper(s), "SIG") {
	case "HUP":
		return 1
	case "INT":
		return 2
	case "QUIT":
		return 3
	case "KILL":
		return 9
	case "USR1":
		return 10
	case "USR2":
		return 12
	}
	return 15
}
