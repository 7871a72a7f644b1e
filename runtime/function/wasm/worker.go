package wasm

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	goruntime "runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
	"github.com/tetratelabs/wazero/experimental"
	"github.com/tetratelabs/wazero/imports/wasi_snapshot_preview1"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/runtime/function/wasm/meter"
)

// The descriptors of a worker: its socket, then control group files.
const (
	fdSocket = 3
	fdTasks  = 4
)

const maxPages = 65536 // of 64 KiB: all there can be; how many a call has its memory says

// Main is the worker process. It returns the exit status.
func Main(args []string) int {
	signal.Ignore(syscall.SIGINT) // a terminal's reaches the whole group
	if err := confine(args); err != nil {
		fmt.Fprintln(os.Stderr, "confine worker:", err)
		return 1
	}
	f := os.NewFile(fdSocket, "host")
	conn, err := net.FileConn(f)
	_ = f.Close()
	if err != nil {
		fmt.Fprintln(os.Stderr, "open socket:", err)
		return 1
	}
	if err := serve(conn); err != nil && !errors.Is(err, io.EOF) {
		fmt.Fprintln(os.Stderr, "serve modules:", err)
		return 1
	}
	return 0
}

// confine gives up what running modules does not need: "UID MEMORY TASKS ROOT".
func confine(args []string) error {
	if len(args) != 4 {
		return errors.New("started by hand")
	}
	var n [3]int64
	for i := range n {
		var err error
		if n[i], err = strconv.ParseInt(args[i], 10, 64); err != nil {
			return err
		}
	}
	uid, memory, tasks := int(n[0]), n[1], int(n[2])
	debug.SetMemoryLimit(memory / 2)
	for i := range tasks {
		if err := enter(os.NewFile(uintptr(fdTasks+i), "tasks")); err != nil {
			return err
		}
	}
	for what, limit := range map[int]uint64{unix.RLIMIT_CORE: 0, unix.RLIMIT_NOFILE: 256, unix.RLIMIT_FSIZE: 0} {
		if err := unix.Setrlimit(what, &unix.Rlimit{Cur: limit, Max: limit}); err != nil {
			return err
		}
	}
	if uid == 0 {
		return nil
	}
	if err := unix.Chroot(args[3]); err != nil {
		return fmt.Errorf("change root: %w", err)
	}
	if err := os.Chdir("/"); err != nil {
		return err
	}
	if err := errors.Join(syscall.Setgroups(nil), syscall.Setresgid(uid, uid, uid), syscall.Setresuid(uid, uid, uid)); err != nil {
		return err
	}
	if _, _, errno := syscall.AllThreadsSyscall(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0); errno == syscall.ENOTSUP {
		return unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
	} else if errno != 0 {
		return errno
	}
	return nil
}

// enter moves every thread into a v1 control group: until a pass finds no new one.
func enter(tasks *os.File) error {
	moved := map[string]bool{}
	for again := true; again; {
		again = false
		threads, err := os.ReadDir("/proc/self/task")
		if err != nil {
			return err
		}
		for _, t := range threads {
			if moved[t.Name()] {
				continue
			}
			if _, err := tasks.WriteString(t.Name()); err != nil && !errors.Is(err, unix.ESRCH) {
				return err
			}
			moved[t.Name()], again = true, true
		}
	}
	return tasks.Close()
}

// worker runs modules for one host.
type worker struct {
	conn    net.Conn
	rt      wazero.Runtime
	turns   chan struct{} // one for each processor: a clock that runs is one that works
	running sync.WaitGroup

	writing sync.Mutex

	mu      sync.Mutex
	modules map[which]*module
	order   []which // used last is last
	bytes   int
	cancels map[uint64]context.CancelCauseFunc
}

var errCancelled = errors.New("the caller went away")

func serve(conn net.Conn) error {
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(errCancelled)
	w := &worker{conn: conn, turns: make(chan struct{}, goruntime.GOMAXPROCS(0)), modules: map[which]*module{}, cancels: map[uint64]context.CancelCauseFunc{},
		rt: wazero.NewRuntimeWithConfig(ctx, wazero.NewRuntimeConfig().WithCloseOnContextDone(true).WithMemoryLimitPages(maxPages).WithDebugInfoEnabled(false))}
	if _, err := wasi_snapshot_preview1.Instantiate(ctx, w.rt); err != nil {
		return err
	}
	w.say(&answer{says: saysReady})
	in := bufio.NewReaderSize(conn, 256<<10)
	for {
		b, err := readFrame(in)
		if err == nil {
			err = w.hear(ctx, b)
		}
		if err != nil {
			cancel(errCancelled)
			w.running.Wait()
			return err
		}
	}
}

