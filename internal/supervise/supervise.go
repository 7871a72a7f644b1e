// Package supervise keeps the processes of one machine running: it starts them
// in order, waits until each says it is ready, starts one again that ends, and
// ends them in reverse order.
//
// A child gets two descriptors before those it asked for: LifelineFD reads
// end-of-file when the supervisor is gone, whatever killed it, and a line
// written to ReadyFD says that the child serves. The child side is Join.
package supervise

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// Descriptors every child has.
const (
	LifelineFD = 3
	ReadyFD    = 4
	FirstFD    = 5 // Files[0] of the child
)

// Child is a process to keep running.
type Child struct {
	Name  string
	Argv  []string
	Env   []string // added to the supervisor's
	Files []*os.File
	UID   int // 0 keeps root
	GID   int
	Caps  []uintptr     // capabilities that one who is not root has; none if empty
	Ready time.Duration // how long a start may take
	Grace time.Duration // between SIGTERM and SIGKILL
}

const (
	firstBackoff = 100 * time.Millisecond
	mostBackoff  = 10 * time.Second
	healthyAfter = 30 * time.Second
)

// Run starts the children in order and keeps them until ctx ends, then ends
// them in reverse order. started is called once when all are ready. A child
// that does not become ready on its first start is an error; later ends are
// met by starting it again.
func Run(ctx context.Context, children []Child, started func()) error {
	var running []*keeper
	defer func() {
		for i := len(running) - 1; i >= 0; i-- {
			running[i].stop()
		}
	}()
	for _, c := range children {
		k := &keeper{child: c, quit: make(chan struct{}), done: make(chan struct{})}
		if err := k.start(ctx); err != nil {
			return fmt.Errorf("start %s: %w", c.Name, err)
		}
		running = append(running, k)
		go k.keep()
	}
	started()
	<-ctx.Done()
	return nil
}

// keeper owns one child: keep is its only goroutine.
type keeper struct {
	child Child
	cmd   *exec.Cmd
	life  *os.File // closing it tells the child that we are gone
	ended chan error
	quit  chan struct{}
	done  chan struct{}
}

func (k *keeper) start(ctx context.Context) error {
	lifeR, lifeW, err := os.Pipe()
	if err != nil {
		return err
	}
	readyR, readyW, err := os.Pipe()
	if err != nil {
		lifeR.Close()
		lifeW.Close()
		return err
	}
	defer readyR.Close()
	c := k.child
	cmd := exec.Command(c.Argv[0], c.Argv[1:]...)
	cmd.Env = append(os.Environ(), c.Env...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.ExtraFiles = append([]*os.File{lifeR, readyW}, c.Files...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // a Ctrl-C reaches the supervisor only
	if c.UID != 0 {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(c.UID), Gid: uint32(c.GID)}
		cmd.SysProcAttr.AmbientCaps = c.Caps
	}
	err = cmd.Start()
	lifeR.Close()
	readyW.Close()
	if err != nil {
		lifeW.Close()
		return err
	}
	k.cmd, k.life = cmd, lifeW
	k.ended = make(chan error, 1)
	go func() { k.ended <- cmd.Wait() }()
	if err := k.waitReady(ctx, readyR); err != nil {
		k.end()
		return err
	}
	slog.Info("child ready", "name", c.Name, "pid", cmd.Process.Pid)
	return nil
}

func (k *keeper) waitReady(ctx context.Context, r *os.File) error {
	said := make(chan error, 1)
	go func() {
		_, err := r.Read(make([]byte, 1))
		said <- err
	}()
	timer := time.NewTimer(k.child.Ready)
	defer timer.Stop()
	select {
	case err := <-said:
		if errors.Is(err, io.EOF) {
			return errors.New("ended before it was ready, see its log above")
		}
		return err
	case <-timer.C:
		return fmt.Errorf("not ready after %v", k.child.Ready)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// keep starts the child again whenever it ends, until quit.
func (k *keeper) keep() {
	defer close(k.done)
	backoff := firstBackoff
	for {
		begin := time.Now()
		select {
		case <-k.quit:
			k.end()
			return
		case err := <-k.ended:
			k.life.Close()
			slog.Error("child ended", "name", k.child.Name, "err", err)
		}
		if time.Since(begin) > healthyAfter {
			backoff = firstBackoff
		}
		for {
			select {
			case <-k.quit:
				return
			case <-time.After(backoff):
			}
			backoff = min(2*backoff, mostBackoff)
			err := k.start(context.Background())
			if err == nil {
				break
			}
			slog.Error("start child again", "name", k.child.Name, "err", err)
		}
	}
}

func (k *keeper) stop() {
	close(k.quit)
	<-k.done
}

// end asks the child to end, then makes it.
func (k *keeper) end() {
	defer k.life.Close()
	_ = k.cmd.Process.Signal(syscall.SIGTERM) // an error means it has ended
	timer := time.NewTimer(k.child.Grace)
	defer timer.Stop()
	select {
	case <-k.ended:
	case <-timer.C:
		slog.Warn("child does not end, killing it", "name", k.child.Name)
		_ = k.cmd.Process.Kill()
		<-k.ended
	}
}

// Join is the child's side: the context ends when the supervisor is gone or
// ends this process, and ready tells the supervisor that this child serves.
func Join(parent context.Context) (ctx context.Context, ready func() error) {
	ctx, cancel := context.WithCancelCause(parent)
	life := os.NewFile(LifelineFD, "lifeline")
	tell := os.NewFile(ReadyFD, "ready")
	go func() {
		_, err := life.Read(make([]byte, 1))
		cancel(fmt.Errorf("supervisor is gone: %w", err))
	}()
	return ctx, func() error {
		_, err := tell.Write([]byte("\n"))
		return errors.Join(err, tell.Close())
	}
}
