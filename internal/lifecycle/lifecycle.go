// Package lifecycle runs ordered steps that can be undone.
//
// Run does the steps in order and times each. If one errs, or the context
// ends between two, it undoes the done ones in reverse and returns the error,
// joined with those of undoing. A Do that errs has left nothing itself: its own
// Undo is not called. Undoing ignores the cancellation of the context and has a
// limit of its own, UndoLimit, for all steps together.
//
// Around each step are two failpoints, "<op>.<step>.before" and ".after". A
// failure at ".after" undoes the step too.
package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/failpoint"
)

// UndoLimit is how long undoing may take altogether.
const UndoLimit = 10 * time.Second

// Step is one step. Undo may be nil if there is nothing to undo.
type Step struct {
	Name string
	Do   func(ctx context.Context) error
	Undo func(ctx context.Context) error
}

// Run does the steps. The times of the steps that were begun come back also
// with an error.
func Run(ctx context.Context, op string, steps ...Step) ([]dsec.Step, error) {
	_, times, err := run(ctx, op, steps)
	return times, err
}

// Stack is what Open opened.
type Stack struct{ open []Step }

// Open does the steps as Run does and keeps their Undo for Close: the boot list
// of a daemon.
func Open(ctx context.Context, op string, steps ...Step) (*Stack, error) {
	done, _, err := run(ctx, op, steps)
	if err != nil {
		return nil, err
	}
	return &Stack{open: done}, nil
}

// Close undoes everything in reverse, whatever errs on the way, within ctx. A
// second Close does nothing.
func (s *Stack) Close(ctx context.Context) error {
	open := s.open
	s.open = nil
	return undo(ctx, open)
}

func run(ctx context.Context, op string, steps []Step) (done []Step, times []dsec.Step, err error) {
	times = make([]dsec.Step, 0, len(steps))
	completed := false
	defer func() {
		if !completed { // an error, or a panic on its way up
			uctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), UndoLimit)
			defer cancel()
			if uerr := undo(uctx, done); uerr != nil {
				err = errors.Join(err, uerr)
			}
			done = nil
		}
	}()
	for _, s := range steps {
		if err := ctx.Err(); err != nil {
			return done, times, dsec.E(dsec.ClassOf(err), op, s.Name, context.Cause(ctx))
		}
		if err := at(ctx, op, s.Name, "before"); err != nil {
			return done, times, err
		}
		began := time.Now()
		err := s.Do(ctx)
		times = append(times, dsec.Step{Name: s.Name, Took: time.Since(began)})
		if err != nil {
			return done, times, err
		}
		done = append(done, s)
		if err := at(ctx, op, s.Name, "after"); err != nil {
			return done, times, err
		}
	}
	completed = true
	return done, times, nil
}

func undo(ctx context.Context, done []Step) error {
	var errs []error
	for i := len(done) - 1; i >= 0; i-- {
		if done[i].Undo == nil {
			continue
		}
		if err := done[i].Undo(ctx); err != nil {
			errs = append(errs, fmt.Errorf("undo %s: %w", done[i].Name, err))
		}
	}
	return errors.Join(errs...)
}

func at(ctx context.Context, op, step, when string) error {
	if !failpoint.Active() {
		return nil
	}
	return failpoint.Hit(ctx, op+"."+step+"."+when)
}
