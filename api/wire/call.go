package wire

import (
	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
)

// Call for the wire.
func Call(c dsec.Call) *dsecv1.CallRequest {
	l := c.Limits
	out := &dsecv1.CallRequest{CallId: c.CallID, Type: string(c.Type), Image: string(c.Image), Compile: c.Compile, Command: c.Command, Code: c.Code,
		Preload: c.Preload, Env: c.Env, Files: callFiles(c.Files), Outputs: c.Outputs, Stdin: c.Stdin, Expect: c.Expect, Compare: string(c.Compare), Network: string(c.Network),
		Limits: &dsecv1.CallLimits{Cpu: l.CPU, CpuTime: seconds(l.CPUTime), Wall: seconds(l.Wall), Compile: seconds(l.Compile), Memory: l.Memory, Pids: l.Pids,
			Disk: l.Disk, Output: l.Output, Files: l.Files, Fuel: l.Fuel}}
	for _, r := range c.Layers {
		out.Layers = append(out.Layers, string(r))
	}
	return out
}

// CallFrom the wire.
func CallFrom(p *dsecv1.CallRequest) dsec.Call {
	l := p.GetLimits()
	out := dsec.Call{CallID: p.GetCallId(), Type: dsec.CallType(p.GetType()), Image: dsec.LayerRef(p.GetImage()), Compile: p.GetCompile(), Command: p.GetCommand(),
		Code: p.GetCode(), Preload: p.GetPreload(), Env: p.GetEnv(), Files: callFilesFrom(p.GetFiles()), Outputs: p.GetOutputs(), Stdin: p.GetStdin(), Expect: p.Expect,
		Compare: dsec.CallCompare(p.GetCompare()), Network: dsec.CallNetwork(p.GetNetwork()),
		Limits: dsec.CallLimits{CPU: l.GetCpu(), CPUTime: duration(l.GetCpuTime()), Wall: duration(l.GetWall()), Compile: duration(l.GetCompile()), Memory: l.GetMemory(),
			Pids: l.GetPids(), Disk: l.GetDisk(), Output: l.GetOutput(), Files: l.GetFiles(), Fuel: l.GetFuel()}}
	for _, r := range p.GetLayers() {
		out.Layers = append(out.Layers, dsec.LayerRef(r))
	}
	return out
}

func callFiles(all []dsec.CallFile) (out []*dsecv1.CallFile) {
	for _, f := range all {
		out = append(out, &dsecv1.CallFile{Path: f.Path, Mode: f.Mode, Data: f.Data})
	}
	return out
}

func callFilesFrom(all []*dsecv1.CallFile) (out []dsec.CallFile) {
	for _, f := range all {
		out = append(out, dsec.CallFile{Path: f.GetPath(), Mode: f.GetMode() & 0o777, Data: f.GetData()})
	}
	return out
}

// CallResult for the wire. Strings of it that a program chose are made UTF-8.
func CallResult(r dsec.CallResult) *dsecv1.CallResponse {
	return &dsecv1.CallResponse{Verdict: string(r.Verdict), Detail: r.Detail, ExitCode: int32(r.ExitCode), Signal: int32(r.Signal), Stdout: r.Stdout, Stderr: r.Stderr,
		Truncated: r.Truncated, Files: callFiles(r.Files), LeftOut: r.LeftOut, Cpu: seconds(r.Usage.CPU), Wall: seconds(r.Usage.Wall), Compile: seconds(r.Usage.Compile),
		Memory: r.Usage.Memory, Fuel: r.Usage.Fuel, Backend: r.Backend, Container: string(r.Container), Generation: r.Generation, Use: r.Use, Queued: seconds(r.Queued), Node: string(r.Node)}
}

// CallResultFrom the wire.
func CallResultFrom(p *dsecv1.CallResponse) dsec.CallResult {
	if p == nil {
		return dsec.CallResult{}
	}
	return dsec.CallResult{Verdict: dsec.Verdict(p.GetVerdict()), Detail: p.GetDetail(), ExitCode: int(p.GetExitCode()), Signal: int(p.GetSignal()), Stdout: p.GetStdout(),
		Stderr: p.GetStderr(), Truncated: p.GetTruncated(), Files: callFilesFrom(p.GetFiles()), LeftOut: p.GetLeftOut(),
		Usage:   dsec.CallUsage{CPU: duration(p.GetCpu()), Wall: duration(p.GetWall()), Compile: duration(p.GetCompile()), Memory: p.GetMemory(), Fuel: p.GetFuel()},
		Backend: p.GetBackend(), Container: dsec.SandboxID(p.GetContainer()), Generation: p.GetGeneration(), Use: p.GetUse(), Queued: duration(p.GetQueued()),
		Node: dsec.NodeID(p.GetNode())}
}
