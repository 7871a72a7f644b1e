package wire

import (
	"time"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
)

// Spec for the wire.
func Spec(s dsec.Spec) *dsecv1.Spec {
	p := &dsecv1.Spec{
		Name: s.Name, Tier: string(s.Tier), Isolation: string(s.Isolation), Boot: string(s.Boot), Image: string(s.Image), Command: s.Command, Env: s.Env, User: s.User,
		Workdir: s.Workdir, Hostname: s.Hostname, Network: string(s.Network), Profile: s.Profile,
		NoNewPrivs: s.NoNewPrivs, Oom: string(s.OOM), Labels: s.Labels, Watch: s.Watch, CallId: s.CallID, RolloutKey: s.RolloutKey, Checkpoint: s.Checkpoint,
		Limits: limits(s.Limits),
		Lifetimes: &dsecv1.Lifetimes{Idle: seconds(s.Lifetimes.Idle), Lifetime: seconds(s.Lifetimes.Lifetime),
			Retention: seconds(s.Lifetimes.Retention), KeepFailed: seconds(s.Lifetimes.KeepFailed)},
	}
	for _, l := range s.Layers {
		p.Layers = append(p.Layers, string(l))
	}
	p.Phases = phases(s.Phases)
	p.Allow, p.Cutoff, p.MirrorDeny = rules(s.Allow), stamp(s.Cutoff), s.MirrorDeny
	for _, m := range s.Mounts {
		p.Mounts = append(p.Mounts, &dsecv1.HostMount{Source: m.Source, Target: m.Target})
	}
	return p
}

// SpecFrom the wire. An empty tier is the container tier, or that of the checkpoint.
func SpecFrom(p *dsecv1.Spec) dsec.Spec {
	s := dsec.Spec{
		Name: p.GetName(), Tier: dsec.Tier(p.GetTier()), Isolation: dsec.Isolation(p.GetIsolation()), Boot: dsec.Boot(p.GetBoot()), Image: dsec.LayerRef(p.GetImage()), Command: p.GetCommand(),
		Env: p.GetEnv(), User: p.GetUser(), Workdir: p.GetWorkdir(), Hostname: p.GetHostname(),
		Network: dsec.NetworkMode(p.GetNetwork()), Profile: p.GetProfile(), NoNewPrivs: p.GetNoNewPrivs(),
		OOM: dsec.OOMPolicy(p.GetOom()), Labels: p.GetLabels(), Watch: p.GetWatch(), CallID: p.GetCallId(), RolloutKey: p.GetRolloutKey(), Checkpoint: p.GetCheckpoint(),
	}
	if s.Tier == "" && s.Checkpoint == "" {
		s.Tier = dsec.TierContainer
	}
	t := p.GetLifetimes()
	s.Limits = limitsFrom(p.GetLimits())
	s.Lifetimes = dsec.Lifetimes{Idle: duration(t.GetIdle()), Lifetime: duration(t.GetLifetime()),
		Retention: duration(t.GetRetention()), KeepFailed: duration(t.GetKeepFailed())}
	for _, l := range p.GetLayers() {
		s.Layers = append(s.Layers, dsec.LayerRef(l))
	}
	s.Phases = phasesFrom(p.GetPhases())
	s.Allow, s.Cutoff, s.MirrorDeny = rulesFrom(p.GetAllow()), instant(p.GetCutoff()), p.GetMirrorDeny()
	for _, m := range p.GetMounts() {
		s.Mounts = append(s.Mounts, dsec.HostMount{Source: m.GetSource(), Target: m.GetTarget()})
	}
	return s
}

// Result for the wire; nil stays nil.
func Result(r *dsec.Result) *dsecv1.Result {
	if r == nil {
		return nil
	}
	u := r.Usage
	return &dsecv1.Result{
		Outcome: string(r.Outcome), Cause: string(r.Cause), Phase: r.Phase, InducedBy: string(r.InducedBy),
		Evidence: r.Evidence, Retryable: r.Retryable, Mask: r.Mask(),
		Usage: &dsecv1.Usage{Wall: seconds(u.Wall), Cpu: seconds(u.CPU), Throttled: seconds(u.Throttled),
			MemoryPeak: u.MemoryPeak, PidsPeak: u.PidsPeak, DiskUsed: u.DiskUsed, OutputBytes: u.OutputBytes,
			OomKills: u.OOMKills, Starts: int32(u.Starts), ExecsStarted: u.ExecsStarted},
	}
}

