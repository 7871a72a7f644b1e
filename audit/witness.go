package audit

import (
	"context"
	"os"

	"github.com/opendsec/dsec"
)

// Subject is a sandbox that a witness looks at.
type Subject struct {
	ID    dsec.SandboxID
	UID   uint32   // first of its 65,536 uids and gids, as the machine counts them
	Root  *os.File // something in its root mount; only used during the call
	Disk  *os.File // the directory with its upper; only used during the call. nil: it has none
	Watch []string // patterns beyond those that are always watched
}

// Keeper stores descriptors by name beyond the life of this process.
type Keeper interface {
	// Get returns a new descriptor, or NotFound.
	Get(ctx context.Context, name string) (*os.File, error)
	// Put stores a duplicate of f.
	Put(ctx context.Context, name string, f *os.File) error
	// Drop forgets it; unknown names are no error.
	Drop(ctx context.Context, name string) error
}

// Witness sees what sandboxes do.
type Witness interface {
	// Add begins, or with adopted goes on, to look at a sandbox. What it did before that is not seen.
	Add(ctx context.Context, s Subject, adopted bool) error
	// Remove ends that. The disk, if it is there, is compared with what was told;
	// nothing of the sandbox runs any more. Unknown ids are no error.
	Remove(ctx context.Context, id dsec.SandboxID, disk *os.File)
}

// CommandWitness is a Witness that wants to know of commands what it cannot ask of those
// that have ended.
type CommandWitness interface {
	// Command says which command a control group, by its number, was made for.
	Command(group uint64, exec string)
}

// Witnesses are several that are one.
type Witnesses []Witness

// Add implements Witness. All are asked; the first error counts.
func (w Witnesses) Add(ctx context.Context, s Subject, adopted bool) (first error) {
	for _, x := range w {
		if err := x.Add(ctx, s, adopted); err != nil && first == nil {
			first = err
		}
	}
	return first
}

// Remove implements Witness.
func (w Witnesses) Remove(ctx context.Context, id dsec.SandboxID, disk *os.File) {
	for _, x := range w {
		x.Remove(ctx, id, disk)
	}
}

// Command implements CommandWitness.
func (w Witnesses) Command(group uint64, exec string) {
	for _, x := range w {
		if c, ok := x.(CommandWitness); ok {
			c.Command(group, exec)
		}
	}
}
