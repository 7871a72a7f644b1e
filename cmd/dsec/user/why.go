package user

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
)

const (
	whyCommands = 5 // shown, the last ones
	whyDenials  = 10
)

// told is all that why knows, and prints as JSON.
type told struct {
	Sandbox client.Sandbox `json:"sandbox"`
	Mask    bool           `json:"mask"` // a trainer should drop the rollout from its loss
	Stats   *runtime.Stats `json:"stats,omitempty"`
	Events  []dsec.Event   `json:"events"`
	// Ends of the last commands, as far as they are known, by their ids.
	Ends map[string]process.Result `json:"ends"`
}

// Why is the verb that says on one page what became of a sandbox.
func Why() *cobra.Command {
	return &cobra.Command{
		Use:               "why SANDBOX",
		Short:             "Say on one page what became of a sandbox, and whose doing it was",
		Example:           "  dsec why work\n  dsec why work -o json",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: completeSandboxes(1),
		RunE: func(c *cobra.Command, args []string) error {
			return with(c, func(ctx context.Context, cl *client.Client) error {
				id, err := find(ctx, cl, args[0])
				if err != nil {
					return err
				}
				t, err := learn(ctx, cl, id)
				if err != nil {
					return err
				}
				return show(c, t, t.print)
			})
		},
	}
}

func learn(ctx context.Context, cl *client.Client, id dsec.SandboxID) (t told, err error) {
	if t.Sandbox, err = cl.Get(ctx, id); err != nil {
		return t, err
	}
	t.Mask = masked(t.Sandbox)
	if t.Sandbox.State.Live() { // the result of an ended one has the usage
		if st, err := cl.Stats(ctx, id); err == nil { // else it ended meanwhile
			t.Stats = &st
		}
	}
	if t.Events, err = past(ctx, cl, client.Events{Sandboxes: []dsec.SandboxID{id}}); err != nil {
		return t, err
	}
	t.Ends = map[string]process.Result{}
	_, ended := commandsOf(t.Events)
	for _, exec := range lastOf(execsOf(t.Events), whyCommands) {
		if _, ok := ended[exec]; !ok {
			continue // it runs
		}
		r, err := cl.Attach(id, exec).Wait(ctx)
		if err == nil {
			t.Ends[exec] = r
		} else if ctx.Err() != nil {
			return t, err
		} // else it is no longer known
	}
	return t, nil
}

// masked says whether a trainer should drop the rollout, as it stands now.
func masked(sb client.Sandbox) bool {
	if sb.Result == nil && sb.Blame != nil {
		return dsec.NewResult(sb.Blame.Cause, "run", dsec.InducedByPlatform).Mask()
	}
	return sb.Result != nil && sb.Result.Mask()
}

// lastOf returns the last n of a list.
func lastOf[T any](list []T, n int) []T { return list[max(0, len(list)-n):] }

func (t told) print(w io.Writer) error {
	p, sb := &page{w: w}, t.Sandbox
	p.line("sandbox", strings.TrimSpace(string(sb.ID)+" "+sb.Spec.Name))
	p.line("state", since(string(sb.State), ", changed ", sb.Changed))
	p.line("image", strings.TrimSpace(string(sb.Spec.Image)+" "+joinRefs(sb.Spec.Layers)))
	p.line("created", fmt.Sprintf("%s on node %s, starts %d", ago(sb.Created), sb.Node, sb.Starts))
	if r := sb.Result; r != nil {
		p.line("outcome", fmt.Sprintf("%s: %s in phase %q, induced by %s", r.Outcome, r.Cause, r.Phase, r.InducedBy))
		p.line("retry", fmt.Sprintf("%v; drop from the loss: %v", r.Retryable, t.Mask))
		for _, e := range r.Evidence {
			p.line("evidence", e)
		}
	}
	if b := sb.Blame; b != nil && sb.Result == nil {
		p.line("will end", fmt.Sprintf("%s, which it is blamed on since %s; drop from the loss: %v", b.Cause, ago(b.Since), t.Mask))
		for _, e := range b.Evidence {
			p.line("evidence", e)
		}
	}
	if k := sb.Kept; k != nil {
		p.line("disk", fmt.Sprintf("kept until %s: dsec debug %s", k.Until.Local().Format(time.DateTime), sb.ID))
	}
	printGrades(p, sb.Grades)
	t.printLimits(p)
	t.printCommands(p)
	t.printDenials(p)
	return p.err
}

