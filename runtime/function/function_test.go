package function

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

func TestVerdicts(t *testing.T) {
	w := newWorld(t)
	lim := func(c dsec.Call, l dsec.CallLimits) dsec.Call { c.Limits = l; return c }
	expect := func(c dsec.Call, want string) dsec.Call { c.Expect = []byte(want); return c }
	second := dsec.CallLimits{Wall: time.Second}
	compiled := dsec.Call{Type: dsec.CallExec, Compile: []string{"sh", "-c", "cp main.sh prog && chmod 755 prog"}, Command: []string{"./prog"},
		Files: []dsec.CallFile{{Path: "main.sh", Data: []byte("#!/bin/sh\nread a; echo $((a * 2))\n")}}, Stdin: []byte("21\n"), Expect: []byte("42")}
	uncompiled := compiled
	uncompiled.Compile = []string{"sh", "-c", "echo main.sh:1: no >&2; exit 1"}
	for _, tt := range []struct {
		name string
		call dsec.Call
		want dsec.Verdict
		code int
	}{
		{"ok", shell("echo hello"), dsec.VerdictOK, 0},
		{"python", python("import sys; print(sum(map(int, sys.stdin)))"), dsec.VerdictOK, 0},
		{"exit code", shell("exit 7"), dsec.VerdictRuntimeError, 7},
		{"signal", shell("kill -SEGV $$"), dsec.VerdictRuntimeError, 139},
		{"exception", python("1/0"), dsec.VerdictRuntimeError, 1},
		{"python exit", python("import sys; sys.exit(5)"), dsec.VerdictRuntimeError, 5},
		{"python exit beyond", python("import sys; sys.exit(10**30)"), dsec.VerdictRuntimeError, 255},
		{"no program", dsec.Call{Type: dsec.CallExec, Command: []string{"nothing"}}, dsec.VerdictRuntimeError, 127},
		{"wall", lim(shell("sleep 60"), second), dsec.VerdictTimeLimit, 137},
		{"python wall", lim(python("import time; time.sleep(60)"), second), dsec.VerdictTimeLimit, 137},
		{"cpu", lim(shell("while :; do :; done"), dsec.CallLimits{Wall: 20 * time.Second, CPUTime: time.Second}), dsec.VerdictTimeLimit, 152},
		{"python cpu", lim(python("while True: pass"), dsec.CallLimits{Wall: 20 * time.Second, CPUTime: time.Second}), dsec.VerdictTimeLimit, 152},
		{"output", lim(shell("yes"), dsec.CallLimits{Output: 100 << 10}), dsec.VerdictOutputLimit, 137},
		{"python output", lim(python("while True: print('x' * 1000)"), dsec.CallLimits{Output: 100 << 10}), dsec.VerdictOutputLimit, 137},
		{"memory", lim(shell("exec /usr/bin/python3 -c 'x = bytearray(200 << 20)'"), dsec.CallLimits{Memory: 64 << 20}), dsec.VerdictMemoryLimit, 137},
		{"python memory", lim(python("x = bytearray(200 << 20)"), dsec.CallLimits{Memory: 64 << 20}), dsec.VerdictMemoryLimit, 137},
		{"disk", lim(shell("dd if=/dev/zero of=big bs=1M count=64 2>&1"), dsec.CallLimits{Disk: 1 << 20}), dsec.VerdictRuntimeError, 1},
		{"fork bomb", lim(shell("b() { b | b & }; (b) & while :; do :; done"), dsec.CallLimits{Wall: time.Second, CPUTime: 20 * time.Second}), dsec.VerdictTimeLimit, 137},
		{"right", expect(shell("echo 42"), "42"), dsec.VerdictOK, 0},
		{"wrong", expect(shell("echo 43"), "42"), dsec.VerdictWrongAnswer, 0},
		{"a child of the interpreter that waits", expect(python(fmt.Sprintf("import ctypes; c = ctypes.CDLL(None, use_errno=True); print(c.syscall(%d, 0x8000 | 17, 0, 0, 0, 0), ctypes.get_errno())", unix.SYS_CLONE)), "-1 1"), dsec.VerdictOK, 0},
		{"compiled", compiled, dsec.VerdictOK, 0},
		{"not compiled", uncompiled, dsec.VerdictCompileError, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := w.call(t, tt.call)
			if r.Verdict != tt.want || r.ExitCode != tt.code {
				t.Errorf("%s (%s), exit code %d, want %s and %d\n%s\n%.500s", r.Verdict, r.Detail, r.ExitCode, tt.want, tt.code, r.Stdout[:min(len(r.Stdout), 200)], r.Stderr)
			}
			if int64(len(r.Stdout)) > max(tt.call.Limits.Output, 1<<20) {
				t.Errorf("%d bytes of output", len(r.Stdout))
			}
		})
	}
	t.Logf("%+v", w.e.Counts())
}

func BenchmarkCalls(b *testing.B) {
	for name, c := range map[string]dsec.Call{"native": shell("exit 0"), "true": {Type: dsec.CallExec, Command: []string{"/bin/true"}}, "python": python("print(1)"), "loopback": {Type: dsec.CallExec, Command: []string{"/bin/true"}, Network: dsec.CallLoopback}} {
		b.Run(name, func(b *testing.B) {
			w := newWorld(b)
			w.call(b, c)
			var wg sync.WaitGroup
			b.ResetTimer()
			next := make(chan struct{})
			for range 8 {
				wg.Go(func() {
					for range next {
						if r, err := w.try(c); err != nil || r.Verdict != dsec.VerdictOK {
							b.Error(r, err)
						}
					}
				})
			}
			for range b.N {
				next <- struct{}{}
			}
			close(next)
			wg.Wait()
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "calls/s")
		})
	}
}
