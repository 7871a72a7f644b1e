package container

import (
	"context"
	"hash/fnv"
	"slices"
	"strconv"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/confine"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime/tier"
)

// Uids of services: nothing else runs as one of them in a sandbox with phases.
const (
	serviceUIDs = 64000
	serviceMost = 1000
)

// maxServiceIDs bounds what a record keeps of services, ended ones included.
const maxServiceIDs = 256

func isService(uid uint32) bool { return uid >= serviceUIDs && uid < serviceUIDs+serviceMost }

// serviceUID is that of a service, the same whenever it is asked for.
func serviceUID(exec string) uint32 {
	h := fnv.New32a()
	_, _ = h.Write([]byte(exec))
	return serviceUIDs + h.Sum32()%serviceMost
}

func (r *record) isService(exec string) bool { return slices.Contains(r.Services, exec) }

// noteService writes down that a command is a service, before it is one.
func (r *Runtime) noteService(ctx context.Context, sb *sandbox, exec string) error {
	const op = "start service in sandbox"
	if err := sb.Enter(ctx, op); err != nil {
		return err
	}
	defer sb.Leave()
	rec := sb.record()
	switch {
	case rec == nil || sb.GetPhase() != tier.Running:
		return dsec.Errorf(dsec.SandboxGone, op, string(sb.ID), "the sandbox has ended")
	case rec.isService(exec):
		return nil
	case len(rec.Services) >= maxServiceIDs:
		return dsec.Errorf(dsec.ResourceExhausted, op, string(sb.ID), "%d were started, which is the most", maxServiceIDs)
	case rec.phase() != 0 || sb.isMoving():
		return dsec.Errorf(dsec.IllegalState, op, string(sb.ID), "services are started in the first phase of a sandbox with phases")
	}
	return r.rerecord(sb, func(rec *record) { rec.Services = append(slices.Clone(rec.Services), exec) })
}

// againstServices are the capabilities with which root inside reaches a service that
// runs as somebody else: by a signal, or by becoming that somebody. With no_new_privs
// no setuid program is a way there.
var againstServices = capBits("kill", "setuid", "setgid", "sys_ptrace")

func capBits(names ...string) (c confine.Caps) {
	for _, n := range names {
		c |= 1 << dsec.CapabilityNames[n]
	}
	return c
}

// rightsOf a command: a service has none but to run; who comes after the first phase
// cannot reach the services there are.
func (r *record) rightsOf(sb *sandbox, s process.Spec) (rights, error) {
	g := r.rights()
	if s.Service {
		if r.phase() != 0 || !r.isService(s.ID) {
			return g, dsec.Errorf(dsec.IllegalState, "start service in sandbox", string(sb.ID), "services are started in the first phase of a sandbox with phases")
		}
		uid := strconv.FormatUint(uint64(serviceUID(s.ID)), 10)
		return rights{Phase: dsec.Phase{Name: g.Name, User: uid + ":" + uid, NoNewPrivs: true}, dropped: ^confine.Caps(0), service: true}, nil
	}
	if r.isService(s.ID) { // it would be taken for it, and outlive its phase
		return g, dsec.Errorf(dsec.Conflict, "exec in sandbox", string(sb.ID), "%s is the id of a service", dsec.Quote(s.ID))
	}
	if r.phase() > 0 && len(r.Services) > 0 {
		g.dropped |= againstServices
		g.NoNewPrivs = true
	}
	return g, nil
}
