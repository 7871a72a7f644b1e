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