func (w *worker) hear(ctx context.Context, b []byte) error {
	says, id, rest, err := decodeHead(b)
	if err != nil {
		return err
	}
	switch says {
	case saysCall, saysTry:
		r, err := decodeRequest(id, rest)
		if err != nil {
			return err
		}
		r.try = says == saysTry
		ctx, cancel := context.WithCancelCause(ctx)
		w.mu.Lock()
		w.cancels[id] = cancel
		w.mu.Unlock()
		w.running.Go(func() {
			a := w.call(ctx, cancel, r)
			cancel(nil)
			w.mu.Lock()
			delete(w.cancels, id)
			w.mu.Unlock()
			a.id = id
			w.say(a)
		})
	case saysCancel:
		w.mu.Lock()
		cancel := w.cancels[id]
		w.mu.Unlock()
		if cancel != nil {
			cancel(errCancelled)
		}
	default:
		return errFrame
	}
	return nil
}

// say tells the host; one that is gone is noticed by reading.
func (w *worker) say(a *answer) {
	b := a.encode()
	w.writing.Lock()
	defer w.writing.Unlock()
	_, _ = w.conn.Write(b)
}

func (w *worker) call(ctx context.Context, cancel context.CancelCauseFunc, r *request) *answer {
	m := w.module(ctx, r)
	if m == nil {
		return &answer{says: saysNeed}
	}
	defer w.letGo(m)
	<-m.ready
	if m.err != nil {
		return &answer{says: saysResult, end: endModule, detail: m.err.Error()}
	}
	if r.try {
		return &answer{says: saysResult, end: endExit}
	}
	select {
	case w.turns <- struct{}{}:
		defer func() { <-w.turns }()
	case <-ctx.Done():
		return &answer{says: saysResult, end: endCancel}
	}
	a := w.run(ctx, cancel, r, m.m)
	if w.rt.Module(wasi_snapshot_preview1.ModuleName) == nil {
		fmt.Fprintln(os.Stderr, "serve modules: a module has ended what all share")
		os.Exit(1) // the next worker makes the calls again
	}
	return a
}

// run makes an instance of its own for a call, runs it and throws it away.
func (w *worker) run(ctx context.Context, cancel context.CancelCauseFunc, r *request, c wazero.CompiledModule) *answer {
	mem := &memory{limit: r.memory}
	out, errs := &output{most: r.output, end: cancel}, &output{most: r.output, end: cancel}
	args := append([]string{"call"}, r.args...)
	cfg := wazero.NewModuleConfig().WithName("").WithStartFunctions().WithArgs(args...).WithStdin(bytes.NewReader(r.stdin)).WithStdout(out).WithStderr(errs).
		WithSysWalltime().WithSysNanotime().WithRandSource(rand.Reader)
	for _, kv := range r.env {
		k, v, _ := strings.Cut(kv, "=")
		cfg = cfg.WithEnv(k, v)
	}
	if len(r.files) > 0 {
		cfg = cfg.WithFSConfig(wazero.NewFSConfig().WithFSMount(newTree(r.files), "/"))
	}
	ctx, stop := context.WithTimeout(experimental.WithMemoryAllocator(ctx, experimental.MemoryAllocatorFunc(mem.allocate)), r.wall)
	defer stop()
	begun := time.Now()
	fuel, err := w.start(ctx, c, cfg, r.fuel)
	a := &answer{says: saysResult, wall: time.Since(begun), memory: mem.most, fuel: fuel, stdout: out.Bytes(), stderr: errs.Bytes(), truncated: out.over || errs.over}
	a.judge(ctx, err, mem.refused, r.fuel)
	return a
}

// start runs an instance to its end, and returns the fuel that it used if it was given some.
func (w *worker) start(ctx context.Context, c wazero.CompiledModule, cfg wazero.ModuleConfig, fuel uint64) (used uint64, err error) {
	var m api.Module
	var left api.MutableGlobal
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("trap: %v", p)
		}
		if left != nil {
			used = fuel - left.Get() // more than fuel when what is left is below 0
		}
		if m != nil {
			err = errors.Join(err, m.Close(context.WithoutCancel(ctx)))
		}
	}()
	if m, err = w.rt.InstantiateModule(ctx, c, cfg); err != nil {
		return 0, err
	}
	if fuel > 0 {
		left = m.ExportedGlobal(meter.Fuel).(api.MutableGlobal) // the meter made it
		left.Set(fuel)
		if f := m.ExportedFunction(meter.Start); f != nil {
			if _, err = f.Call(ctx); err != nil {
				return 0, err
			}
		}
	}
	_, err = m.ExportedFunction("_start").Call(ctx)
	return 0, err
}
