package node

import (
	"context"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/runtime"
)

// gradeBase is what nearly every grader stands on, before what is said of one.
var gradeBase = []string{"/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin", "/usr/local/lib", "/usr/local/lib64",
	"/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/usr/share/python3", "/etc/python3",
	"/etc/ld.so.preload", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/ld.so.cache", "/etc/ld-musl-x86_64.path", "/etc/ld-musl-aarch64.path",
	"/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/environment", "/etc/profile", "/etc/profile.d", "/etc/bash.bashrc", "/etc/alternatives"}

// gradeSame grades in the sandbox itself. What the grader stands on has to be on
// the disk as it is in the layers. What runs there goes on and may do anything to
// a grader: that is what the result says with where "same".
func (n *Node) gradeSame(ctx context.Context, b *box, s dsec.GradeSpec, res *dsec.GradeResult) error {
	const op = "grade sandbox"
	if _, err := n.reach(ctx, op, b.id); err != nil {
		return err
	}
	p, ok := b.rt.(runtime.Packer)
	if !ok {
		return b.unsupported(op)
	}
	changes, err := p.Changes(ctx, b.id, dsec.MaxChanges)
	if dsec.ClassOf(err) == dsec.Invalid { // the sandbox's doing, not the caller's
		gradeEnds(res, dsec.CauseGraderError, "its disk cannot be read: %v", err)
		return nil
	}
	if err != nil {
		return err
	}
	if bad := tampered(changes, standsOn(s)); len(bad) > 0 {
		res.Tampered = true
		for _, name := range bad[:min(len(bad), gradeEvidence)] {
			res.Evidence = append(res.Evidence, "tampered: "+name)
		}
		gradeEnds(res, dsec.CauseGraderError, "%d paths that the grader stands on are not as in the layers", len(bad))
		return nil
	}
	if changes.Cut {
		gradeEnds(res, dsec.CauseGraderError, "more than %d changes: not all of them were looked at", dsec.MaxChanges)
		return nil
	}
	if st, err := b.rt.Stats(ctx, b.id); err == nil && st.Pids > 0 {
		res.Evidence = append(res.Evidence, fmt.Sprintf("%d processes and threads were there when the grader began", st.Pids))
	}
	fs, err := b.filesOf(ctx, "0:0")
	if err != nil {
		return err
	}
	run := &graderRun{n: n, b: b, fs: fs, spec: s, res: res}
	if err := run.prepare(ctx); err != nil {
		return err
	}
	if err := run.give(ctx); err != nil {
		return err
	}
	return run.grade(ctx)
}

// standsOn lists what has to be as in the layers: the usual, what is asked for,
// and each file that the command names.
func standsOn(s dsec.GradeSpec) []string {
	all := slices.Concat(gradeBase, s.Verify)
	for _, a := range s.Command {
		if strings.HasPrefix(a, "/") && path.Clean(a) != "/" {
			if _, given := s.Files[path.Clean(a)]; !given { // the grader's own, written later
				all = append(all, path.Clean(a))
			}
		}
	}
	return all
}

// tampered lists the changes of what is at, below or above one of the paths; of
// those above, a directory in which something else changed is none.
func tampered(c dsec.Changes, paths []string) (bad []string) {
	for _, ch := range c.List {
		name, isDir := strings.CutSuffix(ch.Path, "/")
		for _, p := range paths {
			if dsec.Within(name, p) && !(isDir && ch.Kind == dsec.Modified) || dsec.Within(p, name) && name != p && (!isDir || ch.Kind == dsec.Removed) {
				bad = append(bad, string(ch.Kind)+" "+ch.Path)
				break
			}
		}
	}
	return bad
}
