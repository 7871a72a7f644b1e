package node

import (
	"context"
	"fmt"
	"path"
	"strings"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/files"
)

const gradeLinks = 40 // as the kernel has it

// gradeFS is the files of a sandbox as a grading needs them.
type gradeFS struct{ files.FS }

// stat does not follow a link; nil is of what is not there.
func (f *gradeFS) stat(ctx context.Context, name string) (*files.Info, error) {
	i, err := f.Stat(ctx, name, false)
	switch dsec.ClassOf(err) {
	case "":
		return &i, nil
	case dsec.FileNotFound, dsec.NotADirectory:
		return nil, nil
	}
	return nil, err
}

// resolve follows the links on the way to a declared path as the layers have
// them: /bin/tool is where /bin leads. It is asked before anything of the agent
// is there.
func (f *gradeFS) resolve(ctx context.Context, name string) (string, error) {
	done, rest := "/", strings.Split(strings.Trim(name, "/"), "/")
	for links := 0; len(rest) > 0; {
		at := path.Join(done, rest[0])
		i, err := f.stat(ctx, at)
		if err != nil {
			return "", err
		}
		if i == nil || i.Kind != files.Symlink {
			done, rest = at, rest[1:]
			continue
		}
		if links++; links > gradeLinks {
			return "", dsec.Errorf(dsec.Invalid, "resolve declared path", dsec.Quote(name), "more than %d links", gradeLinks)
		}
		to := i.Target
		if !strings.HasPrefix(to, "/") {
			to = path.Join(done, to)
		}
		done, rest = "/", append(strings.Split(strings.Trim(path.Clean(to), "/"), "/"), rest[1:]...)
	}
	if done == "/" || dsec.Within(done, dsec.GradeDir) {
		return "", dsec.Errorf(dsec.Invalid, "resolve declared path", dsec.Quote(name), "it is %s", done)
	}
	return done, nil
}

// drop removes what is at a path, whatever it is.
func (f *gradeFS) drop(ctx context.Context, name string) error {
	err := f.Remove(ctx, name, true)
	switch dsec.ClassOf(err) {
	case dsec.FileNotFound, dsec.NotADirectory:
		return nil
	}
	return err
}

// clear removes what is at a path but what is excluded or the grader's, and the
// directories that lead there.
func (f *gradeFS) clear(ctx context.Context, p *gradePlan, name string) error {
	if p.excluded(name) {
		return nil
	}
	if p.grader == nil && len(p.exclude) == 0 {
		return f.drop(ctx, name)
	}
	theirs, err := p.graders(name)
	if err != nil {
		return err
	}
	i, err := f.stat(ctx, name)
	if err != nil || i == nil {
		return err
	}
	if i.Kind != files.Dir {
		if theirs != nil {
			return nil
		}
		return f.drop(ctx, name)
	}
	below, err := f.List(ctx, name, 1)
	if err != nil {
		return err
	}
	for _, c := range below {
		if err := f.clear(ctx, p, c.Path); err != nil {
			return err
		}
	}
	if left, err := f.List(ctx, name, 1); err != nil || len(left) > 0 || theirs != nil {
		return err
	}
	return f.drop(ctx, name)
}

// makeRoom removes a directory of the layers where the agent left something else.
func (f *gradeFS) makeRoom(ctx context.Context, p *gradePlan, e gradeEntry) error {
	if e.bare {
		return nil
	}
	i, err := f.stat(ctx, e.path)
	if err != nil || i == nil || i.Kind != files.Dir {
		return err
	}
	if err := f.clear(ctx, p, e.path); err != nil {
		return err
	}
	if i, err = f.stat(ctx, e.path); err == nil && i != nil {
		return fmt.Errorf("%w: %s took the place of a directory that is excluded or the grader's", errUnfit, dsec.Quote(e.path))
	}
	return err
}

// letThrough lets everybody search the directories that lead to a declared path:
// the grader is not root, and what was declared may be below /root.
func (f *gradeFS) letThrough(ctx context.Context, name string) error {
	for dir := path.Dir(name); dir != "/"; dir = path.Dir(dir) {
		i, err := f.stat(ctx, dir)
		if err != nil {
			return err
		}
		if i == nil || i.Kind != files.Dir || i.Mode&0o001 != 0 {
			continue
		}
		mode := i.Mode | 0o001
		if err := f.SetAttr(ctx, dir, files.Attr{Mode: &mode}); err != nil {
			return err
		}
	}
	return nil
}
