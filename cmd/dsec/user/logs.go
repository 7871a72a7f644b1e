package user

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/process"
)

// logged is what logs prints as JSON.
type logged struct {
	Sandbox string `json:"sandbox"`
	Exec    string `json:"exec"`
	Stdout  []byte `json:"stdout"`
	Stderr  []byte `json:"stderr"`
}

// Logs is the verb that prints the kept output of a command.
func Logs() *cobra.Command {
	var follow bool
	c := &cobra.Command{
		Use:   "logs SANDBOX [EXEC]",
		Short: "Print the kept output of a command, by default the last one",
		Long: `EXEC is the whole id of a command, as "dsec why" and "dsec events" print it. Output
is kept until the sandbox is started again or deleted.`,
		Example:           "  dsec logs work\n  dsec logs -f work\n  dsec logs work cw45gqulbqksgl5paw55njtu3",
		Args:              cobra.RangeArgs(1, 2),
		ValidArgsFunction: completeSandboxes(1),
		RunE: func(c *cobra.Command, args []string) error {
			return with(c, func(ctx context.Context, cl *client.Client) error {
				id, err := find(ctx, cl, args[0])
				if err != nil {
					return err
				}
				exec := ""
				if len(args) == 2 {
					exec = args[1]
				} else if exec, err = lastExec(ctx, cl, id); err != nil {
					return err
				}
				return logs(ctx, c, cl.Attach(id, exec), follow)
			})
		},
	}
	c.Flags().BoolVarP(&follow, "follow", "f", false, "go on until the command ends")
	return c
}

func lastExec(ctx context.Context, cl *client.Client, id dsec.SandboxID) (string, error) {
	events, err := past(ctx, cl, client.Events{Sandboxes: []dsec.SandboxID{id}, Types: []dsec.EventType{dsec.EventExecStarted}})
	if err != nil {
		return "", err
	}
	ids := execsOf(events)
	if len(ids) == 0 {
		return "", dsec.Errorf(dsec.NotFound, "find command of sandbox", string(id), "none was started")
	}
	return ids[len(ids)-1], nil
}

func logs(ctx context.Context, c *cobra.Command, p *client.Process, follow bool) error {
	j, err := asJSON(c)
	if err != nil {
		return err
	}
	out := map[process.Stream]io.Writer{process.Stdout: c.OutOrStdout(), process.Stderr: c.ErrOrStderr()}
	if follow && !j {
		_, err := p.Follow(ctx, client.Offsets{}, func(k client.Chunk) error {
			_, err := out[k.Stream].Write(k.Data)
			return err
		})
		return err
	}
	if follow {
		if _, err := p.Wait(ctx); err != nil {
			return err
		}
	}
	stdout, stderr, err := p.Kept(ctx)
	if err != nil {
		return err
	}
	if j {
		return printJSON(c.OutOrStdout(), logged{string(p.Sandbox), p.ID, joined(stdout), joined(stderr)})
	}
	for s, k := range map[process.Stream]client.Kept{process.Stdout: stdout, process.Stderr: stderr} {
		if _, err := out[s].Write(joined(k)); err != nil {
			return fmt.Errorf("print output: %w", err)
		}
	}
	return nil
}
