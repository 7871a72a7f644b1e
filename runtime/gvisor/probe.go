package gvisor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image/erofs"
	"github.com/opendsec/dsec/internal/lifecycle"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/runtime"
)

// Probe says what is used. Nothing in it is fatal: containers work without.
func (r *Runtime) Probe(ctx context.Context) runtime.Report {
	rep := runtime.Report{Tier: dsec.TierContainer, OK: true}
	if r.missing != nil {
		rep.OK, rep.Checks = false, []runtime.Check{{Name: "gvisor runsc", Detail: r.missing.Error()}}
		return rep
	}
	for _, c := range []func(context.Context) runtime.Check{r.probeRunsc, r.probeKernel, r.probeSentry} {
		check := c(ctx)
		check.Name = "gvisor " + check.Name
		rep.Checks = append(rep.Checks, check)
		rep.OK = rep.OK && check.OK
	}
	return rep
}

func (r *Runtime) probeRunsc(context.Context) runtime.Check {
	return runtime.Check{Name: "runsc", OK: true, Detail: fmt.Sprintf("%s, version %s, sha256:%s", r.cfg.Runsc, r.runsc.version, r.runsc.digest)}
}

// probeKernel: a disk of the pool is in no mount namespace, and is mounted again.
func (r *Runtime) probeKernel(context.Context) runtime.Check {
	v := linux.Kernel()
	return runtime.Check{Name: "kernel", OK: v.AtLeast(6, 15), Detail: fmt.Sprintf("Linux %v; mounts of mounts that are nowhere need 6.15", v)}
}

// usable says why no sandbox can be made here. That one could be is found out once; that
// none can, whenever somebody asks.
func (r *Runtime) usable(ctx context.Context) error {
	if r.missing != nil {
		return r.missing
	}
	r.tried.Lock()
	defer r.tried.Unlock()
	if r.works {
		return nil
	}
	err := r.TrySentry(ctx)
	r.works = err == nil
	return err
}

// probeSentry starts a sandbox of nothing and takes it down.
func (r *Runtime) probeSentry(ctx context.Context) runtime.Check {
	c := runtime.Check{Name: "sentry"}
	began := time.Now()
	if err := r.TrySentry(ctx); err != nil {
		c.Detail = err.Error()
		return c
	}
	c.OK, c.Detail = true, fmt.Sprintf("platform systrap; one was started and ended in %v", time.Since(began).Round(time.Millisecond))
	return c
}

// TrySentry starts a sandbox of an empty image and takes it down: that runsc is there, and
// says what it is, proves nothing.
func (r *Runtime) TrySentry(ctx context.Context) (err error) {
	const op = "try gvisor"
	if err := r.images.empty(); err != nil {
		return err
	}
	sb := r.boxes.Reserve(dsec.NewSandboxID("probe"))
	if err := sb.Enter(ctx, op); err != nil {
		return err
	}
	defer sb.Leave()
	defer func() {
		dctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lifecycle.UndoLimit)
		defer cancel()
		err = errors.Join(err, r.remove(dctx, sb))
	}()
	spec := dsec.Spec{Limits: dsec.Limits{CPU: 1, Memory: 64 << 20, Pids: 64, Disk: 16 << 20}}
	b := &build{r: r, sb: sb, name: name(sb.ID), quiet: true,
		rec: &record{Request: runtime.Request{ID: sb.ID, Spec: spec}, Image: emptyImage, Begun: time.Now().UTC(), Starts: 1}}
	defer b.close()
	_, err = lifecycle.Run(ctx, "gvisor.probe", append([]lifecycle.Step{b.state(), b.disk()}, b.instance()...)...)
	if err != nil {
		return dsec.E(dsec.Unsupported, op, r.cfg.Runsc, err)
	}
	return nil
}

// emptyImage is the image of a sandbox in which nothing is to be run.
const emptyImage = "empty"

// empty makes it.
func (s *Images) empty() error {
	dir := filepath.Join(s.dir, emptyImage)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return dsec.E(dsec.Internal, "make image", emptyImage, err)
	}
	f, err := os.Create(filepath.Join(dir, imageFile))
	if err != nil {
		return dsec.E(dsec.Internal, "make image", emptyImage, err)
	}
	defer f.Close()
	if _, err := erofs.WriteFlat(f, erofs.NewDir(0o755), nil); err != nil {
		return dsec.E(dsec.Internal, "make image", emptyImage, err)
	}
	return nil
}
