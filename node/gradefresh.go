package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/files"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/image/erofs"
	"github.com/opendsec/dsec/internal/failpoint"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/snapshot"
)

// gradeLabel names, on the sandbox of a grader, the one that it grades.
const gradeLabel = "dsec.grades"

// gradeIdle ends the sandbox of a grader that nobody is with any more.
const gradeIdle = 10 * time.Minute

// gradeFresh grades in a new sandbox of the same layers. Of the old one it gets
// what was declared, read from its disk as it is at one moment.
func (n *Node) gradeFresh(ctx context.Context, b *box, s dsec.GradeSpec, res *dsec.GradeResult) error {
	disk, size, set, err := n.gradeDisk(ctx, b)
	if errors.Is(err, errUnfit) {
		gradeEnds(res, dsec.CauseAgentError, "its disk cannot be read: %v", err)
		return nil
	}
	if err != nil {
		return err
	}
	defer closeAll(disk.Meta, disk.Data)
	paths := s.Paths
	if len(paths) == 0 {
		if paths, err = declaredOf(b, set); err != nil {
			return err
		}
	}
	im, err := erofs.Open(disk.Meta, size, disk.Data)
	if err != nil {
		return dsec.E(dsec.Corrupt, "open packed disk of", string(b.id), err)
	}
	g, err := n.createGrader(ctx, b, s, set)
	if err != nil {
		return err
	}
	res.Sandbox = g.id
	defer n.endGrader(ctx, g)
	fs, err := g.filesOf(ctx, "0:0")
	if err != nil {
		return err
	}
	if err := failpoint.Hit(ctx, "node.grade.fresh"); err != nil {
		return err
	}
	run := &graderRun{n: n, b: g, fs: fs, spec: s, res: res}
	if err := run.prepare(ctx); err != nil {
		return err
	}
	plan, err := n.gradePlanOf(ctx, g, s, set)
	if err != nil {
		return err
	}
	defer plan.close()
	err = run.apply(ctx, plan, im, paths)
	res.Applied, res.Evidence = plan.applied, append(res.Evidence, plan.why...)
	switch {
	case err != nil && ctx.Err() != nil: // whatever it looks like: it was not the agent
		return dsec.E(dsec.ClassOf(ctx.Err()), "apply declared paths to", string(g.id), context.Cause(ctx))
	case errors.Is(err, errUnfit):
		return g.agentsFault(ctx, res, "the declared paths cannot be taken", err)
	case err != nil:
		return err
	}
	if err = run.grade(ctx); dsec.ClassOf(err) == dsec.NoSpace {
		return g.agentsFault(ctx, res, "the declared paths leave no room", err)
	}
	return err
}

// agentsFault ends a grading with what went wrong in the fresh sandbox because of what the
// agent had declared, unless the node's own disks explain it.
func (b *box) agentsFault(ctx context.Context, res *dsec.GradeResult, what string, err error) error {
	if why := notByDisks(ctx, b.rt); why != nil {
		return dsec.E(dsec.Unavailable, "write to fresh sandbox", string(b.id), fmt.Errorf("%w: %w", err, why))
	}
	gradeEnds(res, dsec.CauseAgentError, "%s: %v", what, err)
	return nil
}

// gradeDisk packs the disk of the sandbox into files without a name, and says
// what layers it stands on.
func (n *Node) gradeDisk(ctx context.Context, b *box) (disk image.Files, size int64, set layer.Set, err error) {
	const op = "grade sandbox"
	p, ok := b.rt.(runtime.Packer)
	if !ok {
		return disk, 0, set, b.unsupported(op)
	}
	done, err := n.packs.take(ctx, b.rec.Project)
	if err != nil {
		return disk, 0, set, err
	}
	defer done()
	if err := b.lock(ctx); err != nil {
		return disk, 0, set, err
	}
	defer b.unlock()
	switch b.state() {
	case dsec.Running, dsec.Paused, dsec.Stopped, dsec.Failed:
	default:
		return disk, 0, set, b.illegal(op)
	}
	if b.rec.Intent == intentDestroy || len(b.rec.Digests) == 0 { // only the turn writes it
		return disk, 0, set, b.goneNow(op)
	}
	ctx, end := b.packing(ctx)
	defer end()
	// The lease of the sandbox says what its references meant when it was made.
	if set, err = n.cfg.Store.For(b.rec.Project).Acquire(ctx, string(b.id), refsOf(b.rec.Spec)); err != nil {
		return disk, 0, set, err
	}
	if disk, err = n.scratch(); err != nil {
		return disk, 0, set, err
	}
	packed, err := p.Pack(ctx, b.id, disk, dsec.Scrub{})
	if err != nil {
		closeAll(disk.Meta, disk.Data)
		if dsec.ClassOf(err) == dsec.Invalid { // names, sizes or attributes that no layer has: who made them did
			err = fmt.Errorf("%w: %w", errUnfit, err)
		}
		return disk, 0, set, err
	}
	return disk, packed.MetaSize, set, nil
}

