package worker

import (
	"bufio"
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
)

// The descriptors of a worker, in the order in which run passes them.
const (
	fdMeta = 3 + iota
	fdData
	fdScratch
	fdNext // the input, if there is one, then the control group files
)

// progressEvery bounds the lines of a worker.
const progressEvery = 200 * time.Millisecond

// Main is the worker process. It returns the exit status.
func Main() int {
	// A terminal's interrupt reaches the whole group; the caller decides.
	signal.Ignore(syscall.SIGINT)
	in := bufio.NewReader(os.Stdin)
	out := json.NewEncoder(os.Stdout)
	line, err := in.ReadBytes('\n')
	var j job
	if err == nil {
		err = json.Unmarshal(line, &j)
	}
	if err != nil {
		return fail(out, "read job", err)
	}
	files, err := j.files()
	if err == nil {
		err = j.drop()
	}
	if err != nil {
		return fail(out, "confine worker", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() { // ends with the process
		_, _ = io.Copy(io.Discard, in)
		cancel() // whoever wanted the result is gone
	}()
	last := time.Now()
	j.Options.Progress = func(p image.Progress) {
		if time.Since(last) < progressEvery {
			return
		}
		last = time.Now()
		_ = out.Encode(answer{Progress: &p}) // a caller that is gone is noticed on the input
	}
	res, err := image.Convert(ctx, j.Location, files, j.Options)
	if err != nil {
		return fail(out, "convert image", err)
	}
	if err := out.Encode(answer{Result: &res}); err != nil {
		return 1
	}
	return 0
}

func fail(out *json.Encoder, op string, err error) int {
	f := &failure{Class: dsec.ClassOf(err), Op: op, Text: err.Error()}
	if e, ok := errors.AsType[*dsec.Error](err); ok {
		f.Op, f.Object = e.Op, e.Object
		if e.Err != nil {
			f.Text = e.Err.Error()
		}
	}
	if out.Encode(answer{Error: f}) != nil {
		return 1
	}
	return 0
}

// files takes the descriptors and opens what is behind the root to come.
func (j *job) files() (image.Files, error) {
	f := image.Files{Meta: os.NewFile(fdMeta, "meta"), Data: os.NewFile(fdData, "data"), Scratch: os.NewFile(fdScratch, "scratch")}
	next := uintptr(fdNext)
	if j.Input {
		f.Input = os.NewFile(next, j.Location.Source)
		next++
	}
	if j.Location.Kind == image.KindLayout {
		root, err := os.OpenRoot(j.Location.Path)
		if err != nil {
			return f, err
		}
		f.Layout = root
	}
	for i := range j.Tasks {
		if err := enter(os.NewFile(next+uintptr(i), "tasks")); err != nil {
			return f, err
		}
	}
	return f, nil
}

// enter moves every thread of this process into a v1 control group. New threads
// are born where their makers are, so it is done when a pass finds no new one.
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
				return fmt.Errorf("enter control group: %w", err)
			}
			moved[t.Name()], again = true, true
		}
	}
	return tasks.Close()
}

// drop gives up everything that converting does not need.
func (j *job) drop() error {
	debug.SetMemoryLimit(j.Memory / 4 * 3)
	for what, limit := range map[int]uint64{unix.RLIMIT_CORE: 0, unix.RLIMIT_NOFILE: 256, unix.RLIMIT_FSIZE: fileLimit(j.Options)} {
		if err := unix.Setrlimit(what, &unix.Rlimit{Cur: limit, Max: limit}); err != nil {
			return fmt.Errorf("limit %s: %w", strconv.Itoa(what), err)
		}
	}
	if j.UID == 0 {
		return nil
	}
	if j.Location.Kind == image.KindRegistry {
		if _, err := x509.SystemCertPool(); err != nil { // read now: other places than the copied file count, too
			return fmt.Errorf("read certificates: %w", err)
		}
	}
	if err := unix.Chroot(j.Root); err != nil {
		return fmt.Errorf("change root: %w", err)
	}
	if err := os.Chdir("/"); err != nil {
		return err
	}
	// The syscall package does these on every thread.
	if err := errors.Join(syscall.Setgroups(nil), syscall.Setresgid(j.GID, j.GID, j.GID), syscall.Setresuid(j.UID, j.UID, j.UID)); err != nil {
		return fmt.Errorf("become user %d: %w", j.UID, err)
	}
	// In a build with cgo only this thread can be told. That is enough where
	// there is no file left to execute.
	if _, _, errno := syscall.AllThreadsSyscall(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0); errno == syscall.ENOTSUP {
		return unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
	} else if errno != 0 {
		return fmt.Errorf("set no_new_privs: %w", errno)
	}
	return nil
}

// fileLimit bounds each file written, so that no defect fills the disk.
func fileLimit(o image.Options) uint64 {
	const slack = 16 << 30
	if o.MaxBytes <= 0 {
		return 1 << 40
	}
	return uint64(o.MaxBytes) + slack
}
