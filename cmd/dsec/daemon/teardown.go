package daemon

import (
	"context"
	"errors"
	"os"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/internal/hold"
	"github.com/opendsec/dsec/internal/lifecycle"
)

// teardown ends a machine for good: every sandbox, the network, the hold. What is on disk stays.
func (m *machine) teardown(ctx context.Context, s *settings, stack *lifecycle.Stack) error {
	var errs []error
	list, err := m.tier.List(ctx)
	errs = append(errs, err)
	for _, st := range list {
		errs = append(errs, m.tier.Destroy(ctx, st.ID))
	}
	if m.network != nil {
		errs = append(errs, m.network.Remove(ctx))
	}
	return errors.Join(append(errs, stack.Close(ctx), endHold(ctx, s))...)
}

// removeGroups removes every control group of a machine whose hold has ended.
func removeGroups(ctx context.Context, s *settings) error {
	groups, err := cgroup.Open(s.cgroupName())
	if err != nil {
		return err
	}
	return groups.RemoveAll(ctx)
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
	if err := c.Shutdown(ctx); err != nil {
		return errors.Join(err, c.Close())
	}
	<-c.Done()
	_ = os.Remove(s.holdSocket())
	return c.Close()
}
