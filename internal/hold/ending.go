package hold

import (
	"bytes"
	"io"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/opendsec/dsec/process"
)

// usage is what the sandbox's accounting files said at the start of a command.
type usage struct {
	oom      int64
	throttle time.Duration
}

// read takes what the files say now.
func (u *usage) read(w *warmFiles) {
	u.oom = counter(counters(w.oom), "oom_kill")
	cpu := counters(w.throttle)
	u.throttle = time.Duration(counter(cpu, "throttled_time"))
	if u.throttle == 0 {
		u.throttle = time.Duration(counter(cpu, "throttled_usec")) * time.Microsecond
	}
}

// counters reads a file of lines "name N", nil if it cannot.
func counters(f *os.File) []byte {
	if f == nil {
		return nil
	}
	b := make([]byte, 4096)
	n, err := f.ReadAt(b, 0)
	if err != nil && err != io.EOF {
		return nil
	}
	return b[:n]
}

// counter is the N of "name N", 0 if it is not there.
func counter(lines []byte, name string) int64 {
	for line := range bytes.Lines(lines) {
		if rest, ok := bytes.CutPrefix(line, []byte(name+" ")); ok {
			v, _ := strconv.ParseInt(string(bytes.TrimSpace(rest)), 10, 64)
			return v
		}
	}
	return 0
}

func number(path string) int64 {
	b, err := readPlain(path)
	if err != nil {
		return 0
	}
	n, _ := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	return n
}

// watch waits for the end of the main process.
func (e *execution) watch() { e.sb.s.attend(&e.vigil, e.pidfd, e.ending) }

// ending makes the result.
func (e *execution) ending(end ending, err error) {
	wall := time.Since(e.mark)
	if err != nil {
		e.sb.s.log.Error("wait for exec", "exec", e.spec.Spec.ID, "error", err)
	}
	held := e.clock.stop()
	for _, p := range e.out {
		if p != nil {
			p.finish()
		}
	}
	limit := time.NewTimer(drainMost)
	defer limit.Stop()
	for _, p := range e.out {
		if p == nil {
			continue
		}
		select {
		case <-p.drained:
		case <-limit.C:
		}
	}
	r := e.result(end, wall, held)
	e.mu.Lock()
	e.ended, e.res = true, r
	input := e.input
	e.input = nil
	e.mu.Unlock()
	if e.spec.Spec.PTY != nil {
		e.out[0].hangUp()
	} else if input != nil {
		_ = input.Close()
	}
	e.sb.s.emit(wireEvent{Event: Event{Type: ExecExited, Sandbox: e.sb.name(), Exec: e.spec.Spec.ID, Result: r}, Kept: e.keptSmall()})
	close(e.done)
	_ = e.pidfd.Close()
	e.sb.s.running.Add(-1)
	e.sb.s.removeCgroup(e.group)
	close(e.gone)
}

// keptSmall is all the output, if it is complete and no file was needed for it.
func (e *execution) keptSmall() [][]byte {
	var kept [][]byte
	for _, p := range e.out {
		if p == nil {
			continue
		}
		select {
		case <-p.drained:
		default:
			return nil
		}
		b, ok := p.w.Bytes()
		if !ok {
			return nil
		}
		kept = append(kept, b)
	}
	return kept
}

func (e *execution) result(end ending, wall, held time.Duration) ExecResult {
	r := ExecResult{Status: process.Exited, ExitCode: end.code, Signal: end.signal, Started: e.begun, Wall: wall, CPU: end.cpu, Held: held}
	if end.signal != 0 {
		r.ExitCode = 128 + end.signal
	}
	e.mu.Lock()
	cause := e.cause
	e.mu.Unlock()
	switch {
	case cause == process.OutputLimit:
		r.Status = cause
	case cause != "" && end.signal == int(syscall.SIGKILL):
		r.Status = cause
	case end.signal == int(syscall.SIGKILL) && e.sb.dying():
		r.Status = process.Killed
	}
	if used := cgroupCPU(e.group); used > r.CPU {
		r.CPU = used
	}
	e.charge(&r)
	r.Stdout = e.out[0].summary()
	if e.out[1] != nil {
		r.Stderr = e.out[1].summary()
	}
	return r
}

// charge tells what the limits of the sandbox did to the command.
func (e *execution) charge(r *ExecResult) {
	w, err := e.sb.s.warmth.use(e.sb)
	if err != nil {
		return // the groups are gone with the sandbox
	}
	defer e.sb.s.warmth.done(w)
	var now usage
	now.read(w)
	r.Throttle = max(now.throttle-e.usage.throttle, 0)
	if now.oom > e.usage.oom {
		r.OOM, r.OOMLimit, r.OOMPeak = true, number(e.sb.spec.Account.Limit), number(e.sb.spec.Account.Peak)
	}
}

// dying reports whether PID 1 is on its way out, which kills all it has.
func (sb *sandbox) dying() bool {
	sb.mu.Lock()
	gone := sb.ended || sb.asked
	sb.mu.Unlock()
	if gone {
		return true
	}
	b, err := os.ReadFile("/proc/" + strconv.Itoa(sb.pid) + "/stat")
	if err != nil {
		return true
	}
	f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	if len(f) < 7 {
		return true
	}
	flags, _ := strconv.ParseUint(f[6], 10, 64)
	const exiting = 0x4
	return flags&exiting != 0
}
