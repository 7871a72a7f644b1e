package user

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/process"
)

// cleanWithin bounds the removal of a sandbox that run made.
const cleanWithin = 30 * time.Second

// Run is the verb that makes a sandbox for one command.
func Run() *cobra.Command {
	var s specFlags
	var f commandFlags
	var keep bool
	c := &cobra.Command{
		Use:                   "run [FLAGS] IMAGE [--] [COMMAND [ARG...]]",
		DisableFlagsInUseLine: true,
		Short:                 "Run one command in a new sandbox and remove it",
		Long: `Makes a sandbox, runs the command with stdout and stderr as they come, removes the
sandbox and ends with the command's exit code: 124 after --timeout, 125 if dsec itself
could not, 126 if the command cannot be run, 127 if there is none. Without a command
the image's own is run.`,
		Example: "  dsec run debian:12 -- echo hello\n  dsec run -it --network open debian:12 bash\n  dsec run --network mirror-only --cutoff 2025-01-31 --mirror-deny pypi:requests python:3.12 -- pip install numpy\n  dsec run --memory 512MiB --timeout 1m python:3.12 -- python3 -c 'print(6*7)'",
		Args:    cobra.MinimumNArgs(1), ValidArgsFunction: completeImage,
		RunE: func(c *cobra.Command, args []string) error {
			argv, err := argvOf(c, args, "image")
			if err != nil {
				return notBegun(c.ErrOrStderr(), err)
			}
			spec, err := s.build(args[0])
			if err != nil {
				return notBegun(c.ErrOrStderr(), err)
			}
			return with(c, func(ctx context.Context, cl *client.Client) error {
				a, err := newAttached(c, cl, f)
				if err == nil && len(argv) == 0 {
					argv, err = imageCommand(ctx, cl, spec.Image)
				}
				if err != nil {
					return notBegun(c.ErrOrStderr(), err)
				}
				return runIn(ctx, a, spec, argv, keep)
			})
		},
	}
	s.register(c)
	f.register(c)
	c.Flags().BoolVar(&keep, "keep", false, "keep the sandbox and print its id to stderr")
	return c
}

// runIn makes the sandbox, runs, and cleans up whatever happens meanwhile.
func runIn(ctx context.Context, a *attached, spec dsec.Spec, argv []string, keep bool) error {
	done := await(ctx, a.c, a.cl, spec)
	sb, err := a.cl.Create(ctx, spec)
	done()
	if err != nil {
		return notBegun(a.c.ErrOrStderr(), err)
	}
	return a.runOnce(ctx, sb.ID, argv, keep)
}

// runOnce runs in a sandbox that was made for it, and removes it or says which it is.
func (a *attached) runOnce(ctx context.Context, id dsec.SandboxID, argv []string, keep bool) error {
	stderr := a.c.ErrOrStderr()
	if keep {
		fmt.Fprintln(stderr, "dsec: sandbox", id)
	} else {
		defer func() {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanWithin)
			defer cancel()
			if _, err := a.cl.Delete(ctx, id); err != nil {
				fmt.Fprintln(stderr, "dsec:", ErrorText(err))
			}
		}()
	}
	return a.run(ctx, id, process.Spec{Argv: argv})
}

// imageCommand is what an image runs by itself.
func imageCommand(ctx context.Context, cl *client.Client, image dsec.LayerRef) ([]string, error) {
	l, err := cl.InspectLayer(ctx, image)
	if err != nil {
		return nil, err
	}
	if l.Config == nil || len(l.Config.Entrypoint)+len(l.Config.Cmd) == 0 {
		return nil, dsec.Errorf(dsec.Invalid, "run image", string(image), "it has no command of its own; give one after --")
	}
	return append(append([]string(nil), l.Config.Entrypoint...), l.Config.Cmd...), nil
}
