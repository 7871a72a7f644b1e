package hold

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/linux"
)

//go:embed all:native/bin
var nativeBin embed.FS

// errNotBuilt says that a binary was not there when this program was built.
var errNotBuilt = errors.New("not embedded in this binary: build with make")

// forker is one single-threaded process that forks for us. It serves one
// request at a time.
type forker struct {
	ended chan struct{} // closed when it was reaped

	one sync.Mutex // held by a request that waits for its answer

	mu   sync.Mutex
	c    *packets
	proc *os.Process
}

func (k *forker) conn() *packets {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.c
}

// forkerImage is a sealed memfd with the C program.
func forkerImage() (*os.File, error) {
	b, err := nativeBin.ReadFile("native/bin/forker-" + runtime.GOARCH)
	if err != nil {
		return nil, dsec.E(dsec.Unsupported, "start forker", runtime.GOARCH, errNotBuilt)
	}
	return linux.SealedFile("init", b)
}

// startForker must run on a thread that lives as long as we do: the kernel ties
// "kill the child when the parent dies" to the thread.
func startForker(image *os.File) (k *forker, err error) {
	c, theirs, err := packetPair()
	if err != nil {
		return nil, err
	}
	defer func() {
		if _ = theirs.Close(); err != nil {
			_ = c.Close()
		}
	}()
	proc, err := os.OpenFile("/proc", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = proc.Close() }()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = null.Close() }()
	p, err := os.StartProcess(fmt.Sprintf("/proc/self/fd/%d", fdOf(image)), []string{"init"}, &os.ProcAttr{
		Dir: "/", Env: []string{}, Files: []*os.File{null, null, null, theirs, proc},
		Sys: &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL},
	})
	if err != nil {
		return nil, dsec.E(dsec.Internal, "start forker", "", err)
	}
	return &forker{c: c, proc: p, ended: make(chan struct{})}, nil
}

// exec sends an exec request, which the forker does not answer itself. One that
// was killed is given the time to be replaced.
func (k *forker) exec(image []byte, tasks int, files []*os.File) error {
	var flags uint32
	if len(image) > inlineImage {
		m, err := linux.SealedFile("exec", image)
		if err != nil {
			return err
		}
		defer func() { _ = m.Close() }()
		flags, image, files = nativeMemfd, nil, append([]*os.File{m}, files...)
	}
	b := append(request(nativeExec, flags, 0, tasks), image...)
	limit := time.Now().Add(respawnWait)
	for {
		err := k.conn().send(b, files)
		if err == nil {
			return nil
		}
		if time.Now().After(limit) {
			return dsec.E(dsec.Internal, "ask forker", "", err)
		}
		time.Sleep(time.Millisecond) // rare, and nothing tells when it is there
	}
}

// call sends a request and waits for its answer.
func (k *forker) call(req []byte, files []*os.File) (answer, *os.File, error) {
	k.one.Lock()
	defer k.one.Unlock()
	c := k.conn()
	if err := c.send(req, files); err != nil {
		return answer{}, nil, dsec.E(dsec.Internal, "ask forker", "", err)
	}
	a, got, err := c.answer()
	if err != nil {
		return answer{}, nil, dsec.E(dsec.Internal, "ask forker", "", err)
	}
	if len(got) > 0 {
		return a, got[0], nil
	}
	return a, nil, nil
}

// respawnWait is how long the replacement of a killed forker may take.
const respawnWait = 2 * time.Second

// startForkers must run on the thread that own runs on.
func (s *server) startForkers(n int) error {
	var all []*forker
	for range n {
		k, err := startForker(s.image)
		if err != nil {
			return err
		}
		all = append(all, k)
	}
	s.employ(all)
	return nil
}

func (s *server) employ(all []*forker) {
	s.forkers, s.all = make(chan *forker, len(all)), all
	for _, k := range all {
		s.forkers <- k
		go s.watchForker(k)
	}
}

// watchForker notices the end of a forker. None ends by itself while we live;
// one that was killed is replaced by the thread that owns them.
func (s *server) watchForker(k *forker) {
	for {
		k.mu.Lock()
		proc := k.proc
		k.mu.Unlock()
		st, err := proc.Wait()
		select {
		case <-s.quit:
			close(k.ended)
			return
		default:
		}
		s.log.Error("forker ended", "pid", proc.Pid, "state", st, "error", err)
		again := make(chan struct{})
		ask := s.respawn
		for again != nil {
			select {
			case ask <- respawn{k, again}:
				ask = nil
			case <-again:
				again = nil
			case <-s.quit:
				close(k.ended)
				return
			}
		}
	}
}

// respawn asks for a new process behind a forker.
type respawn struct {
	k    *forker
	done chan struct{}
}

// own runs on the thread whose children forkers and sandboxes are, until quit.
func (s *server) own() {
	for {
		select {
		case <-s.quit:
			return
		case r := <-s.respawn:
			n, err := startForker(s.image)
			if err != nil {
				s.log.Error("start forker", "error", err)
				s.stop()
				return
			}
			r.k.mu.Lock()
			_ = r.k.c.Close()
			r.k.c, r.k.proc = n.c, n.proc
			r.k.mu.Unlock()
			close(r.done)
		case b := <-s.births:
			b.begin()
		case r := <-s.replace:
			r.failed <- s.become(r.binary)
		}
	}
}

// withForker lends an idle forker.
func (s *server) withForker(ctx context.Context, f func(*forker) error) error {
	select {
	case k := <-s.forkers:
		defer func() { s.forkers <- k }()
		return f(k)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// anyForker is for requests that are not answered by the forker itself.
func (s *server) anyForker() *forker {
	return s.all[int(s.turn.Add(1))%len(s.all)]
}

// endForkers waits for their end, so that nothing of us is left when we are gone.
func (s *server) endForkers() {
	for range cap(s.forkers) {
		k := <-s.forkers
		_ = k.conn().Close()
		<-k.ended
	}
}