// declaredOf is what counts as declared when nothing is: the working directory.
func declaredOf(b *box, set layer.Set) ([]string, error) {
	dir := b.rec.Spec.Workdir
	if dir == "" {
		dir = set.Config.Workdir
	}
	if dir = path.Clean("/" + dir); dir == "/" || dsec.Within(dir, dsec.GradeDir) {
		return nil, dsec.Errorf(dsec.Invalid, "grade sandbox", "paths", "none is given, and the sandbox has no working directory of its own")
	}
	return []string{dir}, nil
}

// createGrader makes a sandbox of the layers that the other was made of.
func (n *Node) createGrader(ctx context.Context, of *box, s dsec.GradeSpec, set layer.Set) (*box, error) {
	was := of.rec.Spec // does not change
	refs := digestsOf(set)
	spec := dsec.Spec{Tier: was.Tier, Image: dsec.LayerRef(refs[0]), Env: maps.Clone(was.Env), User: was.User, Workdir: was.Workdir,
		Network: s.Network, Allow: s.Allow, Limits: limitsOr(s.Limits, was.Limits), Profile: was.Profile, NoNewPrivs: was.NoNewPrivs,
		Mounts: was.Mounts, Labels: map[string]string{gradeLabel: string(of.id)}, RolloutKey: was.RolloutKey,
		Lifetimes: dsec.Lifetimes{Idle: gradeIdle, Lifetime: s.Timeout + gradeAround, Retention: time.Second}}
	for _, d := range refs[1:] {
		spec.Layers = append(spec.Layers, dsec.LayerRef(d))
	}
	spec.Layers = append(spec.Layers, s.Layers...)
	if err := n.check(&spec); err != nil {
		return nil, err
	}
	g, err := n.admit(of.rec.Project, spec, hashOf(spec), nil)
	if err != nil {
		n.cfg.Metrics.created(err, nil)
		return nil, err
	}
	defer g.unlock()
	g.rec.GraderOf, g.config = of.id, &set.Config
	cctx, stop := context.WithTimeout(ctx, n.cfg.StartTime)
	defer stop()
	steps, err := n.create(cctx, g, nil)
	n.cfg.Metrics.created(err, steps)
	if err != nil {
		return nil, n.failCreation(cctx, g, nil, steps, err)
	}
	return g, nil
}

// limitsOr fills in what is not said.
func limitsOr(l, or dsec.Limits) dsec.Limits {
	setDefault(&l.CPU, or.CPU)
	setDefault(&l.CPUWeight, or.CPUWeight)
	setDefault(&l.Memory, or.Memory)
	setDefault(&l.Pids, or.Pids)
	setDefault(&l.Disk, or.Disk)
	setDefault(&l.Output, or.Output)
	return l
}

// endGrader removes the grader's sandbox, whatever became of the grading. What
// does not succeed is tried again, by the sweeps or by the next agent.
func (n *Node) endGrader(ctx context.Context, g *box) {
	dctx, done := n.detached(ctx, undoLimit)
	defer done()
	err := g.lock(dctx)
	if err == nil {
		g.mu.Lock()
		gone := g.gone
		g.orphan = true
		g.mu.Unlock()
		if !gone {
			err = n.delete(dctx, g, dsec.NewResult(dsec.CauseCompleted, "run", dsec.InducedBySelf), nil)
		}
		g.unlock()
	}
	if err != nil {
		n.cfg.Log.Error("sandbox of a grader not removed", "sandbox", g.id, "err", err)
	}
}

