package cgroup

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// watcher waits for changes of control files. One inotify descriptor serves
// all waiters of a Root, because root may have only 128 of them.
type watcher struct {
	f    *os.File
	fd   int
	done chan struct{}

	mu      sync.Mutex
	waiters map[int32]map[chan struct{}]bool // by watch descriptor
}

func newWatcher() (*watcher, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, os.NewSyscallError("inotify_init", err)
	}
	w := &watcher{f: os.NewFile(uintptr(fd), "inotify"), fd: fd, done: make(chan struct{}),
		waiters: map[int32]map[chan struct{}]bool{}}
	go w.run()
	return w, nil
}

func (w *watcher) close() {
	_ = w.f.Close()
	<-w.done
}

func (w *watcher) run() {
	defer close(w.done)
	buf := make([]byte, 64<<10)
	for {
		n, err := w.f.Read(buf)
		if err != nil {
			return
		}
		w.mu.Lock()
		for b := buf[:n]; len(b) >= unix.SizeofInotifyEvent; {
			wd := int32(binary.NativeEndian.Uint32(b))
			if binary.NativeEndian.Uint32(b[4:])&unix.IN_Q_OVERFLOW != 0 {
				for _, set := range w.waiters {
					wake(set)
				}
			}
			wake(w.waiters[wd])
			b = b[unix.SizeofInotifyEvent+binary.NativeEndian.Uint32(b[12:]):]
		}
		w.mu.Unlock()
	}
}

func wake(set map[chan struct{}]bool) {
	for c := range set {
		select {
		case c <- struct{}{}:
		default: // it has a wake-up it has not looked at
		}
	}
}

// until calls check now and whenever the file changes or vanishes, until it
// says true or errs.
func (w *watcher) until(ctx context.Context, path string, check func() (bool, error)) error {
	if ok, err := check(); ok || err != nil {
		return err
	}
	c := make(chan struct{}, 1)
	wd, err := w.add(path, c)
	if errors.Is(err, unix.ENOENT) {
		_, err = check()
		return err
	}
	if err != nil {
		return &os.PathError{Op: "watch", Path: path, Err: err}
	}
	defer w.remove(wd, c)
	for {
		if ok, err := check(); ok || err != nil {
			return err
		}
		select {
		case <-c:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (w *watcher) add(path string, c chan struct{}) (int32, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	n, err := unix.InotifyAddWatch(w.fd, path, unix.IN_MODIFY|unix.IN_DELETE_SELF)
	if err != nil {
		return 0, err
	}
	wd := int32(n)
	if w.waiters[wd] == nil {
		w.waiters[wd] = map[chan struct{}]bool{}
	}
	w.waiters[wd][c] = true
	return wd, nil
}

func (w *watcher) remove(wd int32, c chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.waiters[wd], c)
	if len(w.waiters[wd]) == 0 {
		delete(w.waiters, wd)
		_, _ = unix.InotifyRmWatch(w.fd, uint32(wd)) // gone by itself if the file is
	}
}
