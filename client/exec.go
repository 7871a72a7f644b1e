package client

import (
	"context"
	"io"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
	"github.com/opendsec/dsec/internal/within"
	"github.com/opendsec/dsec/process"
)

// Process is a command in a sandbox. It runs on whatever becomes of the
// client; Attach finds it again.
type Process struct {
	Sandbox dsec.SandboxID
	ID      string

	c  *Client
	mu sync.Mutex
	in int64 // bytes of stdin written
}

// Exec starts a command. s.ID is the key of the call; "" makes one.
func (c *Client) Exec(ctx context.Context, id dsec.SandboxID, s process.Spec) (*Process, error) {
	return c.start(ctx, id, s, nil)
}

func (c *Client) start(ctx context.Context, id dsec.SandboxID, s process.Spec, sub *dsecv1.Subscription) (*Process, error) {
	if s.ID == "" {
		s.ID = newKey()
	}
	err := c.retry(ctx, "exec", func() error {
		_, err := c.commands.Exec(ctx, &dsecv1.ExecRequest{Sandbox: string(id), Spec: wire.ExecSpec(s), CallId: s.ID, Subscribe: sub})
		return err
	})
	if err != nil {
		return nil, err
	}
	return c.Attach(id, s.ID), nil
}

// Attach names a command that was started before. Stdin that was written by
// another client is not known here: use it for commands without one.
func (c *Client) Attach(id dsec.SandboxID, exec string) *Process {
	return &Process{Sandbox: id, ID: exec, c: c}
}

const (
	waitPiece  = 60 * time.Second
	stdinPiece = 256 << 10
)

// Wait returns how the command ended.
func (p *Process) Wait(ctx context.Context) (process.Result, error) {
	for {
		resp, err := p.wait(ctx, false)
		if err != nil {
			return process.Result{}, err
		}
		if resp.Result != nil {
			return wire.ExecResultFrom(resp.Result), nil
		}
	}
}

func (p *Process) wait(ctx context.Context, kept bool) (resp *dsecv1.WaitResponse, err error) {
	err = p.c.retry(ctx, "wait for exec", func() (err error) {
		resp, err = p.c.commands.Wait(ctx, &dsecv1.WaitRequest{Sandbox: string(p.Sandbox), Exec: p.ID,
			Timeout: waitPiece.Seconds(), Kept: kept})
		return err
	})
	return resp, err
}

// Kept is what the platform keeps of a stream.
type Kept struct {
	Head, Tail []byte
	TailOffset int64 // of Tail; the length of Head if they join
}

func kept(p *dsecv1.KeptOutput) Kept {
	return Kept{Head: p.GetHead(), Tail: p.GetTail(), TailOffset: p.GetTailOffset()}
}

// Kept returns the kept output of both streams.
func (p *Process) Kept(ctx context.Context) (stdout, stderr Kept, err error) {
	var resp *dsecv1.KeptResponse
	err = p.c.retry(ctx, "read kept output", func() (err error) {
		resp, err = p.c.commands.Kept(ctx, &dsecv1.KeptRequest{Sandbox: string(p.Sandbox), Exec: p.ID})
		return err
	})
	return kept(resp.GetStdout()), kept(resp.GetStderr()), err
}

// Chunk is a piece of output. Offset is beyond the end of the one before when
// bytes in between are gone.
type Chunk struct {
	Stream process.Stream
	Offset int64
	Data   []byte
	EOF    bool
}

// Offsets say where to follow from.
type Offsets struct{ Stdout, Stderr int64 }

func (o *Offsets) moved(c Chunk) {
	end := c.Offset + int64(len(c.Data))
	if c.Stream == process.Stderr {
		o.Stderr = end
	} else {
		o.Stdout = end
	}
}

// Follow calls fn with the output of both streams from the offsets on, and
// returns how the command ended. When the connection breaks it goes on from
// where it was, as long as the platform comes back within the retries; what
// fn got, it does not get again.
func (p *Process) Follow(ctx context.Context, from Offsets, fn func(Chunk) error) (process.Result, error) {
	pause := firstPause
	for try := 0; ; try++ {
		before := from
		var ferr error
		res, err := p.follow(ctx, from, func(c Chunk) error {
			from.moved(c)
			ferr = fn(c)
			return ferr
		})
		if err == nil || ferr != nil {
			return res, err
		}
		if from != before {
			try, pause = 0, firstPause
		}
		if dsec.ClassOf(err) != dsec.Unavailable || try >= p.c.retries || within.Sleep(ctx, pause) != nil {
			return process.Result{}, err
		}
		pause *= 4
	}
}

