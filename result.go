package dsec

import "time"

// Cause says why a sandbox ended; see Owner for whose fault that is.
type Cause string

// The causes: a closed set, shared by the ledger, the wire and libdsec.
const (
	CauseCompleted         Cause = "completed"
	CauseCancelled         Cause = "cancelled"
	CauseAgentError        Cause = "agent_error"
	CauseAgentTimeout      Cause = "agent_timeout"
	CauseAgentDamage       Cause = "agent_damage" // destroyed its own system
	CauseOOM               Cause = "oom"
	CauseDiskFull          Cause = "disk_full"
	CausePidsLimit         Cause = "pids_limit"
	CausePolicyKill        Cause = "policy_kill"
	CauseExpiredIdle       Cause = "expired_idle"
	CauseExpiredLifetime   Cause = "expired_lifetime"
	CausePreempted         Cause = "preempted"
	CauseTaskImageNotFound Cause = "task_image_not_found"
	CauseTaskBuild         Cause = "task_build"
	CauseTaskSetup         Cause = "task_setup"
	CauseTaskInvalid       Cause = "task_invalid"
	CauseGraderError       Cause = "grader_error"
	CauseGraderTimeout     Cause = "grader_timeout"
	CauseInfraNodeLost     Cause = "infra_node_lost"
	CauseInfraImage        Cause = "infra_image"
	CauseInfraDisk         Cause = "infra_disk" // the file system that its disk lies in failed
	CauseInfraStartTimeout Cause = "infra_start_timeout"
	CauseInfraCapacity     Cause = "infra_capacity"
	CauseInfraControlPlane Cause = "infra_control_plane"
	CauseUnknown           Cause = "unknown"
)

// Causes lists every cause.
var Causes = []Cause{CauseCompleted, CauseCancelled, CauseAgentError, CauseAgentTimeout, CauseAgentDamage, CauseOOM,
	CauseDiskFull, CausePidsLimit, CausePolicyKill, CauseExpiredIdle, CauseExpiredLifetime, CausePreempted,
	CauseTaskImageNotFound, CauseTaskBuild, CauseTaskSetup, CauseTaskInvalid, CauseGraderError, CauseGraderTimeout,
	CauseInfraNodeLost, CauseInfraImage, CauseInfraDisk, CauseInfraStartTimeout, CauseInfraCapacity, CauseInfraControlPlane, CauseUnknown}

// Infra reports whether the platform is at fault.
func (c Cause) Infra() bool { return len(c) > 6 && c[:6] == "infra_" }

// Inducer says whose doing led to a cause.
type Inducer string

// The inducers.
const (
	InducedBySelf      Inducer = "self"
	InducedByNeighbour Inducer = "neighbour"
	InducedByPlatform  Inducer = "platform"
	InducedByUnknown   Inducer = "unknown"
)

// Outcome is the coarse answer a table shows.
type Outcome string

// The outcomes.
const (
	OutcomeOK        Outcome = "ok"        // completed or cancelled by its owner
	OutcomeAgent     Outcome = "agent"     // the agent's doing
	OutcomeTask      Outcome = "task"      // the environment or grader is broken
	OutcomeInfra     Outcome = "infra"     // the platform's doing
	OutcomeExpired   Outcome = "expired"   // a lifetime the owner set
	OutcomePreempted Outcome = "preempted" // taken away for something more important
	OutcomeUnknown   Outcome = "unknown"
)

// Outcome derives the coarse answer.
func (c Cause) Outcome() Outcome {
	switch {
	case c == CauseCompleted || c == CauseCancelled:
		return OutcomeOK
	case c.Infra():
		return OutcomeInfra
	case c == CausePreempted:
		return OutcomePreempted
	case c == CauseExpiredIdle || c == CauseExpiredLifetime:
		return OutcomeExpired
	case len(c) > 5 && c[:5] == "task_", c == CauseGraderError, c == CauseGraderTimeout:
		return OutcomeTask
	case c == CauseUnknown || c == "":
		return OutcomeUnknown
	}
	return OutcomeAgent
}

// Usage is what a sandbox consumed until it ended.
type Usage struct {
	Wall         time.Duration `json:"wall"`
	CPU          time.Duration `json:"cpu"`
	Throttled    time.Duration `json:"throttled"`
	MemoryPeak   int64         `json:"memory_peak"`   // bytes
	PidsPeak     int64         `json:"pids_peak"`     // processes and threads
	DiskUsed     int64         `json:"disk_used"`     // bytes in the writable layer at the end
	OutputBytes  int64         `json:"output_bytes"`  // written by execs, kept or not
	OOMKills     int64         `json:"oom_kills"`     // processes killed by the memory limit
	Starts       int           `json:"starts"`        // 1 unless restarted
	ExecsStarted int64         `json:"execs_started"` // commands run
}

// Result is how a sandbox ended and whose fault that was.
type Result struct {
	Outcome   Outcome  `json:"outcome"`
	Cause     Cause    `json:"cause"`
	Phase     string   `json:"phase"`      // where it happened: a creation step, "run", "stop"
	InducedBy Inducer  `json:"induced_by"` // who led to it
	Evidence  []string `json:"evidence"`   // facts, each one line: "memory.max 64 MiB, peak 64 MiB, oom_kill 1"
	Retryable bool     `json:"retryable"`
	Usage     Usage    `json:"usage"`
}

// Blame is what a sandbox is blamed on that is not its doing: from Since on it may
// have seen what was not so. It becomes the cause of its end, unless a policy, a
// preemption or the platform itself ends it.
type Blame struct {
	Cause    Cause     `json:"cause"`
	Since    time.Time `json:"since"`
	Evidence []string  `json:"evidence"` // as in Result
}

// NewResult fills the derived fields.
func NewResult(c Cause, phase string, by Inducer, evidence ...string) *Result {
	return &Result{Outcome: c.Outcome(), Cause: c, Phase: phase, InducedBy: by, Evidence: evidence,
		Retryable: c.Infra() || c == CausePreempted}
}

// Mask reports whether a trainer should drop the rollout from its loss: only
// what the platform or an unknown force did, and the sandbox did not induce
// itself. An agent that learns to crash its node earns no mask.
func (r *Result) Mask() bool {
	if r.InducedBy == InducedBySelf {
		return false
	}
	return r.Cause.Infra() || r.Cause == CausePreempted || r.Cause == CauseUnknown
}
