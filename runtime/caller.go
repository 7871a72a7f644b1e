package runtime

import (
	"context"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
)

// Caller makes calls: the function tier.
type Caller interface {
	// Call runs one that is valid and has its defaults, for a project. Whatever the call
	// itself does is a result; an error is about the platform, or about a call that
	// cannot be made as it is. Calls of two projects never meet in a container.
	Call(ctx context.Context, project string, c dsec.Call) (dsec.CallResult, error)
	// Counts says how it is.
	Counts() CallCounts
	// Close ends what waits for calls, and removes it.
	Close() error
}

// CallCounts of a Caller since it was opened.
type CallCounts struct {
	Calls      int64
	Containers int64 // that there are
	Made       int64 // that were made
	Discarded  int64 // that could not be proved clean, or failed
	Waiting    int64 // calls that wait for a container
}

// Source is where a Caller has the layers and the budget of containers from.
type Source interface {
	// Acquire leases the layers of a project's references, see layer.Store.
	Acquire(ctx context.Context, project, lease string, refs []dsec.LayerRef) (layer.Set, error)
	Release(ctx context.Context, lease string) error
	// Admit takes what a container may use out of the budget, until the returned func
	// is called; ResourceExhausted.
	Admit(l dsec.Limits) (give func(), err error)
}
