package user

import (
	"context"
	"os"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/opendsec/dsec/client"
)

// Debug is the verb that opens the disk of a sandbox in a new one.
func Debug() *cobra.Command {
	var f commandFlags
	var keep bool
	c := &cobra.Command{
		Use:                   "debug [FLAGS] SANDBOX [--] [COMMAND [ARG...]]",
		DisableFlagsInUseLine: true,
		Short:                 "Look around on the disk of a sandbox, also of one that failed",
		Long: `Makes a new sandbox of the same layers and of the disk: of one that failed as it was kept
(--keep-on-failure), of another as it is now. It has no network and none of the processes.
Runs a shell in it, or the command, and removes it. The sandbox itself is not touched.`,
		Example: "  dsec debug work\n  dsec debug work -- ls -la /root",
		Args:    cobra.MinimumNArgs(1), ValidArgsFunction: completeSandboxes(1),
		RunE: func(c *cobra.Command, args []string) error {
			argv, err := argvOf(c, args, "sandbox")
			if err != nil {
				return notBegun(c.ErrOrStderr(), err)
			}
			if len(argv) == 0 {
				argv = []string{"/bin/sh", "-c", "command -v bash >/dev/null && exec bash; exec sh"}
				f.interactive, f.tty = true, f.tty || term.IsTerminal(int(os.Stdin.Fd()))
			}
			return with(c, func(ctx context.Context, cl *client.Client) error {
				a, err := newAttached(c, cl, f)
				if err == nil {
					err = debugIn(ctx, a, args[0], argv, keep)
				}
				return err
			})
		},
	}
	f.register(c)
	c.Flags().BoolVar(&keep, "keep", false, "keep the new sandbox and print its id to stderr")
	return c
}

// debugIn makes the sandbox, runs, and cleans up whatever happens meanwhile.
func debugIn(ctx context.Context, a *attached, name string, argv []string, keep bool) error {
	id, err := find(ctx, a.cl, name)
	if err != nil {
		return err
	}
	sb, err := a.cl.Debug(ctx, id)
	if err != nil {
		return err
	}
	return a.runOnce(ctx, sb.ID, argv, keep)
}
