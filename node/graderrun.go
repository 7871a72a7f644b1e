package node

import (
	"bytes"
	"context"
	"maps"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/files"
	"github.com/opendsec/dsec/process"
)

// graderRun is a grader in a sandbox, the fresh one or the same.
type graderRun struct {
	n    *Node
	b    *box
	fs   *gradeFS // as root
	spec dsec.GradeSpec
	res  *dsec.GradeResult

	uid, gid uint32   // the grader's
	declared []string // paths, without links on the way
}

// prepare finds out who the grader is: as a user of the sandbox, by a file that
// it writes.
func (r *graderRun) prepare(ctx context.Context) error {
	if err := r.emptyDir(ctx); err != nil {
		return err
	}
	if err := r.setAttr(ctx, 0, 0, 0o777); err != nil {
		return err
	}
	as, err := r.b.filesOf(ctx, r.spec.User)
	if err != nil {
		return err
	}
	i, err := as.Write(ctx, dsec.GradeDir+"/who", bytes.NewReader(nil), files.WriteOptions{})
	if err != nil {
		return err
	}
	r.uid, r.gid = i.UID, i.GID
	return nil
}

// emptyDir makes the directory of the reward anew.
func (r *graderRun) emptyDir(ctx context.Context) error {
	if err := r.fs.drop(ctx, dsec.GradeDir); err != nil {
		return err
	}
	return r.fs.Mkdir(ctx, dsec.GradeDir, 0o700, true)
}

func (r *graderRun) setAttr(ctx context.Context, uid, gid, mode uint32) error {
	return r.fs.SetAttr(ctx, dsec.GradeDir, files.Attr{UID: &uid, GID: &gid, Mode: &mode})
}

// grade runs the grader and reads the reward. It errs when there is no telling
// what the grader would have found.
func (r *graderRun) grade(ctx context.Context) error {
	if err := r.emptyDir(ctx); err != nil {
		return err
	}
	if err := r.setAttr(ctx, r.uid, r.gid, 0o700); err != nil {
		return err
	}
	end, err := r.run(ctx)
	if err == nil {
		return r.judge(ctx, end)
	}
	switch dsec.ClassOf(err) {
	case dsec.NotFound, dsec.Invalid, dsec.FileNotFound, dsec.PermissionDenied, dsec.NotADirectory: // no such program, user or directory
		gradeEnds(r.res, dsec.CauseGraderError, "the grader did not start: %v", err)
		return nil
	case dsec.SandboxGone:
		return r.lost(err)
	}
	return err
}

// lost is of a sandbox that ended under the grader.
func (r *graderRun) lost(err error) error {
	r.b.mu.Lock()
	was := r.b.rec.Result
	r.b.mu.Unlock()
	switch {
	case was != nil && (was.Cause.Infra() || was.Cause == dsec.CausePreempted):
		gradeEnds(r.res, was.Cause, "the sandbox of the grader ended: %v", err)
	case was != nil:
		gradeEnds(r.res, dsec.CauseGraderError, "the sandbox of the grader ended as %s: %v", was.Cause, err)
	default:
		return err
	}
	return nil
}

func (r *graderRun) run(ctx context.Context) (process.Result, error) {
	env := map[string]string{"HOME": dsec.GradeDir}
	maps.Copy(env, r.spec.Env)
	env["DSEC_REWARD"] = dsec.RewardPath
	p, err := r.n.Exec(ctx, r.b.id, process.Spec{ID: "grade" + dsec.Random(16), Argv: r.spec.Command, Env: env, Cwd: r.spec.Workdir,
		User: r.spec.User, Timeout: r.spec.Timeout})
	if err != nil {
		return process.Result{}, err
	}
	end, err := p.Wait(ctx)
	if err != nil {
		kctx, done := r.n.detached(ctx, undoLimit)
		defer done()
		if dsec.ClassOf(err) != dsec.SandboxGone {
			_ = p.Kill(kctx) // nobody waits for it; its sandbox goes, or says so
		}
		return end, err
	}
	r.res.ExitCode, r.res.Wall = end.ExitCode, end.Wall
	r.res.Output = append(gradeTail(ctx, p, process.Stdout), gradeTail(ctx, p, process.Stderr)...)
	return end, nil
}

func gradeTail(ctx context.Context, p process.Process, s process.Stream) []byte {
	head, tail, _, err := p.Kept(ctx, s)
	if err != nil {
		return nil // gone with its sandbox
	}
	all := append(bytes.Clone(head), tail...)
	return all[max(0, len(all)-gradeOutput):]
}

// judge says what an end of the grader means.
func (r *graderRun) judge(ctx context.Context, end process.Result) error {
	switch {
	case end.Blame != "" && (end.Blame.Infra() || end.Blame == dsec.CausePreempted):
		gradeEnds(r.res, end.Blame, "the sandbox of the grader is blamed on it")
	case end.Status == process.TimedOut:
		gradeEnds(r.res, dsec.CauseGraderTimeout, "the grader did not end within %v", r.spec.Timeout)
	case end.Status == process.Lost:
		gradeEnds(r.res, dsec.CauseInfraNodeLost, "the supervisor of the grader died")
	case end.OOM:
		gradeEnds(r.res, dsec.CauseGraderError, "killed by the memory limit: %d bytes, peak %d", end.OOMLimit, end.OOMPeak)
	case end.Status == process.Killed:
		return r.lost(dsec.Errorf(dsec.Unavailable, "wait for grader", string(r.b.id), "it was killed"))
	case end.ExitCode != 0:
		gradeEnds(r.res, dsec.CauseGraderError, "the grader ended with %d", end.ExitCode)
	default:
		return r.readReward(ctx)
	}
	return nil
}

// readReward reads what the grader wrote, if it is the grader's.
func (r *graderRun) readReward(ctx context.Context) error {
	i, err := r.fs.stat(ctx, dsec.RewardPath)
	if err != nil {
		return err
	}
	no := func(format string, args ...any) error {
		gradeEnds(r.res, dsec.CauseGraderError, "reward: "+format, args...)
		return nil
	}
	switch {
	case i == nil:
		return no("there is none at %s", dsec.RewardPath)
	case i.Kind != files.File:
		return no("%s is a %s, want a regular file", dsec.RewardPath, i.Kind)
	case i.UID != r.uid:
		return no("it is of uid %d, want the grader's, %d", i.UID, r.uid)
	case i.Links > 1:
		return no("it has %d names", i.Links)
	case i.Size > dsec.MaxReward:
		return no("%d bytes, at most %d", i.Size, dsec.MaxReward)
	}
	var text bytes.Buffer
	if _, err := r.fs.Read(ctx, dsec.RewardPath, 0, dsec.MaxReward+1, &text); err != nil {
		return err
	}
	reward, details, err := dsec.ParseReward(text.Bytes())
	if err != nil {
		return no("%v", err)
	}
	r.res.Reward, r.res.Details, r.res.Cause = &reward, details, dsec.CauseCompleted
	return nil
}
