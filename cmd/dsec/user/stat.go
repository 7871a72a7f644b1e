package user

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/runtime"
)

// sampled is what stat prints as JSON.
type sampled struct {
	Sandbox string `json:"sandbox"`
	runtime.Stats
}

// Stat is the verb that shows what sandboxes use.
func Stat() *cobra.Command {
	return &cobra.Command{
		Use:               "stat [SANDBOX...]",
		Short:             "Show what sandboxes use, by default all live ones",
		Example:           "  dsec stat\n  dsec stat work -o json",
		ValidArgsFunction: completeSandboxes(0),
		RunE: func(c *cobra.Command, args []string) error {
			return with(c, func(ctx context.Context, cl *client.Client) error { return stat(ctx, c, cl, args) })
		},
	}
}

func stat(ctx context.Context, c *cobra.Command, cl *client.Client, args []string) error {
	var ids []dsec.SandboxID
	for _, a := range args {
		id, err := find(ctx, cl, a)
		if err != nil {
			return err
		}
		ids = append(ids, id)
	}
	all := len(args) == 0
	if all {
		list, _, err := cl.List(ctx, client.ListOptions{})
		if err != nil {
			return err
		}
		for _, sb := range live(list) {
			ids = append(ids, sb.ID)
		}
	}
	out := []sampled{}
	for _, id := range ids {
		st, err := cl.Stats(ctx, id)
		if err != nil && !all {
			return err
		}
		if err == nil { // else it ended meanwhile
			out = append(out, sampled{string(id), st})
		}
	}
	return show(c, out, func(w io.Writer) error {
		rows := make([][]string, 0, len(out))
		for _, s := range out {
			rows = append(rows, []string{s.Sandbox, span(s.CPU), of(size(s.Memory), s.MemoryLimit, size), size(s.MemoryPeak), sizeOr(s.HostMemory),
				of(fmt.Sprint(s.Pids), s.PidsLimit, plainCount), of(size(s.Disk), s.DiskLimit, size), fmt.Sprint(s.OOMKills)})
		}
		return table(w, "SANDBOX CPU MEMORY PEAK HOST PIDS DISK OOM-KILLS", rows)
	})
}

// sizeOr is "-" for what has no memory but the machine's.
func sizeOr(n int64) string {
	if n == 0 {
		return "-"
	}
	return size(n)
}

// of is "3 of 10".
func of(have string, limit int64, format func(int64) string) string {
	if limit == 0 {
		return have
	}
	return have + " of " + format(limit)
}
