package user

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/process"
)

// killAfter an interrupt that the command did not heed.
const killAfter = 5 * time.Second

// ran is what run and exec print as JSON.
type ran struct {
	Sandbox  string           `json:"sandbox"`
	Exec     string           `json:"exec"`
	Stdout   []byte           `json:"stdout"` // kept head and tail
	Stderr   []byte           `json:"stderr"`
	Status   process.Status   `json:"status"`
	ExitCode int              `json:"exit_code"`
	OOM      bool             `json:"oom"`
	Blame    dsec.Cause       `json:"blame,omitempty"` // what its sandbox was blamed on when it ended
	Wall     time.Duration    `json:"wall"`
	CPU      time.Duration    `json:"cpu"`
	Output   map[string]int64 `json:"output"` // bytes written
}

// attached is a command that this terminal, or these pipes, are connected to.
type attached struct {
	c     *cobra.Command
	cl    *client.Client
	flags commandFlags
	json  bool
}

// newAttached checks what can be refused before anything is made.
func newAttached(c *cobra.Command, cl *client.Client, f commandFlags) (*attached, error) {
	j, err := asJSON(c)
	if err != nil {
		return nil, err
	}
	if f.tty && j {
		return nil, dsec.Errorf(dsec.Invalid, "run command", "--tty", "a terminal has no JSON")
	}
	if f.tty && f.interactive && !term.IsTerminal(int(os.Stdin.Fd())) {
		return nil, dsec.Errorf(dsec.Invalid, "run command", "--tty", "stdin is no terminal")
	}
	return &attached{c, cl, f, j}, nil
}

// run starts a command, streams, and returns its exit code as an error.
// Interrupting dsec interrupts the command, and kills it if it does not end.
func (a *attached) run(ctx context.Context, id dsec.SandboxID, s process.Spec) error {
	s.Stdin, s.Timeout = a.flags.interactive, a.flags.timeout
	if a.flags.tty {
		s.PTY = terminalSize()
	}
	p, err := a.cl.Exec(ctx, id, s)
	if err != nil {
		return startFailed(a.c.ErrOrStderr(), err, s.Argv)
	}
	on := context.WithoutCancel(ctx) // an interrupt is the command's first
	followed := make(chan struct{})
	defer close(followed)
	go passInterrupt(ctx, on, p, followed)
	restore, err := a.raw(on, p)
	if err != nil {
		return err
	}
	defer restore()
	if s.Stdin {
		// It ends with this process at the latest: a read of a terminal cannot be taken back.
		go func() { _ = p.Feed(on, a.c.InOrStdin()) }()
	}
	r, err := a.follow(on, p)
	restore()
	if err != nil {
		fmt.Fprintln(a.c.ErrOrStderr(), "dsec:", ErrorText(err))
		return exitDsec
	}
	if a.json {
		if err := a.print(on, p, r); err != nil {
			return err
		}
	}
	return a.ended(r)
}

func (a *attached) follow(ctx context.Context, p *client.Process) (process.Result, error) {
	if a.json {
		return p.Wait(ctx)
	}
	out := map[process.Stream]io.Writer{process.Stdout: a.c.OutOrStdout(), process.Stderr: a.c.ErrOrStderr()}
	return p.Follow(ctx, client.Offsets{}, func(k client.Chunk) error {
		_, err := out[k.Stream].Write(k.Data)
		return err
	})
}

func (a *attached) print(ctx context.Context, p *client.Process, r process.Result) error {
	stdout, stderr, err := p.Kept(ctx)
	if err != nil {
		return err
	}
	return printJSON(a.c.OutOrStdout(), ran{Sandbox: string(p.Sandbox), Exec: p.ID, Stdout: joined(stdout), Stderr: joined(stderr),
		Status: r.Status, ExitCode: r.ExitCode, OOM: r.OOM, Blame: r.Blame, Wall: r.Wall, CPU: r.CPU,
		Output: map[string]int64{"stdout": r.Stdout.Total, "stderr": r.Stderr.Total}})
}

// joined puts kept head and tail together and says what is missing.
func joined(k client.Kept) []byte {
	b := append([]byte(nil), k.Head...)
	if gap := k.TailOffset - int64(len(k.Head)); gap > 0 && len(k.Tail) > 0 {
		b = fmt.Appendf(b, "\n[%d bytes not kept]\n", gap)
	}
	return append(b, k.Tail...)
}

