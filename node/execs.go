package node

import (
	"bytes"
	"context"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
)

// execution is a command the node watches: while it runs the sandbox is not
// idle, and its end is an event and leaves the end of its output in the record.
type execution struct {
	p        process.Process
	ended    bool  // guarded by box.mu
	order    int   // among the ended ones
	keptSize int64 // bytes of kept output, once ended

	collected bool // its output was recorded before its end
	phase     string
}

// tracked is a Process whose release the node notices.
type tracked struct {
	process.Process
	b *box
}

// Wait says what the sandbox of the command was blamed on when it ended.
func (t *tracked) Wait(ctx context.Context) (process.Result, error) {
	r, err := t.Process.Wait(ctx)
	if err == nil {
		r.Blame = t.b.blameOf(r.Started, r.Wall+r.Held)
	}
	return r, err
}

func (t *tracked) Release(ctx context.Context) error {
	err := t.Process.Release(ctx)
	if err == nil {
		t.b.mu.Lock()
		defer t.b.mu.Unlock()
		delete(t.b.execs, t.Spec().ID)
	}
	return err
}

// track watches a command until it ends, once.
func (b *box) track(p process.Process, adopted bool) process.Process {
	id := p.Spec().ID
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.execs[id] != nil || b.gone {
		return &tracked{p, b}
	}
	x := &execution{p: p, phase: b.phaseName()}
	if !b.n.spawn(func() { b.watch(x) }) {
		return &tracked{p, b}
	}
	b.execs[id] = x
	b.running++
	if !adopted || !b.knownOutput(id, nil) { // else an agent before this one has told
		e := dsec.Event{Type: dsec.EventExecStarted, Exec: id, Detail: commandLine(p.Spec().Argv)}
		if x.phase != "" {
			e.Fields = map[string]string{"phase": x.phase}
		}
		b.emitLocked(e)
	}
	return &tracked{p, b}
}

// phaseName is the phase in which a command that begins now does; none outlives
// it. b.mu is held.
func (b *box) phaseName() string {
	if b.rec.Phase == nil {
		return ""
	}
	return b.rec.Phase.Name
}

// mainExec is the id that a runtime gives to the main process.
const mainExec = "main"

// trackMain watches the main process, if there is one and it is a command.
func (n *Node) trackMain(ctx context.Context, b *box) {
	e, ok := b.rt.(runtime.Execer)
	if !ok || len(b.rec.Spec.Command) == 0 {
		return
	}
	if p, err := e.Process(ctx, b.id, mainExec); err == nil { // else it has ended, which Exits tells
		b.track(p, false)
	}
}

// knownOutput reports whether the record has the end of a command, of that
// start if one is given. b.mu is held.
func (b *box) knownOutput(id string, started *time.Time) bool {
	return slices.ContainsFunc(b.rec.Outputs, func(o output) bool {
		return o.Exec == id && (started == nil || o.Started.Equal(*started))
	})
}

func commandLine(argv []string) string {
	s := strings.ToValidUTF8(strings.Join(argv, " "), "?")
	if len(s) > maxArgv {
		s = s[:maxArgv] + "…"
	}
	return s
}

// watch waits for the end of a command, or of the node.
func (b *box) watch(x *execution) {
	res, err := x.p.Wait(b.n.ctx)
	if b.n.ctx.Err() != nil && err != nil {
		return // it goes on without us
	}
	if err != nil { // with its sandbox, or its hold
		res = process.Result{Status: process.Killed}
		if dsec.ClassOf(err) != dsec.SandboxGone {
			res.Status = process.Lost
		}
	}
	o := b.outputOf(b.n.ctx, x.p, res)
	o.Phase = x.phase
	b.n.cfg.Metrics.execs.WithLabelValues(string(res.Status)).Inc()
	b.mu.Lock()
	b.ends++
	x.ended, x.order = true, b.ends
	x.keptSize = keptBytes(x.p.Spec(), res)
	b.running--
	b.touchLocked()
	if !x.collected && !b.gone && b.rec.State != dsec.Deleted && !b.knownOutput(o.Exec, &o.Started) {
		b.rec.Usage.ExecsStarted++
		b.rec.Usage.OutputBytes += o.Total
		b.keepOutput(o)
		if res.OOM {
			b.emitLocked(dsec.Event{Type: dsec.EventOOM, Exec: o.Exec})
		}
		b.emitLocked(dsec.Event{Type: dsec.EventExecExited, Exec: o.Exec, Detail: string(res.Status), Fields: endFields(res)})
	}
	drop := b.overOutputLocked()
	b.mu.Unlock()
	for _, old := range drop {
		_ = old.Release(b.n.ctx) // it has ended; if it is gone already, so much the better
	}
}

