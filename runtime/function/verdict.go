package function

import (
	"errors"
	"fmt"
	"syscall"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/runtime"
)

// judge makes a result of how a cell ended.
func judge(c *dsec.Call, end *runtime.CellEnd) (dsec.CallResult, error) {
	res := dsec.CallResult{Stdout: end.Stdout, Stderr: end.Stderr, LeftOut: end.FilesLeftOut, Usage: dsec.CallUsage{Memory: end.Peak}}
	for _, f := range end.Files {
		res.Files = append(res.Files, dsec.CallFile(f))
	}
	if x := end.Compile; x != nil {
		res.Usage.Compile = x.Wall
		if why := uncompiled(x, end.OOM && end.Command == nil); why != "" {
			res.Verdict, res.Detail = dsec.VerdictCompileError, why
			fill(&res, x)
			return res, nil
		}
	}
	x := end.Command
	if x == nil {
		if end.OOM { // it took who looks after the call, too
			res.Verdict, res.Detail, res.ExitCode, res.Signal = dsec.VerdictMemoryLimit, "its memory was used up", 137, 9
			return res, nil
		}
		return res, dsec.Errorf(dsec.Internal, "call", "", "the end of the command is not known")
	}
	fill(&res, x)
	res.Verdict, res.Detail = verdict(c, x, end.OOM)
	if res.Verdict == dsec.VerdictOK && !c.Judge(end.Stdout) {
		res.Verdict, res.Detail = dsec.VerdictWrongAnswer, "stdout is not what was expected"
	}
	return res, nil
}

func fill(res *dsec.CallResult, x *runtime.CellExit) {
	res.ExitCode, res.Signal, res.Truncated = x.Code, x.Signal, x.Output
	res.Usage.CPU, res.Usage.Wall = x.CPU, x.Wall
	if res.Usage.Memory == 0 {
		res.Usage.Memory = x.Largest
	}
	if x.Start != nil {
		res.ExitCode = unstarted(x.Start)
	}
}

// unstarted is the exit code that a shell gives.
func unstarted(err error) int {
	if errors.Is(err, syscall.ENOENT) || errors.Is(err, syscall.ENOTDIR) {
		return 127
	}
	return 126
}

func uncompiled(x *runtime.CellExit, oom bool) string {
	switch {
	case x.Start != nil:
		return "the compiler did not start: " + x.Start.Error()
	case x.TimedOut:
		return "compiling took longer than limits.compile"
	case x.Output:
		return "the compiler wrote more than limits.output"
	case x.Code != 0 && oom:
		return "compiling used more than limits.memory"
	case x.Code != 0:
		return fmt.Sprintf("the compiler ended with %d", x.Code)
	}
	return ""
}

func verdict(c *dsec.Call, x *runtime.CellExit, oom bool) (dsec.Verdict, string) {
	switch {
	case x.Start != nil:
		return dsec.VerdictRuntimeError, "the command did not start: " + x.Start.Error()
	case x.Output:
		return dsec.VerdictOutputLimit, "it wrote more than limits.output"
	case oom && x.Code != 0:
		return dsec.VerdictMemoryLimit, "the memory limit ended a process"
	case x.TimedOut:
		return dsec.VerdictTimeLimit, "it ran longer than limits.wall"
	case x.CPU > c.Limits.CPUTime || x.Signal == int(syscall.SIGXCPU): // the kernel counts in its own way, and by the second
		return dsec.VerdictTimeLimit, "it used more than limits.cpu_time"
	case x.Signal != 0:
		return dsec.VerdictRuntimeError, fmt.Sprintf("signal %d (%v) ended it", x.Signal, syscall.Signal(x.Signal))
	case x.Code != 0:
		return dsec.VerdictRuntimeError, fmt.Sprintf("it ended with %d", x.Code)
	}
	return dsec.VerdictOK, ""
}
