package agent

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"io"
	"log/slog"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/guest"
	"github.com/opendsec/dsec/internal/version"
)

// Agent answers a node for one machine.
type Agent struct {
	dir    string // everything of ours is in it
	groups group  // control group below which everything is
	boot   string
	log    *slog.Logger
	reaper *reaper
	// service: the machine has an init of its own, and is the sandbox.
	service bool

	// starting is held for reading while a command starts, for writing to freeze.
	starting sync.RWMutex

	mounting sync.Mutex // one mount at a time

	reports chan struct{} // closed when the machine is found to report free memory to its host
	damon   damon         // of who holds starting for writing, and of giveBack, which holds it for reading

	mu        sync.Mutex
	lingering map[group]struct{} // of commands that have ended and left somebody
	resumed   bool
	frozen    bool
	told      guest.Resume // the last
	mounted   []byte       // JSON of the Mount
	sandbox   *sandbox     // nil before mount
	commands  map[string]*execution
}

func newAgent(dir string, groups group, log *slog.Logger) *Agent {
	var id [12]byte
	_, _ = rand.Read(id[:]) // never errs
	return &Agent{dir: dir, groups: groups, boot: hex.EncodeToString(id[:]), log: log, reaper: newReaper(), reports: make(chan struct{}),
		damon: damon{kernelFiles: machineFiles, log: log, unfit: true}, commands: map[string]*execution{}, lingering: map[group]struct{}{}}
}

// serve answers hosts until the channel is gone.
func (a *Agent) serve(channel io.ReadWriter) error {
	ctx, cancel := context.WithCancel(context.Background())
	var side sync.WaitGroup
	side.Go(func() { a.giveBack(ctx, machineFiles) })
	err := guest.Serve(ctx, channel, a)
	cancel()
	side.Wait()
	return err
}

// Greet implements guest.Server.
func (a *Agent) Greet() guest.Hello {
	return guest.Hello{Program: version.Version, Boot: a.boot, State: a.state()}
}

func (a *Agent) state() guest.State {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.sandbox != nil && a.sandbox.hasEnded():
		return guest.Ended
	case a.frozen:
		return guest.Frozen
	case a.sandbox != nil:
		return guest.Running
	case a.resumed:
		return guest.Empty
	}
	return guest.Fresh
}

// Handle implements guest.Server.
func (a *Agent) Handle(ctx context.Context, s *guest.Stream) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	q, err := guest.ReadRequest(s)
	if err != nil {
		return
	}
	if h := a.streaming(q.Op); h != nil {
		if err := h(ctx, s, q); err != nil {
			a.say(s, guest.Answer{Error: guest.NewFault(err)})
		}
		return
	}
	go func() { // who gives up is not answered
		select {
		case <-s.Over():
			cancel()
		case <-ctx.Done():
		}
	}()
	answer, err := a.answer(ctx, q)
	if err != nil {
		answer.Error = guest.NewFault(err)
	}
	a.say(s, answer)
}

func (a *Agent) say(s *guest.Stream, answer guest.Answer) {
	if err := guest.WriteMessage(s, answer); err == nil {
		_ = s.CloseWrite() // who is gone needs no end
	}
}

// streaming are the operations whose streams go on after the answer, or that
// answer by themselves. An error is answered for them.
func (a *Agent) streaming(op string) func(context.Context, *guest.Stream, guest.Request) error {
	switch op {
	case guest.OpStdin:
		return a.stdin
	case guest.OpFollow:
		return a.follow
	case guest.OpKept:
		return a.kept
	case guest.OpFiles:
		return a.files
	case guest.OpDial:
		return a.dial
	}
	return nil
}

