package wire

import (
	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/process"
)

// ExecSpec for the wire; the id travels as call_id.
func ExecSpec(s process.Spec) *dsecv1.ExecSpec {
	p := &dsecv1.ExecSpec{Argv: s.Argv, Env: s.Env, Cwd: s.Cwd, User: s.User, Stdin: s.Stdin,
		Timeout: seconds(s.Timeout), Head: s.Head, Tail: s.Tail, OnLimit: string(s.OnLimit), Service: s.Service}
	if s.PTY != nil {
		p.Pty = Size(*s.PTY)
	}
	return p
}

// ExecSpecFrom the wire.
func ExecSpecFrom(id string, p *dsecv1.ExecSpec) (process.Spec, error) {
	bad := func(field, format string, args ...any) (process.Spec, error) {
		return process.Spec{}, dsec.Errorf(dsec.Invalid, "validate exec", field, format, args...)
	}
	s := process.Spec{ID: id, Argv: p.GetArgv(), Env: p.GetEnv(), Cwd: p.GetCwd(), User: p.GetUser(),
		Stdin: p.GetStdin(), Timeout: duration(p.GetTimeout()), Head: p.GetHead(), Tail: p.GetTail(),
		OnLimit: process.OnLimit(p.GetOnLimit()), Service: p.GetService()}
	if id != "" && !ExecID(id) {
		return bad("call_id", "%s, want 1 to 64 of A-Z a-z 0-9 _ .", dsec.Quote(id))
	}
	if s.Timeout < 0 {
		return bad("timeout", "%g is not a number of seconds", p.GetTimeout())
	}
	if err := s.Validate(); err != nil {
		return process.Spec{}, err
	}
	if p.GetPty() != nil {
		size, err := SizeFrom(p.GetPty())
		if err != nil {
			return process.Spec{}, err
		}
		s.PTY = &size
	}
	return s, nil
}

// ExecID reports whether s can name an exec.
func ExecID(s string) bool { return token(s, 1, ".") }

// SessionID reports whether s can name an event session.
func SessionID(s string) bool { return token(s, 16, "") }

func token(s string, least int, extra string) bool {
	if len(s) < least || len(s) > 64 {
		return false
	}
	for i := 0; i < len(s); i++ {
		c := s[i]
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', c == '_':
		case len(extra) == 1 && c == extra[0]:
		default:
			return false
		}
	}
	return true
}

// Size for the wire.
func Size(s process.Size) *dsecv1.PtySize {
	return &dsecv1.PtySize{Rows: uint32(s.Rows), Cols: uint32(s.Cols)}
}

// SizeFrom the wire.
func SizeFrom(p *dsecv1.PtySize) (process.Size, error) {
	const most = 1<<16 - 1
	if p.GetRows() > most || p.GetCols() > most {
		return process.Size{}, dsec.Errorf(dsec.Invalid, "validate size", "", "%d × %d is beyond a terminal", p.GetRows(), p.GetCols())
	}
	return process.Size{Rows: uint16(p.GetRows()), Cols: uint16(p.GetCols())}, nil
}

// ExecResult for the wire.
func ExecResult(r process.Result) *dsecv1.ExecResult {
	return &dsecv1.ExecResult{Status: string(r.Status), ExitCode: int32(r.ExitCode), Signal: int32(r.Signal),
		Oom: r.OOM, OomLimit: r.OOMLimit, OomPeak: r.OOMPeak, Stdout: summary(r.Stdout), Stderr: summary(r.Stderr),
		Started: stamp(r.Started), Wall: seconds(r.Wall), Cpu: seconds(r.CPU), Throttle: seconds(r.Throttle),
		Held: seconds(r.Held), Blame: string(r.Blame)}
}

// ExecResultFrom the wire.
func ExecResultFrom(p *dsecv1.ExecResult) process.Result {
	return process.Result{Status: process.Status(p.GetStatus()), ExitCode: int(p.GetExitCode()),
		Signal: int(p.GetSignal()), OOM: p.GetOom(), OOMLimit: p.GetOomLimit(), OOMPeak: p.GetOomPeak(),
		Stdout: summaryFrom(p.GetStdout()), Stderr: summaryFrom(p.GetStderr()), Started: instant(p.GetStarted()),
		Wall: duration(p.GetWall()), CPU: duration(p.GetCpu()), Throttle: duration(p.GetThrottle()),
		Held: duration(p.GetHeld()), Blame: dsec.Cause(p.GetBlame())}
}

func summary(s process.OutputSummary) *dsecv1.OutputSummary {
	return &dsecv1.OutputSummary{Total: s.Total, Dropped: s.Dropped, Truncated: s.Truncated}
}

func summaryFrom(p *dsecv1.OutputSummary) process.OutputSummary {
	return process.OutputSummary{Total: p.GetTotal(), Dropped: p.GetDropped(), Truncated: p.GetTruncated()}
}

// StreamName of a stream on the wire.
func StreamName(s process.Stream) string {
	if s == process.Stderr {
		return "stderr"
	}
	return "stdout"
}

// StreamFrom the wire.
func StreamFrom(name string) (process.Stream, error) {
	switch name {
	case "stdout":
		return process.Stdout, nil
	case "stderr":
		return process.Stderr, nil
	}
	return 0, dsec.Errorf(dsec.Invalid, "parse stream", dsec.Quote(name), "want stdout or stderr")
}

// ExecKey names an exec among those of all sandboxes.
func ExecKey(sandbox, exec string) string { return sandbox + "/" + exec }

// SubscriptionError is the frame that ends the subscription of an exec, or
// with empty names says that sandbox events broke off.
func SubscriptionError(sandbox, exec string, err error) *dsecv1.Frame {
	return &dsecv1.Frame{Item: &dsecv1.Frame_Error{Error: &dsecv1.SubscriptionError{
		Sandbox: sandbox, Exec: exec, Error: Detail(err)}}}
}
