package daemon

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/lifecycle"
	"github.com/opendsec/dsec/netpolicy/veth"
	"github.com/opendsec/dsec/runtime"
)

// Doctor is the verb that says what a machine can do, and why not.
func Doctor() *cobra.Command {
	var s settings
	c := &cobra.Command{
		Use:   "doctor",
		Short: "Say what this machine can and cannot do, and why",
		Long: `Tries what sandboxes need and prints what is used, or why it cannot be. Asks the
daemons if they run; else it opens a machine of its own for the moment, which needs
root. Exits with 1 if the tier of containers cannot work: others need more than every
machine has, and say what.`,
		Example: "  sudo dsec doctor\n  dsec doctor -o json",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := s.load(); err != nil {
				return err
			}
			reports, err := examine(c.Context(), &s)
			if err != nil {
				return err
			}
			if wantJSON(c) {
				return json.NewEncoder(c.OutOrStdout()).Encode(reports)
			}
			return printReports(c.OutOrStdout(), reports)
		},
	}
	s.register(c)
	return c
}

// wantJSON looks at the flag that all verbs have.
func wantJSON(c *cobra.Command) bool {
	f := c.Flag("output")
	return f != nil && f.Value.String() == "json"
}

func examine(ctx context.Context, s *settings) ([]runtime.Report, error) {
	if _, err := os.Stat(s.socket()); err == nil {
		c, err := client.New(client.Config{URL: "unix://" + s.socket()})
		if err != nil {
			return nil, err
		}
		defer c.Close()
		return c.Doctor(ctx, "")
	}
	return probe(ctx, s)
}

// probe opens a machine in a directory of its own, looks, and takes it apart.
// as is the instance whose questions are asked, and whose kernels are used.
func probe(ctx context.Context, as *settings) (reports []runtime.Report, err error) {
	if err := needRoot("examine this machine"); err != nil {
		return nil, err
	}
	s, remove, err := temporary("doc", os.TempDir())
	if err != nil {
		return nil, err
	}
	defer func() { err = joinAfter(ctx, err, s, remove) }()
	if kernels := as.kernelDir(); nearest(kernels) == kernels {
		s.Node.KernelCache = kernels // those it has are not fetched again
	}
	store := probeBlobs(ctx, as)
	takeCredentials() // the hold must not inherit them
	var m machine
	stack, err := lifecycle.Open(ctx, "doctor", m.steps(s, slog.New(slog.DiscardHandler))...)
	if err != nil {
		return nil, err
	}
	reports = m.examine(ctx, as)
	reports[0].Checks = append(reports[0].Checks, store, demandProbe(as, nearest(as.layerDir())))
	return reports, m.teardown(context.WithoutCancel(ctx), s, stack)
}

// nearest is a directory or, where dsec has never run, the one above it that is there.
func nearest(dir string) string {
	for {
		if _, err := os.Stat(dir); err == nil || dir == filepath.Dir(dir) {
			return dir
		}
		dir = filepath.Dir(dir)
	}
}

// examine adds to what the tiers found what they cannot know of the machine. The tier of
// containers is the first.
func (m *machine) examine(ctx context.Context, s *settings) []runtime.Report {
	r := m.tier.Probe(ctx)
	r.Checks = append(r.Checks, m.gvisor.Probe(ctx).Checks...)
	if size, free, err := poolSize(s); err == nil {
		r.Checks = append(r.Checks, poolRoom(s, size, free))
	}
	if m.network != nil {
		walls, err := veth.Walls(ctx, veth.Config{Name: s.Instance})
		r.Checks = append(r.Checks, firewall(walls, err), m.connections(ctx))
	}
	return append(m.full.reports(ctx, r), m.vms.Probe(ctx))
}

// connections says whether sandboxes were refused some.
func (m *machine) connections(ctx context.Context) runtime.Check {
	n, err := m.network.Refused(ctx)
	if err != nil {
		return runtime.Check{Name: "connections", Detail: err.Error()}
	}
	return runtime.Check{Name: "connections", OK: true,
		Detail: fmt.Sprintf("at most %d of each sandbox with network \"open\" at once; %d packets beyond were dropped", m.network.Conns(), n)}
}

// firewall: a drop by the owner's own rules is seen by nobody but the sandbox
// whose network "open" leads nowhere.
func firewall(walls []veth.Wall, err error) runtime.Check {
	c := runtime.Check{Name: "host firewall"}
	if err != nil {
		c.Detail = err.Error()
		return c
	}
	var why []string
	for _, w := range walls {
		why = append(why, fmt.Sprintf("%s (%s) drops what sandboxes with network \"open\" send outside; let it pass with: %s", w.Chain, w.Why, w.Remedy))
	}
	if len(why) > 0 {
		c.Detail = strings.Join(why, "; ")
		return c
	}
	c.OK, c.Detail = true, "no chain drops what it does not know"
	return c
}

func printReports(out io.Writer, reports []runtime.Report) error {
	works := true
	tw := tabwriter.NewWriter(out, 2, 0, 2, ' ', 0)
	for _, r := range reports {
		fmt.Fprintf(tw, "TIER %s\t%s\t\n", r.Tier, map[bool]string{true: "works", false: "DOES NOT WORK"}[r.OK])
		for _, k := range r.Checks {
			mark := "yes"
			switch {
			case !k.OK && k.Fatal:
				mark = "NO"
			case !k.OK:
				mark = "no"
			}
			fmt.Fprintf(tw, "  %s\t%s\t%s\n", k.Name, mark, k.Detail)
		}
		works = works && (r.OK || r.Tier != dsec.TierContainer)
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	if !works {
		return dsec.Errorf(dsec.Unsupported, "examine this machine", "", "the tier of containers cannot work, see above")
	}
	return nil
}

// temporary makes settings of a machine that lives for one command.
func temporary(instance, dir string) (s *settings, remove func() error, err error) {
	dir, err = os.MkdirTemp(dir, "dsec-"+instance+"-")
	if err != nil {
		return nil, nil, dsec.E(dsec.Internal, "make directory", dir, err)
	}
	s = defaults()
	s.Node.Subnet = "" // another dsec may have the usual one
	s.Instance, s.Data, s.Run = instance+dsec.Random(4), filepath.Join(dir, "data"), filepath.Join(dir, "run")
	if err := makeDirs(s); err != nil {
		_ = os.RemoveAll(dir)
		return nil, nil, err
	}
	return s, func() error {
		s.leave()
		return os.RemoveAll(dir)
	}, nil
}
