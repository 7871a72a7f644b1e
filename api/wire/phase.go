package wire

import (
	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
)

func phases(all []dsec.Phase) (out []*dsecv1.Phase) {
	for _, p := range all {
		q := &dsecv1.Phase{Name: p.Name, Users: p.Users, User: p.User, DropCapabilities: p.DropCapabilities, NoNewPrivs: p.NoNewPrivs,
			Writable: p.Writable, Executables: p.Executables, Hide: p.Hide, Reveal: p.Reveal, ReadOnly: p.ReadOnly, Back: p.Back, EndServices: p.EndServices}
		if p.Network != nil {
			q.Network = &dsecv1.Network{Mode: string(p.Network.Mode), Allow: rules(p.Network.Allow)}
		}
		if l := p.Limits; l != (dsec.PhaseLimits{}) {
			q.Limits = &dsecv1.Limits{Cpu: l.CPU, Memory: l.Memory, Pids: l.Pids}
		}
		out = append(out, q)
	}
	return out
}

func phasesFrom(all []*dsecv1.Phase) (out []dsec.Phase) {
	for _, p := range all {
		q := dsec.Phase{Name: p.GetName(), Users: p.GetUsers(), User: p.GetUser(), DropCapabilities: p.GetDropCapabilities(),
			NoNewPrivs: p.GetNoNewPrivs(), Writable: p.GetWritable(), Executables: p.GetExecutables(), Hide: p.GetHide(),
			Reveal: p.GetReveal(), ReadOnly: p.GetReadOnly(), Back: p.GetBack(), EndServices: p.GetEndServices(),
			Limits: dsec.PhaseLimits{CPU: p.GetLimits().GetCpu(), Memory: p.GetLimits().GetMemory(), Pids: p.GetLimits().GetPids()}}
		if n := p.GetNetwork(); n != nil {
			q.Network = &dsec.NetworkPolicy{Mode: dsec.NetworkMode(n.GetMode()), Allow: rulesFrom(n.GetAllow())}
		}
		out = append(out, q)
	}
	return out
}

// Phase for the wire; nil stays nil.
func Phase(p *dsec.PhaseState) *dsecv1.PhaseState {
	if p == nil {
		return nil
	}
	return &dsecv1.PhaseState{Name: p.Name, Generation: p.Generation, Since: stamp(p.Since), Moving: p.Moving}
}

// PhaseFrom the wire; nil stays nil.
func PhaseFrom(p *dsecv1.PhaseState) *dsec.PhaseState {
	if p == nil {
		return nil
	}
	return &dsec.PhaseState{Name: p.GetName(), Generation: p.GetGeneration(), Since: instant(p.GetSince()), Moving: p.GetMoving()}
}
