package runtimetest

import (
	"context"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
)

// What tests of one tier ask of it beside the suite.

// Outcome is how a command ended, and what is kept of what it wrote.
type Outcome struct {
	process.Result
	Stdout, Stderr string
}

// Try runs a command to its end and releases it.
func Try(r runtime.Execer, id dsec.SandboxID, s process.Spec) (o Outcome, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 3*patience)
	defer cancel()
	p, err := r.Exec(ctx, id, s)
	if err != nil {
		return o, err
	}
	if o.Result, err = p.Wait(ctx); err != nil {
		return o, err
	}
	for _, x := range []struct {
		s    process.Stream
		into *string
	}{{process.Stdout, &o.Stdout}, {process.Stderr, &o.Stderr}} {
		if x.s == process.Stderr && s.PTY != nil {
			continue
		}
		head, rest, _, err := p.Kept(ctx, x.s)
		if err != nil {
			return o, err
		}
		*x.into = string(head) + string(rest)
	}
	return o, p.Release(ctx)
}

// Shell is the spec of a script.
func Shell(script string) process.Spec { return process.Spec{Argv: []string{"/bin/sh", "-c", script}} }

// ExitOf waits for the end of a sandbox that nobody asked for; those of others are put aside.
func ExitOf(t testing.TB, r runtime.Runtime, id dsec.SandboxID) runtime.Exit {
	t.Helper()
	for late := time.After(3 * patience / 2); ; {
		select {
		case x := <-r.Exits():
			if x.ID == id {
				return x
			}
		case <-late:
			t.Fatalf("no exit of %s", id)
		}
	}
}
