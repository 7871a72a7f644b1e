package wire

import (
	"encoding/json"
	"maps"
	"slices"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
)

// GradeSpec for the wire.
func GradeSpec(id dsec.SandboxID, s dsec.GradeSpec, callID string) *dsecv1.GradeRequest {
	out := &dsecv1.GradeRequest{Id: string(id), CallId: callID, Where: string(s.Where), Command: s.Command, Paths: s.Paths, Exclude: s.Exclude,
		Env: s.Env, Workdir: s.Workdir, User: s.User, Timeout: seconds(s.Timeout), Network: string(s.Network),
		Allow: rules(s.Allow), Limits: limits(s.Limits), Verify: s.Verify}
	for _, l := range s.Layers {
		out.Layers = append(out.Layers, string(l))
	}
	for _, p := range slices.Sorted(maps.Keys(s.Files)) {
		out.Files = append(out.Files, &dsecv1.GradeFile{Path: p, Data: s.Files[p]})
	}
	return out
}

// GradeSpecFrom the wire.
func GradeSpecFrom(p *dsecv1.GradeRequest) dsec.GradeSpec {
	out := dsec.GradeSpec{Where: dsec.GradeWhere(p.GetWhere()), Command: p.GetCommand(), Paths: p.GetPaths(), Exclude: p.GetExclude(),
		Env: p.GetEnv(), Workdir: p.GetWorkdir(), User: p.GetUser(), Timeout: duration(p.GetTimeout()),
		Network: dsec.NetworkMode(p.GetNetwork()), Allow: rulesFrom(p.GetAllow()), Limits: limitsFrom(p.GetLimits()), Verify: p.GetVerify()}
	for _, l := range p.GetLayers() {
		out.Layers = append(out.Layers, dsec.LayerRef(l))
	}
	if len(p.GetFiles()) > 0 {
		out.Files = make(map[string][]byte, len(p.Files))
	}
	for _, f := range p.GetFiles() { // of two with one path the last counts
		out.Files[f.GetPath()] = f.GetData()
	}
	return out
}

// Grade for the wire.
func Grade(g dsec.GradeResult) *dsecv1.GradeResponse {
	return &dsecv1.GradeResponse{Reward: g.Reward, Details: g.Details, Cause: string(g.Cause), Where: string(g.Where), Sandbox: string(g.Sandbox),
		ExitCode: int32(g.ExitCode), Output: g.Output, Evidence: g.Evidence, Tampered: g.Tampered, Time: stamp(g.Time), Wall: seconds(g.Wall),
		Applied: &dsecv1.Applied{Files: g.Applied.Files, Bytes: g.Applied.Bytes, Removed: g.Applied.Removed, Refused: g.Applied.Refused}}
}

// Grades for the wire.
func Grades(all []dsec.GradeResult) (out []*dsecv1.GradeResponse) {
	for _, g := range all {
		out = append(out, Grade(g))
	}
	return out
}

// GradeFrom the wire.
func GradeFrom(p *dsecv1.GradeResponse) dsec.GradeResult {
	if p == nil {
		return dsec.GradeResult{}
	}
	a := p.GetApplied()
	return dsec.GradeResult{Reward: p.Reward, Details: json.RawMessage(p.GetDetails()), Cause: dsec.Cause(p.GetCause()), Where: dsec.GradeWhere(p.GetWhere()),
		Sandbox: dsec.SandboxID(p.GetSandbox()), ExitCode: int(p.GetExitCode()), Output: p.GetOutput(), Evidence: p.GetEvidence(),
		Tampered: p.GetTampered(), Time: instant(p.GetTime()), Wall: duration(p.GetWall()),
		Applied: dsec.Applied{Files: a.GetFiles(), Bytes: a.GetBytes(), Removed: a.GetRemoved(), Refused: a.GetRefused()}}
}

// GradesFrom the wire.
func GradesFrom(all []*dsecv1.GradeResponse) (out []dsec.GradeResult) {
	for _, p := range all {
		out = append(out, GradeFrom(p))
	}
	return out
}
