package user

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

// Checkpoint is the verb that keeps a sandbox where every node finds it.
func Checkpoint() *cobra.Command {
	var keep time.Duration
	c := &cobra.Command{
		Use:   "checkpoint SANDBOX",
		Short: "Keep a sandbox as it is, for any node to go on from",
		Long: `Keeps a running or paused sandbox, as it is at one moment, in the object storage: its
processes with their memory, and its disk. It stands still until that is on the node's own
disk, and goes on. Prints the digest that "dsec restore" goes on from, on this node or
another one with the same object storage, also when this node and the sandbox are gone.

It is a project's own, and goes by itself: --keep. A memory may hold secrets; who can read
the object storage can read it.

Only tiers with a kernel of their own can be kept: microvm.`,
		Example:           "  dsec checkpoint work\n  dsec restore $(dsec checkpoint work --keep 24h) --name again",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: completeSandboxes(1),
		RunE: func(c *cobra.Command, args []string) error {
			if keep < 0 || keep > dsec.MaxKeepCheckpoint {
				return usage("checkpoint sandbox", fmt.Sprintf("--keep wants up to %v", dsec.MaxKeepCheckpoint))
			}
			return with(c, func(ctx context.Context, cl *client.Client) error {
				id, err := find(ctx, cl, args[0])
				if err != nil {
					return err
				}
				made, err := cl.Checkpoint(ctx, id, keep)
				if err != nil {
					return err
				}
				return show(c, made, func(w io.Writer) error {
					_, err := fmt.Fprintln(w, made.Digest)
					return err
				})
			})
		},
	}
	c.Flags().DurationVar(&keep, "keep", 0, "how long, like 24h, up to 720h (default 168h)")
	return c
}

// restoreFlags are what of a sandbox may be another than it was.
type restoreFlags struct {
	spec    dsec.Spec
	labels  []string
	network string
	allow   []string
}

func (r *restoreFlags) register(c *cobra.Command) {
	f, p := c.Flags(), &r.spec
	f.StringVar(&p.Name, "name", "", "name, unique among the live sandboxes of the project")
	f.StringVar(&p.Hostname, "hostname", "", "host name (default: the one it had been given, else the id)")
	f.StringVar(&r.network, "network", "", "none, allow-list, mirror-only or open (default: as it was)")
	f.StringArrayVar(&r.allow, "allow", nil, "of --network allow-list: "+allowHelp)
	f.DurationVar(&p.Lifetimes.Idle, "idle", 0, "stop after so long without a command or client (default: as it was)")
	f.DurationVar(&p.Lifetimes.Lifetime, "lifetime", 0, "stop after so long (default: as it was)")
	f.DurationVar(&p.Lifetimes.Retention, "retention", 0, "delete it so long after it stopped (default: as it was)")
	f.StringArrayVarP(&r.labels, "label", "l", nil, "NAME=VALUE (repeat; default: those it had)")
	f.StringVar(&p.RolloutKey, "rollout", "", "key that groups what belongs to one rollout (default: as it was)")
	f.StringVar(&p.CallID, "call-id", "", "key that makes the call idempotent")
}

func (r *restoreFlags) build(digest string) (s dsec.Spec, err error) {
	s = r.spec
	s.Checkpoint, s.Network, s.Allow = digest, dsec.NetworkMode(r.network), parseRules(r.allow)
	s.Labels, err = pairs("label", r.labels)
	return s, err
}

// Restore is the verb that makes a sandbox go on from a checkpoint.
func Restore() *cobra.Command {
	var r restoreFlags
	c := &cobra.Command{
		Use:   "restore DIGEST",
		Short: "Make a sandbox that goes on from a checkpoint",
		Long: `Makes a sandbox of what "dsec checkpoint" kept, on any node that has the same object
storage, and prints its id. Commands go on where they were; host name, machine id, addresses,
the clock and the kernel's random numbers are its own. Its image, layers, limits, users and
environment are what they were; whether it has a network is, too.

A node goes on only from checkpoints of its own release, QEMU, kernel and, with KVM, model of
processor. Others are passed over, and if there is no other it says why.`,
		Example:           "  dsec restore sha256:4f0c… --name again\n  dsec restore sha256:4f0c… --label try=2 --lifetime 8h",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(c *cobra.Command, args []string) error {
			spec, err := r.build(args[0])
			if err != nil {
				return err
			}
			return with(c, func(ctx context.Context, cl *client.Client) error {
				sb, err := cl.Create(ctx, spec)
				if err != nil {
					return err
				}
				return show(c, sb, func(w io.Writer) error {
					_, err := fmt.Fprintln(w, sb.ID)
					return err
				})
			})
		},
	}
	r.register(c)
	return c
}
