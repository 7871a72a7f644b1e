package audit

import (
	"context"

	"github.com/opendsec/dsec"
)

// Judge looks for reward hacks in what is known of a sandbox. It changes nothing and may be
// called by several at one time.
type Judge interface {
	// Judge gives a finding of each class of which there is any sign. It errs with Invalid for
	// a task that says what cannot be, and ends early when ctx does: how long it takes is up to
	// the patterns of who asks and the paths that the sandbox made.
	Judge(ctx context.Context, task dsec.HackTask, k Known) ([]dsec.HackFinding, error)
	// Event is how a finding is told to those who follow the sandbox.
	Event(f dsec.HackFinding) dsec.Event
}

// Known is what is known of a sandbox, in the order of time.
type Known struct {
	Records []dsec.AuditRecord
	Events  []dsec.Event
	End     *dsec.Result // nil: it has not ended
	Pids    int64        // limit of processes
}
