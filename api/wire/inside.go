package wire

import (
	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/files"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/runtime"
)

// FileInfo for the wire.
func FileInfo(i files.Info) *dsecv1.FileInfo {
	return &dsecv1.FileInfo{Path: i.Path, Kind: string(i.Kind), Size: i.Size, Mode: i.Mode, Uid: i.UID, Gid: i.GID,
		Owner: i.Owner, Group: i.Group, Mtime: stamp(i.MTime), Target: i.Target, Links: i.Links}
}

// FileInfoFrom the wire.
func FileInfoFrom(p *dsecv1.FileInfo) files.Info {
	return files.Info{Path: p.GetPath(), Kind: files.Kind(p.GetKind()), Size: p.GetSize(), Mode: p.GetMode(),
		UID: p.GetUid(), GID: p.GetGid(), Owner: p.GetOwner(), Group: p.GetGroup(), MTime: instant(p.GetMtime()),
		Target: p.GetTarget(), Links: p.GetLinks()}
}

// Stats for the wire.
func Stats(s runtime.Stats) *dsecv1.StatsResponse {
	return &dsecv1.StatsResponse{Cpu: seconds(s.CPU), Throttled: seconds(s.Throttled), Memory: s.Memory,
		MemoryPeak: s.MemoryPeak, MemoryLimit: s.MemoryLimit, Pids: s.Pids, PidsPeak: s.PidsPeak,
		PidsLimit: s.PidsLimit, Disk: s.Disk, DiskLimit: s.DiskLimit, OomKills: s.OOMKills, PidsDenied: s.PidsDenied,
		HostMemory: s.HostMemory}
}

// StatsFrom the wire.
func StatsFrom(p *dsecv1.StatsResponse) runtime.Stats {
	return runtime.Stats{CPU: duration(p.GetCpu()), Throttled: duration(p.GetThrottled()), Memory: p.GetMemory(),
		MemoryPeak: p.GetMemoryPeak(), MemoryLimit: p.GetMemoryLimit(), Pids: p.GetPids(), PidsPeak: p.GetPidsPeak(),
		PidsLimit: p.GetPidsLimit(), Disk: p.GetDisk(), DiskLimit: p.GetDiskLimit(), OOMKills: p.GetOomKills(),
		PidsDenied: p.GetPidsDenied(), HostMemory: p.GetHostMemory()}
}

// Reports for the wire.
func Reports(reports []runtime.Report) []*dsecv1.TierReport {
	var out []*dsecv1.TierReport
	for _, r := range reports {
		p := &dsecv1.TierReport{Tier: string(r.Tier), Ok: r.OK}
		for _, c := range r.Checks {
			p.Checks = append(p.Checks, &dsecv1.Check{Name: c.Name, Ok: c.OK, Detail: c.Detail, Fatal: c.Fatal})
		}
		out = append(out, p)
	}
	return out
}

// ReportsFrom the wire.
func ReportsFrom(reports []*dsecv1.TierReport) []runtime.Report {
	var out []runtime.Report
	for _, p := range reports {
		r := runtime.Report{Tier: dsec.Tier(p.GetTier()), OK: p.GetOk()}
		for _, c := range p.GetChecks() {
			r.Checks = append(r.Checks, runtime.Check{Name: c.GetName(), OK: c.GetOk(), Detail: c.GetDetail(), Fatal: c.GetFatal()})
		}
		out = append(out, r)
	}
	return out
}

// Layer for the wire.
func Layer(i layer.Info, tags []string) *dsecv1.Layer {
	p := &dsecv1.Layer{Digest: string(i.Digest), MetaSize: i.MetaSize, DataSize: i.DataSize, Entries: i.Entries,
		Source: i.Source, Image: i.Image, Tags: tags, Lineage: Lineage(i.Lineage)}
	if c := i.Config; c != nil {
		p.Config = &dsecv1.ImageConfig{Env: c.Env, User: c.User, Workdir: c.Workdir, Entrypoint: c.Entrypoint,
			Cmd: c.Cmd, Arch: c.Arch, StopSignal: c.StopSignal}
	}
	for _, l := range i.Layers {
		p.Layers = append(p.Layers, &dsecv1.StackLayer{Digest: string(l.Digest), Role: string(l.Role), Ref: string(l.Ref)})
	}
	return p
}

// LayerFrom the wire.
func LayerFrom(p *dsecv1.Layer) (layer.Info, []string) {
	i := layer.Info{Digest: layer.Digest(p.GetDigest()), MetaSize: p.GetMetaSize(), DataSize: p.GetDataSize(),
		Entries: p.GetEntries(), Source: p.GetSource(), Image: p.GetImage(), Lineage: LineageFrom(p.GetLineage())}
	if c := p.GetConfig(); c != nil {
		i.Config = &image.Config{Env: c.Env, User: c.User, Workdir: c.Workdir, Entrypoint: c.Entrypoint,
			Cmd: c.Cmd, Arch: c.Arch, StopSignal: c.StopSignal}
	}
	for _, l := range p.GetLayers() {
		i.Layers = append(i.Layers, layer.Part{Digest: layer.Digest(l.GetDigest()), Role: layer.Role(l.GetRole()), Ref: dsec.LayerRef(l.GetRef())})
	}
	return i, p.GetTags()
}