// ended turns how a command ended into an exit code.
func (a *attached) ended(r process.Result) error {
	say := func(format string, args ...any) {
		fmt.Fprintf(a.c.ErrOrStderr(), "dsec: command "+format+"\n", args...)
	}
	if r.OOM {
		say("ran out of memory: limit %s, peak %s", size(r.OOMLimit), size(r.OOMPeak))
	}
	if r.Blame != "" {
		say("is blamed on %s: dsec why says what happened", r.Blame)
	}
	switch r.Status {
	case process.TimedOut:
		say("timed out after %s", span(r.Wall))
		return exitTimeout
	case process.OutputLimit:
		say("was ended for its output: %s", size(r.Stdout.Total+r.Stderr.Total))
	case process.Lost:
		say("was lost with the process that knew it")
		return exitDsec
	}
	if r.ExitCode == 0 {
		return nil
	}
	return ExitCode(r.ExitCode)
}

// notBegun says why nothing was started, and what to do about it.
func notBegun(w io.Writer, err error) error {
	fmt.Fprintln(w, "dsec:", ErrorText(err))
	if advice := Advice(err); advice != "" {
		fmt.Fprintln(w, "dsec:", advice)
	}
	return exitDsec
}

// startFailed says why a command did not start, with docker's codes.
func startFailed(w io.Writer, err error, argv []string) error {
	_ = notBegun(w, err) // the code depends
	return startCode(err, argv[0])
}

// startCode tells what the command itself is to blame for from what dsec could
// not do: the kernel refused the program, or the directory to run it in.
func startCode(err error, program string) ExitCode {
	e, ok := errors.AsType[*dsec.Error](err)
	if !ok {
		return exitDsec
	}
	refused := e.Op == "exec" && e.Object == dsec.Quote(program) || e.Op == "change to directory"
	switch e.Class {
	case dsec.FileNotFound:
		return exitNotFound
	case dsec.PermissionDenied, dsec.IsADirectory, dsec.NotADirectory:
		return exitCannotRun
	case dsec.Invalid, dsec.Internal: // no program by its format; busy, or unreadable
		if refused {
			return exitCannotRun
		}
	}
	return exitDsec
}

// passInterrupt hands an interrupt on, and kills a command that ignores it.
func passInterrupt(ctx, on context.Context, p *client.Process, followed <-chan struct{}) {
	select {
	case <-followed:
		return
	case <-ctx.Done():
	}
	if p.Signal(on, int(syscall.SIGINT)) == nil {
		late := time.NewTimer(killAfter)
		defer late.Stop()
		select {
		case <-followed:
			return
		case <-late.C:
		}
	}
	_, _ = p.Kill(on) // the follower sees what became of it
}

// terminalSize is that of stdout, or the usual.
func terminalSize() *process.Size {
	cols, rows, err := term.GetSize(int(os.Stdout.Fd()))
	if err != nil || cols <= 0 || rows <= 0 {
		return &process.Size{Rows: 24, Cols: 80}
	}
	return &process.Size{Rows: uint16(rows), Cols: uint16(cols)} //nolint:gosec // the kernel has 16 bits too
}

// raw makes the terminal pass every key on, and passes its size on when that
// changes; restore may be called twice.
func (a *attached) raw(ctx context.Context, p *client.Process) (restore func(), err error) {
	if !a.flags.tty || !a.flags.interactive {
		return func() {}, nil
	}
	fd := int(os.Stdin.Fd())
	old, err := term.MakeRaw(fd)
	if err != nil {
		return nil, dsec.E(dsec.Internal, "set up terminal", "", err)
	}
	changed := make(chan os.Signal, 1)
	signal.Notify(changed, syscall.SIGWINCH)
	stop := make(chan struct{})
	go func() {
		for {
			select {
			case <-stop:
				return
			case <-changed:
				_ = p.Resize(ctx, *terminalSize()) // of an ended command: nothing to resize
			}
		}
	}()
	done := false
	return func() {
		if done {
			return
		}
		done = true
		signal.Stop(changed)
		close(stop)
		_ = term.Restore(fd, old)
	}, nil
}
