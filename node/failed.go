package node

import (
	"context"
	"errors"
	"syscall"
	"time"

	"github.com/opendsec/dsec"
)

// buildError says in which part a creation failed.
type buildError struct {
	err  error
	run  bool // in the runtime, not the layers
	kept bool // it is of something that the platform said it keeps
}

func (e *buildError) Error() string { return e.err.Error() }
func (e *buildError) Unwrap() error { return e.err }

// failCreation keeps the record of a creation that failed. What could not be
// undone is tried again until it is.
func (n *Node) failCreation(ctx context.Context, b *box, key []byte, steps []dsec.Step, err error) error {
	if cause := context.Cause(ctx); cause != nil && ctx.Err() != nil && dsec.ClassOf(err) == dsec.Canceled {
		err = dsec.E(dsec.ClassOf(cause), "build", "", cause)
		if errors.Is(cause, ErrClosed) {
			err = dsec.E(dsec.Unavailable, "build", "", cause)
		}
	}
	res := failure(ctx, err)
	change := func(r *record) {
		r.Steps, r.Intent, r.Expires, r.Result = steps, intentDestroy, time.Time{}, r.verdict(res)
		if b.left { // which may be processes
			r.Ended = time.Time{}
		}
	}
	b.applied(change, []dsec.State{dsec.Failed})
	n.ended(b)
	var werr error
	if forget := []op{dropCall(key)}; b.left {
		werr = b.move(nil, forget)
	} else {
		werr = n.bury(b, forget)
	}
	if werr != nil {
		n.cfg.Log.Error("failed creation not written", "sandbox", b.id, "err", werr)
	}
	return dsec.E(dsec.ClassOf(err), "create sandbox", string(b.id), err)
}

// failure finds whose fault a failed creation is; record.verdict has the last word.
func failure(ctx context.Context, err error) *dsec.Result {
	be := &buildError{}
	inBuild := errors.As(err, &be)
	phase := "create"
	if inBuild && !be.run {
		phase = "layers"
	} else if inBuild {
		phase = "runtime"
	}
	by := dsec.InducedByPlatform
	var cause dsec.Cause
	switch class := dsec.ClassOf(err); {
	case errors.Is(context.Cause(ctx), ErrClosed):
		cause = dsec.CauseInfraControlPlane
	case class == dsec.Canceled:
		cause, by = dsec.CauseCancelled, dsec.InducedBySelf
	case class == dsec.Timeout:
		cause = dsec.CauseInfraStartTimeout
	case class == dsec.ResourceExhausted, class == dsec.NoSpace:
		cause = dsec.CauseInfraCapacity
	case phase == "layers" && class == dsec.NotFound && !be.kept:
		cause, by = dsec.CauseTaskImageNotFound, dsec.InducedBySelf
	case phase == "layers" && class != dsec.Invalid:
		cause = dsec.CauseInfraImage
	case errors.Is(err, syscall.EIO): // whatever it led to
		cause = dsec.CauseInfraStartTimeout
	case class == dsec.Invalid, class == dsec.Unsupported:
		cause, by = dsec.CauseTaskInvalid, dsec.InducedBySelf
	case class == dsec.FileNotFound, class == dsec.NotFound, class == dsec.NotADirectory,
		class == dsec.IsADirectory, class == dsec.FileExists, class == dsec.PermissionDenied:
		cause, by = dsec.CauseTaskSetup, dsec.InducedBySelf
	case phase == "create":
		cause = dsec.CauseInfraControlPlane
	default:
		cause = dsec.CauseInfraStartTimeout
	}
	return dsec.NewResult(cause, phase, by, err.Error())
}
