package hold

import (
	"context"
	"os"
	"strings"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/process"
)

const (
	keptDefault = 1 << 20 // what a Head or Tail of 0 means

	// KeptLeast is what each end of a command's stream keeps in any case, in bytes.
	KeptLeast = 4 << 10
)

// LimitKept lowers what a command may keep of its output to what a limit on the spools of
// its directory leaves. What other commands have is the size of their spools; a limit of 0
// or less is none.
func (c *Client) LimitKept(ctx context.Context, s *ExecSpec, limit int64) error {
	if limit <= 0 {
		return nil
	}
	used, err := spooled(s.Spool)
	if err != nil {
		return dsec.E(dsec.Internal, "measure kept output of sandbox", s.Sandbox, err)
	}
	streams := int64(2)
	if s.Spec.PTY != nil {
		streams = 1
	}
	head, rest := orDefault(s.Spec.Head), orDefault(s.Spec.Tail)
	left := max(limit-used, 0) / streams
	if head+rest <= left {
		return nil
	}
	// Started before under this id, it has what it was given then.
	if p, err := c.Process(ctx, s.Sandbox, s.Spec.ID); err == nil {
		s.Spec.Head, s.Spec.Tail = p.Spec().Head, p.Spec().Tail
		return nil
	}
	s.Spec.Head = max(min(head, left/2), KeptLeast)
	s.Spec.Tail = max(min(rest, left-left/2), KeptLeast)
	return nil
}

// spooled is the size of all spools in a directory.
func spooled(dir string) (n int64, err error) {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		if !strings.HasSuffix(e.Name(), spoolSuffix(process.Stdout)) && !strings.HasSuffix(e.Name(), spoolSuffix(process.Stderr)) {
			continue
		}
		if info, err := e.Info(); err == nil { // else it was released meanwhile
			n += info.Size()
		}
	}
	return n, err
}

func orDefault(n int64) int64 {
	if n == 0 {
		return keptDefault
	}
	return n
}
