package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/runtime"
)

const (
	recordGrades = 4       // last gradings that a record keeps
	gradeOutput  = 4 << 10 // bytes of each stream of the grader that are told
	gradeKept    = 2 << 10 // bytes of details, and of output, that a record keeps; more are in the answer only
	gradeAround  = 20 * time.Minute
)

// grading is a Grade at work. Calls with the same key share it.
type grading struct {
	hash string
	done chan struct{} // closed when res and err are set
	res  dsec.GradeResult
	err  error
}

// Grade implements Service. A result says what the grading found; an error, that
// none took place. With a call id it goes on when its caller goes away, and who
// asks again with the same id waits for the same one; an agent that ends before
// it is over forgets it, and removes the grader's sandbox when it is back.
func (n *Node) Grade(ctx context.Context, id dsec.SandboxID, s dsec.GradeSpec, callID string) (dsec.GradeResult, error) {
	const op = "grade sandbox"
	if err := s.Validate(); err != nil {
		return dsec.GradeResult{}, err
	}
	if s.Where == "" {
		s.Where = dsec.GradeFresh
	}
	setDefault(&s.User, dsec.GraderUser)
	setDefault(&s.Timeout, dsec.DefaultGrading)
	t := &turn{verb: "grade", callID: callID, hash: hashOf(s), key: callKey(string(id), callID)}
	if answer, done, err := n.before(t); done || err != nil {
		return gradeAnswer(id, answer, err)
	}
	if t.box = n.find(id); t.box == nil {
		return dsec.GradeResult{}, n.goneError(op, id)
	}
	g, cancel, err := n.gradeOnce(t, s)
	if err != nil {
		return dsec.GradeResult{}, err
	}
	select {
	case <-g.done:
		return g.res, g.err
	case <-ctx.Done():
	}
	if callID == "" {
		cancel(context.Cause(ctx))
		<-g.done
		return g.res, g.err
	}
	return dsec.GradeResult{}, dsec.Errorf(dsec.ClassOf(ctx.Err()), op, string(id), "it goes on; ask again with the same call id: %w", ctx.Err())
}

func gradeAnswer(id dsec.SandboxID, answer string, err error) (res dsec.GradeResult, _ error) {
	if err != nil {
		return res, err
	}
	if err := json.Unmarshal([]byte(answer), &res); err != nil {
		return res, dsec.E(dsec.Corrupt, "read grading of sandbox", string(id), err)
	}
	return res, nil
}

// gradeOnce begins the grading of a call, or finds it.
func (n *Node) gradeOnce(t *turn, s dsec.GradeSpec) (*grading, context.CancelCauseFunc, error) {
	key := string(t.key)
	n.mu.Lock()
	if g := n.gradings[key]; g != nil && t.callID != "" {
		n.mu.Unlock()
		if g.hash != t.hash {
			return nil, nil, conflict(t.callID)
		}
		return g, nil, nil
	}
	g := &grading{hash: t.hash, done: make(chan struct{})}
	if t.callID != "" {
		n.gradings[key] = g
	}
	n.mu.Unlock()
	ctx, cancel := context.WithCancelCause(n.ctx)
	finish := func() {
		n.mu.Lock()
		if n.gradings[key] == g {
			delete(n.gradings, key)
		}
		n.mu.Unlock()
		close(g.done)
	}
	if !n.spawn(func() {
		defer cancel(nil)
		defer finish()
		gctx, stop := context.WithTimeout(ctx, s.Timeout+gradeAround)
		defer stop()
		g.res, g.err = n.grade(gctx, t, s)
	}) {
		cancel(nil)
		g.err = dsec.E(dsec.Unavailable, "grade sandbox", string(t.id), ErrClosed)
		finish()
	}
	return g, cancel, nil
}

// grade does it and writes it down.
func (n *Node) grade(ctx context.Context, t *turn, s dsec.GradeSpec) (res dsec.GradeResult, err error) {
	const op = "grade sandbox"
	if answer, done, err := n.before(t); done || err != nil { // it ended between two looks
		return gradeAnswer(t.id, answer, err)
	}
	t.use(1)
	defer t.use(-1)
	res = dsec.GradeResult{Where: s.Where, Sandbox: t.id, Time: n.cfg.Clock().UTC()}
	if s.Where == dsec.GradeSame {
		err = n.gradeSame(ctx, t.box, s, &res)
	} else {
		err = n.gradeFresh(ctx, t.box, s, &res)
	}
	if cause := context.Cause(ctx); err != nil && errors.Is(cause, ErrClosed) {
		err = dsec.E(dsec.Unavailable, op, string(t.id), cause)
	}
	if err != nil {
		return res, dsec.E(dsec.ClassOf(err), op, string(t.id), err)
	}
	return res, n.graded(ctx, t, res)
}

// graded keeps a result with the sandbox, and as the answer of the call.
func (n *Node) graded(ctx context.Context, t *turn, res dsec.GradeResult) error {
	answer, err := json.Marshal(res)
	if err != nil {
		return dsec.E(dsec.Internal, "grade sandbox", string(t.id), err)
	}
	dctx, done := n.detached(ctx, undoLimit)
	defer done()
	if err := t.lock(dctx); err != nil {
		return err
	}
	defer t.unlock()
	t.mu.Lock()
	gone := t.gone
	t.mu.Unlock()
	if gone { // the record is closed: the caller still gets what was found
		return n.keep(t.remember(string(answer)))
	}
	fields := map[string]string{"where": string(res.Where), "sandbox": string(res.Sandbox)}
	if res.Reward != nil {
		fields["reward"] = strconv.FormatFloat(*res.Reward, 'g', -1, 64)
	}
	t.emit(dsec.Event{Type: dsec.EventGraded, Detail: string(res.Cause), Fields: fields})
	n.spawn(t.judge)
	kept := res
	if len(kept.Details) > gradeKept {
		kept.Details = nil
	}
	kept.Output = kept.Output[max(0, len(kept.Output)-gradeKept):]
	return t.move(func(r *record) {
		if !slices.ContainsFunc(r.Grades, func(g dsec.GradeResult) bool { return g.Sandbox == kept.Sandbox && g.Time.Equal(kept.Time) }) {
			all := append(slices.Clone(r.Grades), kept)
			r.Grades = all[max(0, len(all)-recordGrades):]
		}
	}, t.remember(string(answer)))
}

// filesOf opens the files of a sandbox, without what Files does for clients.
func (b *box) filesOf(ctx context.Context, user string) (*gradeFS, error) {
	f, ok := b.rt.(runtime.Filer)
	if !ok {
		return nil, b.unsupported("grade sandbox")
	}
	fs, err := f.Files(ctx, b.id, user)
	if err != nil {
		return nil, err
	}
	return &gradeFS{fs}, nil
}

// gradeEnds is of a grading that came to its end without a reward.
func gradeEnds(res *dsec.GradeResult, c dsec.Cause, format string, args ...any) {
	res.Reward, res.Cause = nil, c
	res.Evidence = append(res.Evidence, fmt.Sprintf(format, args...))
}