// ResultFrom the wire; nil stays nil.
func ResultFrom(p *dsecv1.Result) *dsec.Result {
	if p == nil {
		return nil
	}
	u := p.GetUsage()
	return &dsec.Result{
		Outcome: dsec.Outcome(p.Outcome), Cause: dsec.Cause(p.Cause), Phase: p.Phase,
		InducedBy: dsec.Inducer(p.InducedBy), Evidence: p.Evidence, Retryable: p.Retryable,
		Usage: dsec.Usage{Wall: duration(u.GetWall()), CPU: duration(u.GetCpu()), Throttled: duration(u.GetThrottled()),
			MemoryPeak: u.GetMemoryPeak(), PidsPeak: u.GetPidsPeak(), DiskUsed: u.GetDiskUsed(),
			OutputBytes: u.GetOutputBytes(), OOMKills: u.GetOomKills(), Starts: int(u.GetStarts()),
			ExecsStarted: u.GetExecsStarted()},
	}
}

// Blame for the wire; nil stays nil.
func Blame(b *dsec.Blame) *dsecv1.Blame {
	if b == nil {
		return nil
	}
	return &dsecv1.Blame{Cause: string(b.Cause), Since: stamp(b.Since), Evidence: b.Evidence}
}

// BlameFrom the wire; nil stays nil.
func BlameFrom(p *dsecv1.Blame) *dsec.Blame {
	if p == nil {
		return nil
	}
	return &dsec.Blame{Cause: dsec.Cause(p.GetCause()), Since: instant(p.GetSince()), Evidence: p.GetEvidence()}
}

// Steps for the wire.
func Steps(steps []dsec.Step) []*dsecv1.Step {
	out := make([]*dsecv1.Step, 0, len(steps))
	for _, s := range steps {
		out = append(out, &dsecv1.Step{Name: s.Name, Took: seconds(s.Took)})
	}
	return out
}

// StepsFrom the wire.
func StepsFrom(steps []*dsecv1.Step) []dsec.Step {
	var out []dsec.Step
	for _, s := range steps {
		out = append(out, dsec.Step{Name: s.GetName(), Took: duration(s.GetTook())})
	}
	return out
}

// Event for the wire.
func Event(e dsec.Event) *dsecv1.Event {
	return &dsecv1.Event{Sandbox: string(e.Sandbox), Seq: e.Seq, Time: stamp(e.Time), Type: string(e.Type),
		From: string(e.From), To: string(e.To), Exec: e.Exec, Detail: e.Detail, Fields: e.Fields}
}

// EventFrom the wire.
func EventFrom(p *dsecv1.Event) dsec.Event {
	return dsec.Event{Sandbox: dsec.SandboxID(p.GetSandbox()), Seq: p.GetSeq(), Time: instant(p.GetTime()),
		Type: dsec.EventType(p.GetType()), From: dsec.State(p.GetFrom()), To: dsec.State(p.GetTo()),
		Exec: p.GetExec(), Detail: p.GetDetail(), Fields: p.GetFields()}
}

// States from the wire; an unknown one is Invalid.
func States(names []string) ([]dsec.State, error) {
	var out []dsec.State
next:
	for _, n := range names {
		for _, s := range dsec.States {
			if string(s) == n {
				out = append(out, s)
				continue next
			}
		}
		return nil, dsec.Errorf(dsec.Invalid, "parse state", dsec.Quote(n), "want one of %v", dsec.States)
	}
	return out, nil
}

// Timeout bounds a caller's wait: def if not given, at most most.
func Timeout(s float64, def, most time.Duration) time.Duration {
	d := duration(s)
	if d <= 0 {
		return def
	}
	return min(d, most)
}

func limits(l dsec.Limits) *dsecv1.Limits {
	return &dsecv1.Limits{Cpu: l.CPU, CpuWeight: int32(l.CPUWeight), Memory: l.Memory, Pids: l.Pids, Disk: l.Disk, Output: l.Output, Bandwidth: l.Bandwidth}
}

func limitsFrom(p *dsecv1.Limits) dsec.Limits {
	return dsec.Limits{CPU: p.GetCpu(), CPUWeight: int(p.GetCpuWeight()), Memory: p.GetMemory(), Pids: p.GetPids(), Disk: p.GetDisk(), Output: p.GetOutput(), Bandwidth: p.GetBandwidth()}
}
