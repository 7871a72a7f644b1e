package wire

import (
	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
)

// Scrub for the wire; nothing asked for is nil.
func Scrub(s dsec.Scrub) *dsecv1.Scrub {
	if !s.Any() {
		return nil
	}
	return &dsecv1.Scrub{Histories: s.Histories, Credentials: s.Credentials, Caches: s.Caches, Logs: s.Logs, Patterns: s.Patterns, Answers: s.Answers}
}

// ScrubFrom the wire.
func ScrubFrom(p *dsecv1.Scrub) dsec.Scrub {
	return dsec.Scrub{Histories: p.GetHistories(), Credentials: p.GetCredentials(), Caches: p.GetCaches(), Logs: p.GetLogs(),
		Patterns: p.GetPatterns(), Answers: p.GetAnswers()}
}

// Lineage for the wire; nil stays nil.
func Lineage(l *dsec.Lineage) *dsecv1.Lineage {
	if l == nil {
		return nil
	}
	return &dsecv1.Lineage{Parents: l.Parents, Sandbox: string(l.Sandbox), Time: stamp(l.Time), Scrub: l.Scrub, Merged: l.Merged}
}

// LineageFrom the wire; nil stays nil.
func LineageFrom(p *dsecv1.Lineage) *dsec.Lineage {
	if p == nil {
		return nil
	}
	return &dsec.Lineage{Version: dsec.LineageVersion, Parents: p.Parents, Sandbox: dsec.SandboxID(p.Sandbox), Time: instant(p.Time), Scrub: p.Scrub, Merged: p.Merged}
}

// Packed for the wire.
func Packed(p dsec.Packed) *dsecv1.CommitResponse {
	out := &dsecv1.CommitResponse{Digest: p.Digest, Tag: p.Tag, Lineage: Lineage(&p.Lineage), Entries: p.Entries, MetaSize: p.MetaSize,
		DataSize: p.DataSize, Pause: seconds(p.Pause)}
	if r := p.Report; r != nil {
		out.Report = &dsecv1.ScrubReport{Version: int32(r.Version), Rules: Scrub(r.Rules), Removed: findings(r.Removed), RemovedCount: r.RemovedCount,
			RemovedBytes: r.RemovedBytes, Suspicious: findings(r.Suspicious), SuspiciousCount: r.SuspiciousCount, Unread: r.Unread}
	}
	return out
}

// PackedFrom the wire.
func PackedFrom(p *dsecv1.CommitResponse) dsec.Packed {
	out := dsec.Packed{Digest: p.GetDigest(), Tag: p.GetTag(), Entries: p.GetEntries(), MetaSize: p.GetMetaSize(), DataSize: p.GetDataSize(),
		Pause: duration(p.GetPause())}
	if l := LineageFrom(p.GetLineage()); l != nil {
		out.Lineage = *l
	}
	if r := p.GetReport(); r != nil {
		out.Report = &dsec.ScrubReport{Version: int(r.Version), Rules: ScrubFrom(r.Rules), Removed: findingsFrom(r.Removed), RemovedCount: r.RemovedCount,
			RemovedBytes: r.RemovedBytes, Suspicious: findingsFrom(r.Suspicious), SuspiciousCount: r.SuspiciousCount, Unread: r.Unread}
	}
	return out
}

func findings(all []dsec.Finding) (out []*dsecv1.Finding) {
	for _, f := range all {
		out = append(out, &dsecv1.Finding{Path: f.Path, Why: f.Why, Size: f.Size, Line: int32(f.Line), Below: f.Below})
	}
	return out
}

func findingsFrom(all []*dsecv1.Finding) (out []dsec.Finding) {
	for _, f := range all {
		out = append(out, dsec.Finding{Path: f.Path, Why: f.Why, Size: f.Size, Line: int(f.Line), Below: f.Below})
	}
	return out
}

// Changes for the wire.
func Changes(c dsec.Changes) *dsecv1.ChangesResponse {
	out := &dsecv1.ChangesResponse{Cut: c.Cut, Added: c.Added, Modified: c.Modified, Deleted: c.Deleted, Bytes: c.Bytes}
	for _, l := range c.List {
		out.Changes = append(out.Changes, &dsecv1.Change{Kind: string(l.Kind), Path: l.Path, Size: l.Size, Was: l.Was})
	}
	return out
}

// ChangesFrom the wire.
func ChangesFrom(p *dsecv1.ChangesResponse) dsec.Changes {
	out := dsec.Changes{Cut: p.GetCut(), Added: p.GetAdded(), Modified: p.GetModified(), Deleted: p.GetDeleted(), Bytes: p.GetBytes()}
	for _, l := range p.GetChanges() {
		out.List = append(out.List, dsec.Change{Kind: dsec.ChangeKind(l.Kind), Path: l.Path, Size: l.Size, Was: l.Was})
	}
	return out
}