func (p *Process) follow(ctx context.Context, from Offsets, fn func(Chunk) error) (process.Result, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	quiet := p.c.newSilence(cancel)
	defer quiet.stop()
	stream, err := p.c.commands.Output(ctx, &dsecv1.OutputRequest{Sandbox: string(p.Sandbox), Exec: p.ID,
		StdoutOffset: from.Stdout, StderrOffset: from.Stderr})
	if err != nil {
		return process.Result{}, quiet.blame("follow output", p.ID, wire.FromConnect("follow output", err))
	}
	defer stream.Close()
	for stream.Receive() {
		quiet.stop()
		m := stream.Msg()
		if r := m.GetResult(); r != nil {
			return wire.ExecResultFrom(r), nil
		}
		if c := m.GetChunk(); c != nil {
			chunk, err := chunkFrom(c)
			if err == nil {
				err = fn(chunk)
			}
			if err != nil {
				return process.Result{}, err
			}
		}
		quiet.restart()
	}
	if err := stream.Err(); err != nil {
		return process.Result{}, quiet.blame("follow output", p.ID, wire.FromConnect("follow output", err))
	}
	return process.Result{}, dsec.Errorf(dsec.Unavailable, "follow output", p.ID, "the stream ended without a result")
}

func chunkFrom(c *dsecv1.OutputChunk) (Chunk, error) {
	st, err := wire.StreamFrom(c.Stream)
	return Chunk{Stream: st, Offset: c.Offset, Data: c.Data, EOF: c.Eof}, err
}

// Write feeds stdin, and blocks while the command does not read. It is for one
// goroutine.
func (p *Process) Write(ctx context.Context, b []byte) error {
	for first := true; first || len(b) > 0; first = false {
		piece := b[:min(len(b), stdinPiece)]
		if err := p.feed(ctx, piece, false); err != nil {
			return err
		}
		b = b[len(piece):]
	}
	return nil
}

func (p *Process) feed(ctx context.Context, b []byte, end bool) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	at := p.in
	err := p.c.retry(ctx, "write stdin", func() error {
		_, err := p.c.commands.WriteStdin(ctx, &dsecv1.WriteStdinRequest{Sandbox: string(p.Sandbox), Exec: p.ID, Data: b,
			Offset: &at, Close: end})
		return err
	})
	if err == nil {
		p.in += int64(len(b))
	}
	return err
}

// CloseStdin is the end of the command's input.
func (p *Process) CloseStdin(ctx context.Context) error {
	return p.c.retry(ctx, "close stdin", func() error {
		_, err := p.c.commands.CloseStdin(ctx, &dsecv1.CloseStdinRequest{Sandbox: string(p.Sandbox), Exec: p.ID})
		return err
	})
}

// Feed streams r into stdin and closes it at its end.
func (p *Process) Feed(ctx context.Context, r io.Reader) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	counted := &counter{r: r}
	path := sandboxPath(p.Sandbox) + "/execs/" + p.ID + "/stdin?close=1&offset=" + strconv.FormatInt(p.in, 10)
	resp, err := p.c.raw(ctx, http.MethodPut, path, counted) // silence is the command's right
	p.in += counted.n
	if err != nil {
		return err
	}
	return answer("write stdin", resp, nil)
}

type counter struct {
	r io.Reader
	n int64
}

func (c *counter) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += int64(n)
	return n, err
}

// Signal reaches the main process.
func (p *Process) Signal(ctx context.Context, sig int) error {
	req := &dsecv1.SignalRequest{Sandbox: string(p.Sandbox), Exec: p.ID, Signal: int32(sig), CallId: newKey()}
	return p.c.retry(ctx, "signal exec", func() error {
		_, err := p.c.commands.Signal(ctx, req)
		return err
	})
}

// Kill ends the whole tree; killed is false if it had ended.
func (p *Process) Kill(ctx context.Context) (killed bool, err error) {
	var resp *dsecv1.KillResponse
	req := &dsecv1.KillRequest{Sandbox: string(p.Sandbox), Exec: p.ID, CallId: newKey()}
	err = p.c.retry(ctx, "kill exec", func() (err error) {
		resp, err = p.c.commands.Kill(ctx, req)
		return err
	})
	return resp.GetKilled(), err
}

// Resize its terminal.
func (p *Process) Resize(ctx context.Context, s process.Size) error {
	return p.c.retry(ctx, "resize terminal", func() error {
		_, err := p.c.commands.Resize(ctx, &dsecv1.ResizeRequest{Sandbox: string(p.Sandbox), Exec: p.ID, Size: wire.Size(s)})
		return err
	})
}

// Release forgets an ended command and its kept output.
func (p *Process) Release(ctx context.Context) error {
	return p.c.retry(ctx, "release exec", func() error {
		_, err := p.c.commands.Release(ctx, &dsecv1.ReleaseRequest{Sandbox: string(p.Sandbox), Exec: p.ID})
		return err
	})
}

// Run starts a command, copies its output as it comes, and returns how it
// ended. A nil writer drops its stream.
func (c *Client) Run(ctx context.Context, id dsec.SandboxID, s process.Spec, stdout, stderr io.Writer) (process.Result, error) {
	p, err := c.Exec(ctx, id, s)
	if err != nil {
		return process.Result{}, err
	}
	return p.Follow(ctx, Offsets{}, func(ch Chunk) error {
		w := stdout
		if ch.Stream == process.Stderr {
			w = stderr
		}
		if w == nil {
			return nil
		}
		_, err := w.Write(ch.Data)
		return err
	})
}
