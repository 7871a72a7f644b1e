package detect

import (
	"context"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

func watch(*dsec.Spec, []string) {}

// collect ends a sandbox and reads what is told of it.
func (l *lab) collect(ctx context.Context, id dsec.SandboxID, x *told, began time.Time) error {
	sb, err := l.Stop(ctx, id, dsec.CauseCompleted)
	if err != nil && dsec.ClassOf(err) != dsec.SandboxGone && dsec.ClassOf(err) != dsec.IllegalState {
		return err
	}
	if sb, err = l.Get(ctx, id); err != nil {
		return err
	}
	x.Result = sb.Result
	if x.Events, _, err = l.Past(ctx, client.Events{Sandboxes: []dsec.SandboxID{id}}); err != nil {
		return err
	}
	x.Took = time.Since(began)
	_, err = l.Delete(ctx, id)
	return err
}
