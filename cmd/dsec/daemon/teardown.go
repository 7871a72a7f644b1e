package daemon

import (
	"context"
	"errors"
	"os"
	"syscall"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/internal/hold"
	"github.com/opendsec/dsec/internal/lifecycle"
)

// teardown ends a machine for good: every sandbox, the network, the hold. What is on disk stays.
func (m *machine) teardown(ctx context.Context, s *settings, stack *lifecycle.Stack) error {
	var errs []error
	for _, tier := range m.runtimes() {
		list, err := tier.List(ctx)
		errs = append(errs, err)
		for _, st := range list {
			errs = append(errs, tier.Destroy(ctx, st.ID))
		}
	}
	behind, err := m.gvisor.List(ctx)
	errs = append(errs, err)
	for _, st := range behind {
		errs = append(errs, m.gvisor.Destroy(ctx, st.ID))
	}
	errs = append(errs, m.full.destroyAll(ctx))
	if m.network != nil {
		errs = append(errs, m.network.Remove(ctx))
	}
	return errors.Join(append(errs, stack.Close(ctx), endHold(ctx, s))...)
}

// removeGroups removes every control group of a machine whose hold has ended.
func removeGroups(ctx context.Context, s *settings) error {
	var errs []error
	for _, name := range []string{s.cgroupName(), s.fullGroups()} {
		groups, err := cgroup.Open(name)
		if err == nil {
			err = groups.RemoveAll(ctx)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// endHold ends the hold, and with it the last reference to every mount.
func endHold(ctx context.Context, s *settings) error {
	c, err := hold.Dial(ctx, s.holdSocket())
	if dsec.ClassOf(err) == dsec.Unavailable {
		return nil // none runs
	}
	if err != nil {
		return err
	}
	process, err := os.FindProcess(c.Info().PID) // by pidfd
	if err != nil {
		return errors.Join(err, c.Close())
	}
	if err := c.Shutdown(ctx); err != nil {
		return errors.Join(err, c.Close())
	}
	<-c.Done() // it hung up: closing our end says so too
	_ = c.Close()
	if err := waitGone(ctx, process); err != nil {
		return dsec.E(dsec.ClassOf(err), "end hold", s.holdSocket(), err)
	}
	_ = os.Remove(s.holdSocket())
	return nil
}

// waitGone waits for the end of a process that is nobody's child.
func waitGone(ctx context.Context, p *os.Process) error {
	for p.Signal(syscall.Signal(0)) == nil {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(time.Millisecond): // init reaps it at once
		}
	}
	return p.Release()
}

// joinAfter removes what a temporary machine leaves and joins what went wrong.
func joinAfter(ctx context.Context, err error, s *settings, remove func() error) error {
	return errors.Join(err, removeGroups(context.WithoutCancel(ctx), s), remove())
}
