package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/files"
	"github.com/opendsec/dsec/process"
	dsecruntime "github.com/opendsec/dsec/runtime"
)

// Throughput is how fast bytes went, beside a plain way on the same machine.
type Throughput struct {
	Name  string        `json:"name"`
	Bytes int64         `json:"bytes"`
	Took  time.Duration `json:"took"`
	Plain time.Duration `json:"plain"` // the same bytes the plain way
	Way   string        `json:"way"`   // what the plain way is
}

func (t Throughput) String() string {
	rate := func(d time.Duration) float64 { return float64(t.Bytes) / (1 << 20) / d.Seconds() }
	return fmt.Sprintf("%-9s %5d MiB at %6.0f MiB/s; %s: %6.0f MiB/s; %.2fx", t.Name, t.Bytes>>20, rate(t.Took), t.Way, rate(t.Plain),
		t.Plain.Seconds()/t.Took.Seconds())
}

// streamPiece is what the command of Stream writes at once, in bytes.
const streamPiece = 64 << 10

// Stream follows a command that prints n bytes, a multiple of streamPiece, and reads a pipe of the same
// command beside it.
func (r Runtime) Stream(ctx context.Context, id dsec.SandboxID, n int64) (Throughput, error) {
	t := Throughput{Name: "stream", Bytes: n, Way: "a pipe"}
	// Busybox's head goes byte by byte and would be what is measured.
	argv := []string{"/bin/sh", "-c", fmt.Sprintf("exec dd if=/dev/zero bs=%d count=%d 2>/dev/null", streamPiece, n/streamPiece)}
	ex, ok := r.RT.(dsecruntime.Execer)
	if !ok {
		return t, dsec.Errorf(dsec.Unsupported, "bench stream", r.Name, "the tier cannot run commands")
	}
	begin := time.Now()
	p, err := ex.Exec(ctx, id, process.Spec{Argv: argv})
	if err != nil {
		return t, err
	}
	defer func() { _ = p.Release(context.WithoutCancel(ctx)) }()
	follow, err := p.Follow(ctx, process.Stdout, 0)
	if err != nil {
		return t, err
	}
	defer follow.Close()
	var got int64
	for {
		c, err := follow.Next(ctx)
		if err != nil {
			return t, err
		}
		got += int64(len(c.Data))
		if c.EOF {
			break
		}
	}
	t.Took = time.Since(begin)
	if got != n {
		return t, fmt.Errorf("bench stream: %d bytes of %d: some were dropped while they were followed", got, n)
	}
	begin = time.Now()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	out, err := cmd.StdoutPipe()
	if err != nil {
		return t, err
	}
	if err := cmd.Start(); err != nil {
		return t, err
	}
	_, err = io.Copy(io.Discard, struct{ io.Reader }{out})
	t.Plain = time.Since(begin)
	return t, errors.Join(err, cmd.Wait())
}

// Files writes n bytes into a sandbox and reads them back, and does the same to
// a file in dir beside it.
func (r Runtime) Files(ctx context.Context, id dsec.SandboxID, n int64, dir string) (up, down Throughput, err error) {
	up = Throughput{Name: "upload", Bytes: n, Way: "a file"}
	down = Throughput{Name: "download", Bytes: n, Way: "a file"}
	fl, ok := r.RT.(dsecruntime.Filer)
	if !ok {
		return up, down, dsec.Errorf(dsec.Unsupported, "bench files", r.Name, "the tier has no files")
	}
	fsys, err := fl.Files(ctx, id, "")
	if err != nil {
		return up, down, err
	}
	begin := time.Now()
	if _, err := fsys.Write(ctx, "/big", io.LimitReader(zeros{}, n), files.WriteOptions{}); err != nil {
		return up, down, err
	}
	up.Took = time.Since(begin)
	begin = time.Now()
	if _, err := fsys.Read(ctx, "/big", 0, -1, io.Discard); err != nil {
		return up, down, err
	}
	down.Took = time.Since(begin)
	f, err := os.CreateTemp(dir, "plain")
	if err != nil {
		return up, down, err
	}
	defer os.Remove(f.Name())
	defer f.Close()
	begin = time.Now()
	if _, err := io.Copy(f, io.LimitReader(zeros{}, n)); err != nil {
		return up, down, err
	}
	up.Plain = time.Since(begin)
	begin = time.Now()
	_, err = io.Copy(io.Discard, io.NewSectionReader(f, 0, n))
	down.Plain = time.Since(begin)
	return up, down, err
}

// zeros never ends.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}
