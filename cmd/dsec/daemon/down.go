package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/leak"
	"github.com/opendsec/dsec/netpolicy/veth"
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
	if err := s.foreign(); err != nil {
		return err
	}
	defer s.leave()
	stays := []error{makeDirs(s)} // a disk that takes nothing keeps nothing running
	if err := endSupervisor(ctx, s); err != nil {
		return err
	}
	held, err := take(s.lockFile())
	if err != nil {
		return err
	}
	defer held.Close()
	ended, err := endSandboxes(ctx, s)
	fmt.Fprintf(out, "ended %d sandboxes\n", ended)
	if err != nil {
		fmt.Fprintln(out, "the rest is ended by force: the state of the node cannot be used")
		stays = append(stays, err, endByForce(ctx, s))
	}
	stays = append(stays, removeTree(s.Run))
	if purge {
		stays = []error{removeTree(s.Data), removeTree(s.Run), forgetContext(s)} // and with it what could not be removed from it
	}
	return errors.Join(append(stays, sayLeft(out, s, purge))...)
}

func removeTree(dir string) error {
	if err := os.RemoveAll(dir); err != nil {
		return dsec.E(dsec.Internal, "remove", dir, err)
	}
	return nil
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
	a := agent{machine: machine{ending: true}}
	stack, err := a.open(ctx, s, loggerFrom(os.Stderr, slog.LevelWarn)) // that there is a hold is no news here
	if err != nil {
		return 0, err
	}
	ended, err = deleteAll(ctx, a.node)
	return ended, errors.Join(err, a.teardown(ctx, s, stack), removeGroups(ctx, s))
}

// endByForce ends what runs, without the state that says what it is: the hold,
// and with it every mount and the router; every process in the control groups;
// and what is on the node for the network. What is on disk stays.
func endByForce(ctx context.Context, s *settings) error {
	hctx, cancel := context.WithTimeout(ctx, forceAfter)
	defer cancel()
	if err := endHold(hctx, s); err != nil {
		slog.Warn("the hold does not end when asked", "err", err) // it is killed with its group
	}
	err := removeGroups(ctx, s)
	return errors.Join(err, veth.Clean(ctx, veth.Config{Name: s.Instance}))
}

// forceAfter is how long a hold may take to end.
const forceAfter = 10 * time.Second

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

// deleteAll deletes every sandbox whose disk is still here. One that cannot be
// keeps no other.
func deleteAll(ctx context.Context, n *node.Node) (ended int, err error) {
	n.Drain(true)
	list, err := n.List(ctx, node.Filter{})
	if err != nil {
		return 0, err
	}
	var g errgroup.Group
	g.SetLimit(deletesAtOnce)
	errs := make([]error, len(list))
	for i, sb := range list {
		g.Go(func() error {
			_, errs[i] = n.Delete(ctx, sb.ID, "")
			return nil
		})
	}
	_ = g.Wait() // errs has them
	for _, err := range errs {
		if err == nil {
			ended++
		}
	}
	return ended, errors.Join(errs...)
}

const deletesAtOnce = 16
