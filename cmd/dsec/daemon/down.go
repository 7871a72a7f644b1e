package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/leak"
	"github.com/opendsec/dsec/node"
)

// Down is the verb that ends everything of this machine.
func Down() *cobra.Command {
	var s settings
	var purge bool
	c := &cobra.Command{
		Use:   "down",
		Short: "End dsec and every sandbox on this machine",
		Long: `Ends the daemons of "dsec up" if they run, then every sandbox, and everything they
were made of, and says what it looked for and whether anything is left. Layers,
records and keys stay, unless --purge is given.`,
		Example: "  sudo dsec down\n  sudo dsec down --data /srv/dsec --purge",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := s.load(); err != nil {
				return err
			}
			return down(c.Context(), &s, purge, c.OutOrStdout())
		},
	}
	s.register(c)
	c.Flags().BoolVar(&purge, "purge", false, "remove all data too: layers, records, keys")
	return c
}

func down(ctx context.Context, s *settings, purge bool, out io.Writer) error {
	if err := needRoot("end dsec"); err != nil {
		return err
	}
	if _, err := os.Stat(s.Data); errors.Is(err, os.ErrNotExist) {
		fmt.Fprintf(out, "nothing to end: there is no %s\n", s.Data)
		return nil
	}
	if err := makeDirs(s); err != nil {
		return err
	}
	if err := endSupervisor(ctx, s); err != nil {
		return err
	}
	held, err := lock(s.lockFile())
	if err != nil {
		return err
	}
	defer held.Close()
	ended, err := endSandboxes(ctx, s)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "ended %d sandboxes\n", ended)
	if err := os.RemoveAll(s.Run); err != nil {
		return dsec.E(dsec.Internal, "remove", s.Run, err)
	}
	if purge {
		if err := os.RemoveAll(s.Data); err != nil {
			return dsec.E(dsec.Internal, "remove", s.Data, err)
		}
	}
	return sayLeft(out, s, purge)
}

// endSupervisor asks the holder of the lock to end and waits for it.
func endSupervisor(ctx context.Context, s *settings) error {
	f, err := os.Open(s.lockFile())
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return dsec.E(dsec.Internal, "read", s.lockFile(), err)
	}
	defer f.Close()
	for signalled := false; ; {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return nil // closing the file gives the lock back
		}
		if !signalled {
			text, _ := io.ReadAll(io.LimitReader(f, 64))
			pid, perr := strconv.Atoi(strings.TrimSpace(string(text)))
			if perr != nil {
				return dsec.E(dsec.Internal, "read", s.lockFile(), perr)
			}
			if err := unix.Kill(pid, unix.SIGTERM); err != nil {
				return dsec.E(dsec.Internal, "end dsec up", strconv.Itoa(pid), err)
			}
			signalled = true
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(20 * time.Millisecond): // there is no event for a lock of another process
		}
	}
}

// endSandboxes opens the agent's state without serving it, deletes what is in
// it and takes the machine apart.
func endSandboxes(ctx context.Context, s *settings) (ended int, err error) {
	var a agent
	stack, err := a.open(ctx, s, roleLog("node"))
	if err != nil {
		return 0, err
	}
	ended, err = deleteAll(ctx, a.node)
	return ended, errors.Join(err, a.teardown(ctx, s, stack), removeGroups(ctx, s))
}

// sayLeft looks for everything of this instance that a sandbox system can
// leave.
func sayLeft(out io.Writer, s *settings, purged bool) error {
	match := s.cgroupName()
	left := leak.Take(match).Since(leak.Snapshot{})
	var ours []string
	for _, l := range left {
		kind, what, _ := strings.Cut(l, ": ")
		named := strings.Contains(what, match) || strings.Contains(what, s.Data) || strings.Contains(what, s.Run)
		if kind == "process" || kind == "control group" || named {
			if !strings.HasSuffix(what, " "+strconv.Itoa(os.Getpid())) {
				ours = append(ours, l)
			}
		}
	}
	if purged {
		for _, dir := range []string{s.Data, s.Run} {
			if _, err := os.Stat(dir); err == nil {
				ours = append(ours, "file: "+dir)
			}
		}
	}
	const kinds = "processes, mounts, links, control groups, loop devices, network namespaces"
	if len(ours) == 0 {
		fmt.Fprintf(out, "nothing is left: looked for %s\n", kinds)
		return nil
	}
	return dsec.Errorf(dsec.Internal, "end dsec", s.Instance, "%d things are left: %s", len(ours), strings.Join(ours, ", "))
}

// deleteAll deletes every sandbox whose disk is still here.
func deleteAll(ctx context.Context, n *node.Node) (ended int, err error) {
	n.Drain(true)
	list, err := n.List(ctx, node.Filter{})
	if err != nil {
		return 0, err
	}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(deletesAtOnce)
	for _, sb := range list {
		g.Go(func() error {
			_, err := n.Delete(ctx, sb.ID, "")
			return err
		})
	}
	return len(list), g.Wait()
}

const deletesAtOnce = 16
