package gvisor

import (
	"context"
	"os"

	"github.com/opendsec/dsec/process"
)

const (
	keptDefault = 1 << 20 // what a Head or Tail of 0 means
	keptLeast   = 4 << 10 // what a command keeps in any case
)

// capOutput lowers what a command may keep to what the sandbox's limit leaves.
// What others keep is the size of their spools.
func (r *Runtime) capOutput(ctx context.Context, sb *sandbox, s *process.Spec) {
	limit := sb.record().Request.Spec.Limits.Output
	if limit <= 0 {
		return
	}
	var used int64
	entries, err := os.ReadDir(r.dir(sb.id))
	if err != nil {
		r.log.Warn("measure kept output", "sandbox", sb.id, "err", err)
	}
	for _, e := range entries {
		if info, err := e.Info(); err == nil && e.Name() != stateFile {
			used += info.Size()
		}
	}
	streams := int64(2)
	if s.PTY != nil {
		streams = 1
	}
	head, rest := orDefault(s.Head), orDefault(s.Tail)
	left := max(limit-used, 0) / streams
	if head+rest <= left {
		return
	}
	// Started before under this id, it has what it was given then.
	if p, err := r.hold.Process(ctx, name(sb.id), s.ID); err == nil {
		s.Head, s.Tail = p.Spec().Head, p.Spec().Tail
		return
	}
	s.Head = max(min(head, left/2), keptLeast)
	s.Tail = max(min(rest, left-left/2), keptLeast)
}

func orDefault(n int64) int64 {
	if n == 0 {
		return keptDefault
	}
	return n
}
