package fullvm

import (
	"context"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/guest"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
	"github.com/opendsec/dsec/runtime/tier"
)

// sampleTime is how long a guest may take to say what it uses.
const sampleTime = 5 * time.Second

// Stats of a machine; of one that stands, what it used last. Processors and what the machine has of this one's memory are
// measured here, and so is its disk. The rest is what its agent says: the memory of all that runs, the number of
// processes of commands. Of a machine without an agent, or whose agent does not answer, nobody knows that; its memory
// is then what it has of this one's, as far as it is its own.
func (r *Runtime) Stats(ctx context.Context, id dsec.SandboxID) (runtime.Stats, error) {
	const op = "read stats"
	sb, err := r.boxes.Find(op, id)
	if err != nil {
		return runtime.Stats{}, err
	}
	s, err := r.sample(ctx, sb)
	return s, tier.Wrap(op, id, err)
}

func (r *Runtime) sample(ctx context.Context, sb *sandbox) (runtime.Stats, error) {
	sb.Mu.Lock()
	g, rec, vm, c, paused := sb.group, sb.rec, sb.vm, sb.client, sb.rec != nil && sb.rec.Paused
	sb.Mu.Unlock()
	var s runtime.Stats
	if rec == nil {
		return s, dsec.Errorf(dsec.NotFound, "read stats", string(sb.ID), "no such sandbox")
	}
	if rec.Last != nil { // of the starts before
		s = *rec.Last
	}
	l := rec.Request.Spec.Limits
	s.Memory, s.HostMemory, s.Pids, s.MemoryLimit, s.PidsLimit = 0, 0, 0, l.Memory, l.Pids
	if g != nil {
		u, err := g.Stats()
		if err != nil {
			return s, err
		}
		s.CPU, s.Throttled = s.CPU+u.CPU, s.Throttled+u.Throttled
	}
	if vm != nil {
		if paused {
			c = nil
		}
		r.sampleMachine(ctx, sb, vm, c, &s)
	}
	d, err := r.cfg.Disks.Usage(ctx, string(sb.ID))
	s.Disk, s.DiskLimit = d.Used, d.Limit
	return s, err
}

func (r *Runtime) sampleMachine(ctx context.Context, sb *sandbox, vm vmm.Desk, c *guest.Client, s *runtime.Stats) {
	if n, err := vm.Memory(); err == nil { // else it has just ended
		s.HostMemory, s.Memory = n, min(n, s.MemoryLimit)
	}
	if c != nil {
		ctx, cancel := context.WithTimeout(ctx, sampleTime)
		defer cancel()
		if g, err := c.Stats(ctx); err == nil {
			s.Memory, s.MemoryPeak = min(g.Memory, s.MemoryLimit), max(s.MemoryPeak, min(g.MemoryPeak, s.MemoryLimit))
			s.Pids, s.PidsPeak, s.PidsDenied, s.OOMKills = g.Pids, max(s.PidsPeak, g.PidsPeak), s.PidsDenied+g.PidsDenied, s.OOMKills+g.OOMKills
		}
	}
	sb.Mu.Lock()
	sb.peak = max(sb.peak, s.Memory)
	s.MemoryPeak = max(s.MemoryPeak, sb.peak)
	sb.Mu.Unlock()
}
