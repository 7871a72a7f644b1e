package user

import (
	"context"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

// exitNoReward is of a grading that found none.
const exitNoReward ExitCode = 1

// gradeFlags describe a grading.
type gradeFlags struct {
	spec           dsec.GradeSpec
	where, network string
	layers, files  []string
	env, allow     []string
	memory         limitFlag
	callID         string
}

func (g *gradeFlags) register(c *cobra.Command) {
	f, s := c.Flags(), &g.spec
	f.StringVar(&g.where, "where", string(dsec.GradeFresh), "fresh, or same: in the sandbox itself")
	f.StringArrayVar(&s.Paths, "path", nil, "declared: what the agent was asked to make (repeat; default: the working directory)")
	f.StringArrayVar(&s.Exclude, "exclude", nil, "do not take what matches, like '/repo/**/conftest.py' (repeat)")
	f.StringArrayVar(&g.files, "file", nil, "FILE:PATH that only the grader gets (repeat)")
	f.StringArrayVar(&g.layers, "layer", nil, "layer that only the grader gets (repeat)")
	f.StringArrayVarP(&g.env, "env", "e", nil, "NAME=VALUE of the grader (repeat)")
	f.StringVarP(&s.User, "user", "u", "", "user of the grader (default "+dsec.GraderUser+", which nobody else is)")
	f.StringVarP(&s.Workdir, "workdir", "w", "", "directory of the grader (default: the sandbox's)")
	f.DurationVar(&s.Timeout, "timeout", 0, "most the grader may take (default 10m)")
	f.StringVar(&g.network, "network", "", "of the fresh sandbox: none, allow-list or open (default none)")
	f.StringArrayVar(&g.allow, "allow", nil, "of --network allow-list: "+allowHelp)
	f.Float64Var(&s.Limits.CPU, "cpu", 0, "cores of the fresh sandbox (default: as the sandbox)")
	g.memory.least = dsec.MinMemory
	f.Var(&g.memory, "memory", "memory of the fresh sandbox (default: as the sandbox)")
	f.StringArrayVar(&s.Verify, "verify", nil, "of --where same: what else has to be as in the layers (repeat)")
	f.StringVar(&g.callID, "call-id", "", "key that makes the call idempotent")
	_ = c.RegisterFlagCompletionFunc("where", cobra.FixedCompletions([]string{"fresh", "same"}, cobra.ShellCompDirectiveNoFileComp)) // the flag was made above
}

func (g *gradeFlags) build(command []string) (dsec.GradeSpec, error) {
	s := g.spec
	s.Command, s.Where, s.Network, s.Allow = command, dsec.GradeWhere(g.where), dsec.NetworkMode(g.network), parseRules(g.allow)
	s.Limits.Memory = int64(g.memory.bytesFlag)
	for _, l := range g.layers {
		s.Layers = append(s.Layers, dsec.LayerRef(l))
	}
	var err error
	if s.Env, err = pairs("env", g.env); err != nil {
		return s, err
	}
	for _, f := range g.files {
		from, to, ok := strings.Cut(f, ":")
		if !ok {
			return s, dsec.Errorf(dsec.Invalid, "read flag", "--file", "%s is not FILE:PATH", dsec.Quote(f))
		}
		b, err := readSmall(from)
		if err != nil {
			return s, err
		}
		if s.Files == nil {
			s.Files = map[string][]byte{}
		}
		s.Files[to] = b
	}
	return s, s.Validate()
}

// readSmall reads a file that a grading can take.
func readSmall(name string) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, hostError("read", name, err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, dsec.MaxGradeFiles+1))
	if err != nil {
		return nil, hostError("read", name, err)
	}
	return b, nil
}

// Grade is the verb that grades what was done in a sandbox.
func Grade() *cobra.Command {
	var flags gradeFlags
	c := &cobra.Command{
		Use:   "grade SANDBOX [flags] -- COMMAND [ARG...]",
		Short: "Grade what was done in a sandbox, in a fresh one",
		Long: `Makes a new sandbox of the same layers, puts there what the sandbox has at the declared
paths, and nothing else of it, and runs the grader. The grader writes the reward, a JSON
number or an object with one under "reward", to the file that $DSEC_REWARD names, and ends
with 0. The sandbox goes on, or stays stopped.

What went wrong with the grader is grader_error or grader_timeout, never a reward of 0;
the exit code is 1 then. --where same runs the grader in the sandbox itself, if what it
stands on is there as in the layers: what still runs there may fool it.`,
		Example: `  dsec grade work --path /repo/answer.py --file grade.py:/grader/grade.py -- python3 /grader/grade.py
  dsec grade work --path /repo --exclude '/repo/**/conftest.py' --layer hidden-tests:1 -o json -- /grader/run`,
		Args:              cobra.MinimumNArgs(2),
		ValidArgsFunction: completeSandboxes(1),
		RunE: func(c *cobra.Command, args []string) error {
			spec, err := flags.build(args[1:])
			if err != nil {
				return err
			}
			return with(c, func(ctx context.Context, cl *client.Client) error {
				id, err := find(ctx, cl, args[0])
				if err != nil {
					return err
				}
				res, err := cl.Grade(ctx, id, spec, flags.callID)
				if err != nil {
					return err
				}
				if err := show(c, res, func(w io.Writer) error { return describeGrade(w, res) }); err != nil {
					return err
				}
				if res.Reward == nil {
					return exitNoReward
				}
				return nil
			})
		},
	}
	flags.register(c)
	return c
}

// describeGrade prints a result for people.
func describeGrade(w io.Writer, g dsec.GradeResult) error {
	p := &page{w: w}
	p.line("reward", rewardOf(g))
	p.line("cause", string(g.Cause))
	p.line("where", fmt.Sprintf("%s, in %s", g.Where, g.Sandbox))
	if g.Where == dsec.GradeFresh {
		p.line("declared", fmt.Sprintf("%d files of %s, %d removed, %d not taken", g.Applied.Files, size(g.Applied.Bytes), g.Applied.Removed, g.Applied.Refused))
	}
	p.line("grader", fmt.Sprintf("exit code %d, %s", g.ExitCode, g.Wall.Round(time.Millisecond)))
	for _, e := range g.Evidence {
		p.line("evidence", e)
	}
	if len(g.Output) == 0 {
		return p.err
	}
	p.head("what the grader said")
	for line := range strings.Lines(string(g.Output)) {
		if p.err == nil {
			_, p.err = fmt.Fprintln(w, safe(strings.TrimRight(line, "\n")))
		}
	}
	return p.err
}

func rewardOf(g dsec.GradeResult) string {
	if g.Reward == nil {
		return "none"
	}
	return strconv.FormatFloat(*g.Reward, 'g', -1, 64)
}

// printGrades shows the last gradings.
func printGrades(p *page, all []dsec.GradeResult) {
	for _, g := range all {
		text := fmt.Sprintf("%s, reward %s, where %s, %s", g.Cause, rewardOf(g), g.Where, ago(g.Time))
		if len(g.Evidence) > 0 {
			text += ": " + g.Evidence[len(g.Evidence)-1]
		}
		p.line("graded", text)
	}
}
