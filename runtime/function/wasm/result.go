package wasm

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/tetratelabs/wazero/sys"

	"github.com/opendsec/dsec"
)

// judge says how it ended. A call that failed after memory was refused to it is taken
// to have failed of that.
func (a *answer) judge(ctx context.Context, err error, refused bool, fuel uint64) {
	exit, exited := errors.AsType[*sys.ExitError](err)
	cause := context.Cause(ctx)
	switch {
	case a.truncated:
		a.end = endOutput
	case cause != nil && errors.Is(cause, context.DeadlineExceeded):
		a.end = endTime
	case cause != nil:
		a.end = endCancel
	case a.fuel > fuel:
		a.end = endFuel
	case err == nil || exited && exit.ExitCode() == 0:
	case refused:
		a.end = endMemory
	case exited:
		a.code = exit.ExitCode()
	default:
		a.end, a.detail = endTrap, strings.TrimSpace(err.Error())
	}
}

// result is what the caller gets.
func result(c *dsec.Call, a *answer) (dsec.CallResult, error) {
	res := dsec.CallResult{Verdict: dsec.VerdictRuntimeError, Detail: a.detail, ExitCode: int(a.code & 0xff), Stdout: a.stdout, Stderr: a.stderr, Truncated: a.truncated,
		Backend: "wazero", Usage: dsec.CallUsage{Wall: a.wall, Memory: int64(a.memory), Fuel: int64(a.fuel)}}
	switch a.end {
	case endExit:
		switch {
		case a.code != 0:
			res.Detail = fmt.Sprintf("it ended with %d", a.code)
			if res.ExitCode == 0 {
				res.ExitCode = 1
			}
		case !c.Judge(a.stdout):
			res.Verdict, res.Detail = dsec.VerdictWrongAnswer, "stdout is not what was expected"
		default:
			res.Verdict = dsec.VerdictOK
		}
	case endTrap:
		res.ExitCode = 134
	case endTime:
		res.Verdict, res.ExitCode, res.Detail = dsec.VerdictTimeLimit, 137, "it ran longer than limits.wall or limits.cpu_time, which are one for a module"
	case endOutput:
		res.Verdict, res.ExitCode, res.Detail = dsec.VerdictOutputLimit, 137, "it wrote more than limits.output"
	case endMemory:
		res.Verdict, res.ExitCode, res.Detail = dsec.VerdictMemoryLimit, 137, "it failed after more than limits.memory was refused to it"
	case endFuel:
		res.Verdict, res.ExitCode, res.Detail = dsec.VerdictFuelLimit, 137, "it executed more than limits.fuel instructions"
	case endModule:
		res.Verdict, res.ExitCode = dsec.VerdictCompileError, 1
	default:
		return res, dsec.Errorf(dsec.Unavailable, "call module", "", "the worker gave it up")
	}
	return res, nil
}