// printLimits sets limits against peaks.
func (t told) printLimits(p *page) {
	p.head("limits and peaks")
	lim := t.Sandbox.Spec.Limits
	if s := t.Stats; s != nil {
		p.line("memory", fmt.Sprintf("peak %s, now %s, oom kills %d", of(size(s.MemoryPeak), max(lim.Memory, s.MemoryLimit), size), size(s.Memory), s.OOMKills))
		p.line("pids", fmt.Sprintf("peak %s, now %d, refused %d", of(fmt.Sprint(s.PidsPeak), max(lim.Pids, s.PidsLimit), plainCount), s.Pids, s.PidsDenied))
		p.line("disk", of(size(s.Disk), max(lim.Disk, s.DiskLimit), size))
		p.line("cpu", fmt.Sprintf("%s used, held back %s%s", span(s.CPU), span(s.Throttled), cores(lim.CPU)))
		return
	}
	if t.Sandbox.Result == nil {
		p.line("usage", "not known")
		return
	}
	u := t.Sandbox.Result.Usage
	p.line("memory", fmt.Sprintf("peak %s, oom kills %d", of(size(u.MemoryPeak), lim.Memory, size), u.OOMKills))
	p.line("pids", "peak "+of(fmt.Sprint(u.PidsPeak), lim.Pids, plainCount))
	p.line("disk", of(size(u.DiskUsed), lim.Disk, size))
	p.line("cpu", fmt.Sprintf("%s used in %s, held back %s%s", span(u.CPU), span(u.Wall), span(u.Throttled), cores(lim.CPU)))
	p.line("commands", fmt.Sprintf("%d started, %s of output", u.ExecsStarted, size(u.OutputBytes)))
}

func cores(limit float64) string {
	if limit == 0 {
		return ""
	}
	return fmt.Sprintf(", limit %g cores", limit)
}

// since adds a time to a text if it is known.
func since(text, link string, t time.Time) string {
	if t.IsZero() {
		return text
	}
	return text + link + ago(t)
}

// commandsOf returns how commands began and how they ended, by their ids.
func commandsOf(events []dsec.Event) (began, ended map[string]dsec.Event) {
	began, ended = map[string]dsec.Event{}, map[string]dsec.Event{}
	for _, e := range events {
		switch e.Type {
		case dsec.EventExecStarted:
			began[e.Exec] = e
		case dsec.EventExecExited:
			ended[e.Exec] = e
		}
	}
	return began, ended
}

// printCommands shows the last commands with what came of them.
func (t told) printCommands(p *page) {
	began, ended := commandsOf(t.Events)
	ids := execsOf(t.Events)
	if len(ids) == 0 {
		return
	}
	p.head("last commands")
	for _, id := range lastOf(ids, whyCommands) {
		what := strings.TrimSpace(began[id].Detail + " " + fields(began[id]))
		how := "runs"
		if e, ok := ended[id]; ok {
			how = strings.TrimSpace(e.Detail + " " + fields(e))
		}
		if r, ok := t.Ends[id]; ok {
			how = ending(r)
		}
		p.line(id, strings.TrimSpace(what+" → "+how))
	}
}

// ending is how a command ended, on one line.
func ending(r process.Result) string {
	how := string(r.Status)
	if r.Status == process.Exited {
		how += fmt.Sprintf(" %d", r.ExitCode)
	}
	if r.OOM {
		how += ", out of memory at " + size(r.OOMLimit)
	}
	if r.Blame != "" {
		how += ", blamed on " + string(r.Blame)
	}
	return how + fmt.Sprintf(", %s, %s of output", span(r.Wall), size(r.Stdout.Total+r.Stderr.Total))
}

// printDenials shows what was refused or went wrong.
func (t told) printDenials(p *page) {
	var lines []dsec.Event
	for _, e := range t.Events {
		switch e.Type {
		case dsec.EventOOM, dsec.EventLayerError, dsec.EventDiskError, dsec.EventRefused, dsec.EventRepercussion, dsec.EventNote, dsec.EventExpiryWarning:
			lines = append(lines, e)
		}
	}
	if len(lines) == 0 {
		return
	}
	p.head("denials and notes")
	for _, e := range lastOf(lines, whyDenials) {
		p.line(e.Time.Local().Format("15:04:05"), describe(e))
	}
}

func fields(e dsec.Event) string {
	var parts []string
	for _, k := range sortedKeys(e.Fields) {
		parts = append(parts, k+"="+e.Fields[k])
	}
	return strings.Join(parts, " ")
}

func sortedKeys(m map[string]string) []string { return slices.Sorted(maps.Keys(m)) }

func joinRefs(refs []dsec.LayerRef) string {
	var parts []string
	for _, r := range refs {
		parts = append(parts, "+ "+string(r))
	}
	return strings.Join(parts, " ")
}