func (a *Agent) answer(ctx context.Context, q guest.Request) (guest.Answer, error) {
	switch q.Op {
	case guest.OpResume:
		return guest.Answer{}, a.resume(q)
	case guest.OpFreeze:
		return guest.Answer{}, a.freeze(ctx, q.Sync)
	case guest.OpMount:
		return guest.Answer{}, a.mount(ctx, q)
	case guest.OpExec:
		return a.exec(q)
	case guest.OpList:
		return guest.Answer{Execs: a.list()}, nil
	case guest.OpStats:
		s, err := a.stats()
		return guest.Answer{Stats: s}, err
	case guest.OpEnded:
		why, err := a.ended(ctx)
		return guest.Answer{Ending: why}, err
	case guest.OpShutdown:
		return guest.Answer{}, a.shutdown(ctx, q.Grace)
	}
	return a.command(ctx, q)
}

// command serves what is asked of one command.
func (a *Agent) command(ctx context.Context, q guest.Request) (guest.Answer, error) {
	if q.Op == guest.OpRelease {
		return guest.Answer{}, a.release(q.ID)
	}
	e, err := a.find(q.ID)
	if err != nil {
		return guest.Answer{}, err
	}
	switch q.Op {
	case guest.OpFind:
		c := guest.NewCommand(e.spec)
		return guest.Answer{Spec: &c, Started: e.begun}, nil
	case guest.OpClose:
		return guest.Answer{}, e.closeStdin()
	case guest.OpSignal:
		return guest.Answer{}, e.signal(q.Signal)
	case guest.OpKill:
		e.end(killed)
		return guest.Answer{}, nil
	case guest.OpResize:
		return guest.Answer{}, e.resize(q.Size)
	case guest.OpWait:
		select {
		case <-e.done:
			return guest.Answer{Result: &e.res}, nil
		case <-ctx.Done():
			return guest.Answer{}, dsec.E(dsec.Canceled, "wait for exec", q.ID, ctx.Err())
		}
	}
	return guest.Answer{}, dsec.Errorf(dsec.Unsupported, "serve request", dsec.Quote(q.Op), "not an operation of this version")
}

func (a *Agent) find(id string) (*execution, error) {
	a.mu.Lock()
	e := a.commands[id]
	a.mu.Unlock()
	if e != nil {
		<-e.started
		if e.failed == nil {
			return e, nil
		}
	}
	return nil, dsec.E(dsec.NotFound, "find exec", dsec.Quote(id), nil)
}

func (a *Agent) list() []string {
	var ids []string
	for _, e := range a.all() {
		select {
		case <-e.started:
			if e.failed == nil {
				ids = append(ids, e.spec.ID)
			}
		default: // not yet
		}
	}
	slices.Sort(ids)
	return ids
}

func (a *Agent) all() (all []*execution) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, e := range a.commands {
		all = append(all, e)
	}
	return all
}

// live returns the sandbox if commands may be started in it.
func (a *Agent) live(op string) (*sandbox, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.sandbox == nil:
		return nil, dsec.Errorf(dsec.IllegalState, op, "", "there is no sandbox yet")
	case a.sandbox.hasEnded() || a.sandbox.isStopping():
		return nil, dsec.Errorf(dsec.SandboxGone, op, "", "the sandbox has ended")
	case a.frozen || !a.resumed:
		return nil, dsec.Errorf(dsec.IllegalState, op, "", "the sandbox is frozen")
	}
	return a.sandbox, nil
}

// classOf what the kernel answered.
func classOf(err error) dsec.Class {
	for class, all := range map[dsec.Class][]error{
		dsec.FileNotFound:      {unix.ENOENT, unix.ENOTDIR, unix.ELOOP},
		dsec.PermissionDenied:  {unix.EACCES, unix.EPERM},
		dsec.Invalid:           {unix.E2BIG, unix.ENOEXEC, unix.EINVAL, unix.ENAMETOOLONG, unix.ETXTBSY, unix.EISDIR},
		dsec.ResourceExhausted: {unix.EAGAIN, unix.ENOMEM, unix.EMFILE, unix.ENFILE},
		dsec.NoSpace:           {unix.ENOSPC, unix.EDQUOT},
	} {
		for _, e := range all {
			if errors.Is(err, e) {
				return class
			}
		}
	}
	return dsec.ClassOf(err)
}
