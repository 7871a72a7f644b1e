package wire

import (
	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
)

// AuditRequest for the wire.
func AuditRequest(id dsec.SandboxID, f dsec.AuditFilter) *dsecv1.AuditRequest {
	p := &dsecv1.AuditRequest{Id: string(id), Since: f.Since, Follow: f.Follow}
	for _, k := range f.Kinds {
		p.Kinds = append(p.Kinds, string(k))
	}
	return p
}

// AuditFilterFrom the wire.
func AuditFilterFrom(p *dsecv1.AuditRequest) dsec.AuditFilter {
	f := dsec.AuditFilter{Since: p.GetSince(), Follow: p.GetFollow()}
	for _, k := range p.GetKinds() {
		f.Kinds = append(f.Kinds, dsec.AuditKind(k))
	}
	return f
}

// Audit is a record for the wire.
func Audit(r dsec.AuditRecord) *dsecv1.AuditRecord {
	return &dsecv1.AuditRecord{Seq: r.Seq, Time: Stamp(r.Time), Kind: string(r.Kind), Pid: int32(r.PID), Ppid: int32(r.PPID), Uid: r.UID, Gid: r.GID,
		Exe: r.Exe, Args: r.Args, Path: r.Path, Detail: r.Detail, Exec: r.Exec, Phase: r.Phase, Count: r.Count}
}

// AuditFrom the wire.
func AuditFrom(p *dsecv1.AuditRecord) dsec.AuditRecord {
	return dsec.AuditRecord{Seq: p.GetSeq(), Time: Instant(p.GetTime()), Kind: dsec.AuditKind(p.GetKind()), PID: int(p.GetPid()), PPID: int(p.GetPpid()),
		UID: p.GetUid(), GID: p.GetGid(), Exe: p.GetExe(), Args: p.GetArgs(), Path: p.GetPath(), Detail: p.GetDetail(), Exec: p.GetExec(),
		Phase: p.GetPhase(), Count: p.GetCount()}
}

// FindingsRequest for the wire.
func FindingsRequest(id dsec.SandboxID, t dsec.HackTask) *dsecv1.FindingsRequest {
	return &dsecv1.FindingsRequest{Id: string(id), Tests: t.Tests, Harness: t.Harness, Results: t.Results, Trusted: t.Trusted, Phases: t.Phases, ProjectNames: t.Project}
}

// HackTaskFrom the wire.
func HackTaskFrom(p *dsecv1.FindingsRequest) dsec.HackTask {
	return dsec.HackTask{Tests: p.GetTests(), Harness: p.GetHarness(), Results: p.GetResults(), Trusted: p.GetTrusted(), Phases: p.GetPhases(), Project: p.GetProjectNames()}
}

// Findings for the wire.
func Findings(all []dsec.HackFinding) *dsecv1.FindingsResponse {
	p := &dsecv1.FindingsResponse{}
	for _, f := range all {
		p.Findings = append(p.Findings, &dsecv1.HackFinding{Class: string(f.Class), Confidence: f.Confidence, Title: f.Title, Evidence: f.Evidence, Lines: f.Lines,
			First: Stamp(f.First), Last: Stamp(f.Last), Count: f.Count})
	}
	return p
}

// FindingsFrom the wire.
func FindingsFrom(p *dsecv1.FindingsResponse) (all []dsec.HackFinding) {
	for _, f := range p.GetFindings() {
		all = append(all, dsec.HackFinding{Class: dsec.HackClass(f.GetClass()), Confidence: f.GetConfidence(), Title: f.GetTitle(), Evidence: f.GetEvidence(),
			Lines: f.GetLines(), First: Instant(f.GetFirst()), Last: Instant(f.GetLast()), Count: f.GetCount()})
	}
	return all
}