// keepOutput adds to the outputs of the record. b.mu is held.
func (b *box) keepOutput(o output) {
	outs := append(slices.Clone(b.rec.Outputs), o)
	b.rec.Outputs = outs[max(0, len(outs)-recordOutputs):]
	b.dirty = true
}

func keptBytes(s process.Spec, r process.Result) int64 {
	head, tail := s.Head, s.Tail
	if head == 0 {
		head = 1 << 20
	}
	if tail == 0 {
		tail = 1 << 20
	}
	return min(r.Stdout.Total, head+tail) + min(r.Stderr.Total, head+tail)
}

// overOutputLocked forgets the oldest ended commands beyond the sandbox's limit
// of kept output and returns them, to be released.
func (b *box) overOutputLocked() (drop []process.Process) {
	var ended []*execution
	var total int64
	for _, x := range b.execs {
		if x.ended {
			ended = append(ended, x)
			total += x.keptSize
		}
	}
	if total <= b.rec.Spec.Limits.Output {
		return nil
	}
	slices.SortFunc(ended, func(x, y *execution) int { return x.order - y.order })
	for _, x := range ended[:len(ended)-1] { // not the one that has just ended
		if total <= b.rec.Spec.Limits.Output {
			break
		}
		total -= x.keptSize
		delete(b.execs, x.p.Spec().ID)
		drop = append(drop, x.p)
	}
	return drop
}

// outputOf reads the end of what a command wrote.
func (b *box) outputOf(ctx context.Context, p process.Process, r process.Result) output {
	s := p.Spec()
	o := output{Blame: b.blameOf(r.Started, r.Wall+r.Held), Exec: s.ID, Argv: commandLine(s.Argv), Status: string(r.Status), Code: r.ExitCode, OOM: r.OOM, Started: r.Started.UTC(),
		Wall: r.Wall.Seconds(), Total: r.Stdout.Total + r.Stderr.Total}
	o.Stdout = lastBytes(ctx, p, process.Stdout)
	if s.PTY == nil {
		o.Stderr = lastBytes(ctx, p, process.Stderr)
	}
	return o
}

func lastBytes(ctx context.Context, p process.Process, s process.Stream) []byte {
	head, tail, _, err := p.Kept(ctx, s)
	if err != nil {
		return nil // gone with its sandbox: the record has the rest
	}
	all := tail
	if len(tail) < outputTail {
		all = append(head[max(0, len(head)-outputTail):len(head):len(head)], tail...)
	}
	return bytes.Clone(all[max(0, len(all)-outputTail):])
}

// collect takes the output of the commands that still run into the record,
// before the sandbox is destroyed.
func (n *Node) collect(ctx context.Context, b *box) {
	b.mu.Lock()
	var open []*execution
	for _, x := range b.execs {
		if !x.ended && len(open) < recordOutputs {
			open = append(open, x)
		}
	}
	b.mu.Unlock()
	for _, x := range open {
		o := b.outputOf(ctx, x.p, process.Result{Status: process.Killed})
		o.Phase = x.phase
		b.mu.Lock()
		if !x.ended {
			x.collected = true
			b.rec.Usage.ExecsStarted++
			b.keepOutput(o)
			b.emitLocked(dsec.Event{Type: dsec.EventExecExited, Exec: o.Exec, Detail: o.Status})
		}
		b.mu.Unlock()
	}
}

// endFields are what of an end is worth a word when the output is gone.
func endFields(r process.Result) map[string]string {
	f := map[string]string{"wall": r.Wall.Round(time.Millisecond).String()}
	if r.Status == process.Exited {
		f["exit_code"] = strconv.Itoa(r.ExitCode)
	}
	if r.Signal != 0 {
		f["signal"] = strconv.Itoa(r.Signal)
	}
	if r.OOM {
		f["oom"] = "true"
	}
	return f
}
