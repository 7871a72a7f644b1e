package bench

import (
	"context"
	"fmt"
	"os/exec"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// PlainExec is the least an exec into namespaces can cost from this language:
// a thread joins all but the user namespace of the process pid (the kernel
// refuses that one to programs with threads), forks and executes argv there,
// with no limit, filter, output file or deadline.
func PlainExec(pid int, argv []string) Contender {
	return Contender{Name: "setns", Worker: func(int) (Worker, error) { return plainWorker{pid, argv}, nil }}
}

type plainWorker struct {
	pid  int
	argv []string
}

func (w plainWorker) Close() error { return nil }

func (w plainWorker) Cycle(ctx context.Context, _ int) (took time.Duration, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked: a thread in foreign namespaces must end
		begin := time.Now()
		err = w.run(ctx)
		took = time.Since(begin)
	}()
	<-done
	return took, err
}

func (w plainWorker) run(ctx context.Context) error {
	fd, err := unix.PidfdOpen(w.pid, 0)
	if err != nil {
		return fmt.Errorf("open process %d: %w", w.pid, err)
	}
	defer unix.Close(fd)
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("unshare fs: %w", err)
	}
	const join = unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWNET | unix.CLONE_NEWCGROUP
	if err := unix.Setns(fd, join); err != nil {
		return fmt.Errorf("join process %d: %w", w.pid, err)
	}
	return exec.CommandContext(ctx, w.argv[0], w.argv[1:]...).Run()
}
