package detect

import (
	"context"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

// collect ends a sandbox and reads what is told of it.
func (l *lab) collect(ctx context.Context, id dsec.SandboxID, x *told, began time.Time) error {
	if _, err := l.Stop(ctx, id, dsec.CauseCompleted); err != nil && dsec.ClassOf(err) != dsec.SandboxGone && dsec.ClassOf(err) != dsec.IllegalState {
		return err
	}
	sb, err := l.Get(ctx, id)
	if err != nil {
		return err
	}
	x.Result = sb.Result
	if x.Events, _, err = l.Past(ctx, client.Events{Sandboxes: []dsec.SandboxID{id}}); err != nil {
		return err
	}
	if _, err := l.Delete(ctx, id); err != nil {
		return err
	}
	x.Took = time.Since(began)
	return l.Audit(ctx, id, dsec.AuditFilter{}, func(r dsec.AuditRecord) error {
		x.Records = append(x.Records, r)
		return nil
	})
}
