package user

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/process"
)

// Exec is the verb that runs a command in a sandbox.
func Exec() *cobra.Command {
	var f commandFlags
	var s process.Spec
	var env []string
	var detach bool
	c := &cobra.Command{
		Use:                   "exec [FLAGS] SANDBOX [--] COMMAND [ARG...]",
		DisableFlagsInUseLine: true,
		Short:                 "Run a command in a sandbox",
		Long: `Runs a command and ends with its exit code: 124 after --timeout, 125 if dsec itself
could not, 126 if the command cannot be run, 127 if there is none. The command goes
on if the connection is lost.`,
		Example:           "  dsec exec work -- make test\n  dsec exec -it work bash\n  dsec exec -d work -- ./server\n  tar -c . | dsec exec -i work -- tar -x -C /src",
		Args:              cobra.MinimumNArgs(2),
		ValidArgsFunction: completeSandboxes(1),
		RunE: func(c *cobra.Command, args []string) (err error) {
			if s.Argv, err = argvOf(c, args, "sandbox"); err != nil {
				return notBegun(c.ErrOrStderr(), err)
			}
			if s.Env, err = pairs("env", env); err != nil {
				return err
			}
			return with(c, func(ctx context.Context, cl *client.Client) error {
				return f.execIn(ctx, c, cl, execTarget{args[0], s, detach})
			})
		},
	}
	f.register(c)
	c.Flags().StringArrayVarP(&env, "env", "e", nil, "NAME=VALUE (repeat)")
	c.Flags().StringVarP(&s.User, "user", "u", "", "name, uid or uid:gid (default: the sandbox's)")
	c.Flags().StringVarP(&s.Cwd, "workdir", "w", "", "directory (default: the sandbox's)")
	c.Flags().BoolVar(&s.Service, "service", false, "it outlives the first phase, as a user that is nobody else; see dsec phase --help")
	c.Flags().BoolVarP(&detach, "detach", "d", false, "print the id of the command and leave it to run")
	return c
}

// execTarget is a command and where it runs.
type execTarget struct {
	sandbox string
	spec    process.Spec
	detach  bool
}

func (f commandFlags) execIn(ctx context.Context, c *cobra.Command, cl *client.Client, e execTarget) error {
	s := e.spec
	if len(s.Argv) == 0 {
		return usage("run command", "no command is given")
	}
	id, err := find(ctx, cl, e.sandbox)
	if err != nil {
		return notBegun(c.ErrOrStderr(), err)
	}
	if e.detach {
		return startOnly(ctx, c, cl, id, s, f)
	}
	a, err := newAttached(c, cl, f)
	if err != nil {
		return notBegun(c.ErrOrStderr(), err)
	}
	return a.run(ctx, id, s)
}