// gradePlanOf knows what may not be taken.
func (n *Node) gradePlanOf(ctx context.Context, g *box, s dsec.GradeSpec, set layer.Set) (*gradePlan, error) {
	p := &gradePlan{ctx: ctx, links: map[uint64]string{}}
	for _, e := range s.Exclude {
		glob, err := files.CompileGlob(e)
		if err != nil {
			return nil, err
		}
		p.exclude = append(p.exclude, glob)
	}
	if len(s.Layers) == 0 {
		return p, nil
	}
	all, err := n.cfg.Store.For(g.rec.Project).Acquire(ctx, string(g.id), refsOf(g.rec.Spec))
	if err == nil {
		p.grader, err = snapshot.OpenBelow(all.Layers[len(set.Layers):])
	}
	return p, err
}

func (p *gradePlan) close() {
	if p.grader != nil {
		_ = p.grader.Close() // it was only read
	}
}

// apply puts the declared paths into the fresh sandbox, and then what only the
// grader has.
func (r *graderRun) apply(ctx context.Context, p *gradePlan, im *erofs.Image, paths []string) error {
	var names []string
	for _, name := range paths {
		name, err := r.fs.resolve(ctx, name)
		if err != nil {
			return err
		}
		names = append(names, name)
	}
	slices.Sort(names)
	for i, name := range names {
		if slices.ContainsFunc(names[:i], func(above string) bool { return dsec.Within(name, above) }) {
			continue // with the one above it
		}
		if err := p.declare(im, name); err != nil {
			return err
		}
	}
	if err := r.put(ctx, p); err != nil {
		return unfit(err)
	}
	for _, name := range names {
		if err := r.fs.letThrough(ctx, name); err != nil {
			return noRoom(err)
		}
	}
	r.declared = names
	return noRoom(r.give(ctx))
}

// noRoom says that what was declared has left none for what comes with it.
func noRoom(err error) error {
	if dsec.ClassOf(err) == dsec.NoSpace {
		return fmt.Errorf("%w: %w", errUnfit, err)
	}
	return err
}

// put removes what the agent removed, and unpacks what it made.
func (r *graderRun) put(ctx context.Context, p *gradePlan) error {
	for _, name := range p.remove {
		if err := r.fs.clear(ctx, p, name); err != nil {
			return err
		}
	}
	for _, e := range p.entries {
		if err := r.fs.makeRoom(ctx, p, e); err != nil {
			return err
		}
	}
	if err := failpoint.Hit(ctx, "node.grade.put"); err != nil {
		return err
	}
	pr, pw := io.Pipe()
	go func() { pw.CloseWithError(p.tar(pw)) }()
	err := r.fs.Upload(ctx, "/", pr, files.TreeOptions{UID: &r.uid, GID: &r.gid})
	pr.Close()
	return err
}

// give writes the files of the grader over what may lie there.
func (r *graderRun) give(ctx context.Context) error {
	for _, name := range slices.Sorted(maps.Keys(r.spec.Files)) {
		if err := r.clearWay(ctx, name); err != nil {
			return err
		}
		mode, root := uint32(0o644), uint32(0)
		if _, err := r.fs.Write(ctx, name, strings.NewReader(string(r.spec.Files[name])), files.WriteOptions{Mode: &mode, UID: &root, GID: &root, Parents: true}); err != nil {
			return err
		}
	}
	return nil
}

// clearWay removes what lies where a file of the grader goes, and what the agent
// left on the way there that is no directory: it would lead elsewhere.
func (r *graderRun) clearWay(ctx context.Context, name string) error {
	for dir := path.Dir(name); dir != "/"; dir = path.Dir(dir) {
		if !slices.ContainsFunc(r.declared, func(d string) bool { return dsec.Within(dir, d) }) {
			continue
		}
		i, err := r.fs.stat(ctx, dir)
		if err != nil {
			return err
		}
		if i == nil || i.Kind == files.Dir {
			continue
		}
		if err := r.fs.drop(ctx, dir); err != nil {
			return err
		}
	}
	return r.fs.drop(ctx, name)
}
