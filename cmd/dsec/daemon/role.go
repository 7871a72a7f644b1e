package daemon

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec/internal/supervise"
)

// role is what one process of a machine does between its start by up and
// SIGTERM, or the end of up.
type role struct {
	name, short string
	// open starts to serve what the orders say.
	open func(ctx context.Context, o orders, log *slog.Logger) (*serving, error)
}

// serving is a role at work.
type serving struct {
	ended <-chan struct{} // closed when it cannot go on; nil: it always can
	why   error           // after ended
	close func(ctx context.Context) error
}

// verb is the hidden one by which up starts the role.
func (r role) verb() *cobra.Command {
	return &cobra.Command{
		Use: r.name, Short: r.short + " (started by up)", Hidden: true, Args: cobra.NoArgs,
		Example: "  dsec up   # starts it",
		RunE: func(c *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(c.Context(), syscall.SIGTERM)
			defer stop()
			return r.serve(ctx)
		},
	}
}

func (r role) serve(ctx context.Context) error {
	ctx, ready := supervise.Join(ctx)
	o, err := takeOrders()
	if err != nil {
		return err
	}
	log := roleLog(r.name)
	slog.SetDefault(log)
	s, err := r.open(ctx, o, log)
	if err != nil {
		return err
	}
	if err = ready(); err == nil {
		select {
		case <-ctx.Done():
		case <-s.ended:
			err = s.why
		}
	}
	return errors.Join(err, s.close(context.WithoutCancel(ctx)))
}

// roleLog is where the log lines of a role go.
func roleLog(name string) *slog.Logger { return logger(os.Stderr).With("role", name) }
