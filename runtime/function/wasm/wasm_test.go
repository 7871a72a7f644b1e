package wasm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/runtime/function/wasm/meter"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == Verb {
		os.Exit(Main(os.Args[2:]))
	}
	os.Exit(m.Run())
}

func newHost(t testing.TB) *Host {
	t.Helper()
	h := New(Options{})
	t.Cleanup(func() {
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	})
	return h
}

func try(h *Host, c dsec.Call) (dsec.CallResult, error) {
	c.Type = dsec.CallWasm
	c.Fill()
	if err := c.Validate(); err != nil {
		return dsec.CallResult{}, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	return h.Call(ctx, c)
}

// echo copies stdin to stdout until its end.
var echo = assemble(1, iovec(64, 4096), []imported{fdRead, fdWrite},
	loop(konst(0), konst(0), konst(1), konst(16), call(0), drop,
		load(16), when(
			konst(32), konst(64), []byte{0x36, 2, 0}, konst(36), load(16), []byte{0x36, 2, 0},
			konst(1), konst(32), konst(1), konst(40), call(1), drop, []byte{0x0c, 1})))

// opens tries to open a path below the first directory there is (3), and exits with the
// error number.
func opens(path string, flags, rights int64) []byte {
	return assemble(1, []byte(path), []imported{pathOpen, procExit},
		konst(3), konst(0), konst(0), konst(int64(len(path))), konst(flags), konst64(rights), konst64(0), konst(0), konst(128), call(0), call(1))
}

func TestModules(t *testing.T) {
	h := newHost(t)
	with := []dsec.CallFile{{Path: "data/x.txt", Data: []byte("x")}}
	for _, tt := range []struct {
		name   string
		call   dsec.Call
		want   dsec.Verdict
		code   int
		stdout string
	}{
		{"hello", dsec.Call{Code: hello("hi\n")}, dsec.VerdictOK, 0, "hi\n"},
		{"right", dsec.Call{Code: hello("42\n"), Expect: []byte("42")}, dsec.VerdictOK, 0, "42\n"},
		{"wrong", dsec.Call{Code: hello("43\n"), Expect: []byte("42")}, dsec.VerdictWrongAnswer, 0, "43\n"},
		{"stdin", dsec.Call{Code: echo, Stdin: bytes.Repeat([]byte("abc"), 3000)}, dsec.VerdictOK, 0, strings.Repeat("abc", 3000)},
		{"exit code", dsec.Call{Code: assemble(1, nil, []imported{procExit}, konst(9), call(0))}, dsec.VerdictRuntimeError, 9, ""},
		{"trap", dsec.Call{Code: assemble(1, nil, nil, unreachable)}, dsec.VerdictRuntimeError, 134, ""},
		{"loop", dsec.Call{Code: assemble(1, nil, nil, loop(again)), Limits: dsec.CallLimits{Wall: 200 * time.Millisecond}}, dsec.VerdictTimeLimit, 137, ""},
		{"memory", dsec.Call{Code: assemble(1, nil, nil, konst(64), grow, konst(-1), []byte{0x46}, when(unreachable)), Limits: dsec.CallLimits{Memory: 1 << 20}}, dsec.VerdictMemoryLimit, 137, ""},
		{"memory of more than a module has", dsec.Call{Code: assemble(1, nil, nil, konst(20000), grow, konst(-1), []byte{0x46}, when(unreachable)), Limits: dsec.CallLimits{Memory: 1 << 30}}, dsec.VerdictMemoryLimit, 137, ""},
		{"memory at once", dsec.Call{Code: assemble(64, []byte("x"), nil), Limits: dsec.CallLimits{Memory: 1 << 20}}, dsec.VerdictMemoryLimit, 137, ""},
		{"memory enough", dsec.Call{Code: assemble(1, nil, nil, konst(8), grow, konst(-1), []byte{0x46}, when(unreachable)), Limits: dsec.CallLimits{Memory: 1 << 20}}, dsec.VerdictOK, 0, ""},
		{"output", dsec.Call{Code: assemble(1, iovec(64, 4096), []imported{fdWrite}, loop(konst(1), konst(0), konst(1), konst(8), call(0), drop, again)), Limits: dsec.CallLimits{Output: 10}},
			dsec.VerdictOutputLimit, 137, strings.Repeat("\x00", 10)},
		{"no module", dsec.Call{Code: []byte("hello")}, dsec.VerdictCompileError, 1, ""},
		{"a module that says that it is large", dsec.Call{Code: []byte("\x00asm\x01\x00\x00\x00\x01\x05\xff\xff\xff\xff\x0f")}, dsec.VerdictCompileError, 1, ""},
		{"the same, counted", dsec.Call{Code: []byte("\x00asm\x01\x00\x00\x00\x01\x05\xff\xff\xff\xff\x0f"), Limits: dsec.CallLimits{Fuel: 1}}, dsec.VerdictCompileError, 1, ""},
		{"other imports", dsec.Call{Code: assemble(1, nil, []imported{{"env", "system", []byte{i32}, []byte{i32}}}, konst(0), call(0), drop)}, dsec.VerdictCompileError, 1, ""},
		{"reads its files", dsec.Call{Code: opens("data/x.txt", 0, 2), Files: with}, dsec.VerdictOK, 0, ""},
		{"no other", dsec.Call{Code: opens("etc/passwd", 0, 2), Files: with}, dsec.VerdictRuntimeError, 44, ""}, // ENOENT
		{"not above", dsec.Call{Code: opens("../etc/passwd", 0, 2), Files: with}, dsec.VerdictRuntimeError, 0, ""},
		{"writes none", dsec.Call{Code: opens("data/new", 1, 64), Files: with}, dsec.VerdictRuntimeError, 0, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r, err := try(h, tt.call)
			if err != nil {
				t.Fatal(err)
			}
			if r.Verdict != tt.want || tt.code != 0 && r.ExitCode != tt.code || string(r.Stdout) != tt.stdout {
				t.Errorf("%s (%s), exit code %d, stdout %.60q, want %s, %d, %.60q", r.Verdict, r.Detail, r.ExitCode, r.Stdout, tt.want, tt.code, tt.stdout)
			}
		})
	}
}

// TestFuel: what is executed is counted to the instruction, before it is executed.
func TestFuel(t *testing.T) {
	h := newHost(t)
	at := konst(0)
	const each = 11 // instructions of a round
	thousand := assemble(1, nil, nil, loop(at, load(0), konst(1), []byte{0x6a}, []byte{0x36, 2, 0}, load(0), konst(1000), []byte{0x49}, []byte{0x0d, 0}))
	fill := assemble(1, nil, nil, konst(0), konst(0), konst(65536), []byte{0xfc, 11, 0})
	endless := with(assemble(1, nil, nil, loop(again)), 8, []byte{0}) // in its start function
	for _, tt := range []struct {
		name       string
		module     []byte
		fuel, used int64
		want       dsec.Verdict
		stdout     string
	}{
		{"enough", hello("hi"), 6, 6, dsec.VerdictOK, "hi"},
		{"not enough", hello("hi"), 5, 6, dsec.VerdictFuelLimit, ""},
		{"not counted", hello("hi"), 0, 0, dsec.VerdictOK, "hi"},
		{"loop", thousand, 1000 * each, 1000 * each, dsec.VerdictOK, ""},
		{"a round less", thousand, 1000*each - 1, 1000 * each, dsec.VerdictFuelLimit, ""},
		{"half", thousand, 500 * each, 501 * each, dsec.VerdictFuelLimit, ""},
		{"endless", assemble(1, nil, nil, loop(again)), 1e7, 1e7 + 1, dsec.VerdictFuelLimit, ""},
		{"endless before it starts", endless, 1e7, 1e7 + 1, dsec.VerdictFuelLimit, ""},
		{"many bytes", fill, 4 + 65536/16, 4 + 65536/16, dsec.VerdictOK, ""},
		{"too many bytes", fill, 3 + 65536/16, 4 + 65536/16, dsec.VerdictFuelLimit, ""},
		{"a trap of its own", assemble(1, nil, nil, unreachable), 10, 1, dsec.VerdictRuntimeError, ""},
		{"an exit of its own", assemble(1, nil, []imported{procExit}, konst(0), call(0)), 10, 2, dsec.VerdictOK, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r, err := try(h, dsec.Call{Code: tt.module, Limits: dsec.CallLimits{Fuel: tt.fuel}})
			if err != nil {
				t.Fatal(err)
			}
			if r.Verdict != tt.want || r.Usage.Fuel != tt.used || string(r.Stdout) != tt.stdout {
				t.Errorf("%s (%s), %d used, stdout %q, want %s, %d, %q", r.Verdict, r.Detail, r.Usage.Fuel, r.Stdout, tt.want, tt.used, tt.stdout)
			}
		})
	}
}

// TestNoModuleEndsWhatAllShare: none runs a function of the engine as if it were its own.
func TestNoModuleEndsWhatAllShare(t *testing.T) {
	h := newHost(t)
	exit := imported{"wasi_snapshot_preview1", "proc_exit", []byte{i32}, nil}
	reexported := bytes.Replace(assemble(1, nil, []imported{exit}), join(named("_start"), []byte{0, 1}), join(named("_start"), []byte{0, 0}), 1)
	yield := imported{"wasi_snapshot_preview1", "sched_yield", nil, []byte{i32}}
	for what, b := range map[string][]byte{
		"exported":              reexported,
		"to start with":         with(assemble(1, nil, []imported{exit}), 8, []byte{0}),
		"another":               with(assemble(1, nil, []imported{yield}), 8, []byte{0}),
		"with other types":      assemble(1, nil, []imported{{"wasi_snapshot_preview1", "proc_exit", nil, nil}}),
		"one that is not there": assemble(1, nil, []imported{{"wasi_snapshot_preview1", "nothing", nil, nil}}),
	} {
		for _, fuel := range []int64{0, 100} {
			if r, err := try(h, dsec.Call{Code: b, Limits: dsec.CallLimits{Fuel: fuel}}); err != nil || r.Verdict != dsec.VerdictCompileError {
				t.Errorf("%s, fuel %d: %+v %v", what, fuel, r, err)
			}
		}
	}
	// By its table it may, as itself.
	table := with(with(assemble(1, nil, []imported{exit}, konst(7), konst(0), []byte{0x11, 0, 0}), 4, []byte{1, 0x70, 0, 1}), 9, join([]byte{1, 0}, konst(0), []byte{0x0b, 1, 0}))
	if r, err := try(h, dsec.Call{Code: table}); err != nil || r.ExitCode != 7 {
		t.Errorf("%+v %v", r, err)
	}
	was := h.w
	if r, err := try(h, dsec.Call{Code: hello("x")}); err != nil || r.Verdict != dsec.VerdictOK || h.w != was {
		t.Errorf("afterwards: %+v %v", r, err)
	}
}

// TestTablesAreBounded: they are not of limits.memory.
func TestTablesAreBounded(t *testing.T) {
	h := newHost(t)
	grows := func(by int64) []byte { // traps unless it may not
		return with(assemble(1, nil, nil, []byte{0xd0, 0x70}, konst(by), []byte{0xfc, 15, 0}, konst(-1), []byte{0x47}, when(unreachable)), 4, []byte{1, 0x70, 0, 1})
	}
	if r, err := try(h, dsec.Call{Code: grows(meter.MaxTableEntries)}); err != nil || r.Verdict != dsec.VerdictOK {
		t.Errorf("to more than it may be: %+v %v", r, err)
	}
	if r, err := try(h, dsec.Call{Code: grows(1000)}); err != nil || r.Verdict != dsec.VerdictRuntimeError {
		t.Errorf("to less: %+v %v", r, err)
	}
	for what, b := range map[string][]byte{
		"a large one":    with(assemble(1, nil, nil), 4, join([]byte{1, 0x70, 0}, leb(meter.MaxTableEntries+1))),
		"many":           with(assemble(1, nil, nil), 4, append([]byte{5}, bytes.Repeat([]byte{0x70, 0, 1}, 5)...)),
		"one of another": with(assemble(1, nil, nil), 2, join([]byte{1}, named("wasi_snapshot_preview1"), named("t"), []byte{1, 0x70, 0, 1})),
	} {
		if r, err := try(h, dsec.Call{Code: b}); err != nil || r.Verdict != dsec.VerdictCompileError {
			t.Errorf("%s: %+v %v", what, r, err)
		}
	}
}

// TestAModuleThatTakesLongToCompile costs nobody but its caller.
func TestAModuleThatTakesLongToCompile(t *testing.T) {
	h := newHost(t)
	if _, err := try(h, dsec.Call{Code: hello("x")}); err != nil {
		t.Fatal(err)
	}
	was := h.w
	jumps := assemble(1, nil, nil, bytes.Repeat([]byte{0x03, 0x40, 0x0b}, 100_000)) // minutes
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			r, err := try(h, dsec.Call{Code: jumps, Limits: dsec.CallLimits{Compile: 500 * time.Millisecond}})
			if err != nil || r.Verdict != dsec.VerdictCompileError || !strings.Contains(r.Detail, "limits.compile") {
				t.Errorf("%+v %v", r, err)
			}
		})
	}
	for range 20 {
		if r, err := try(h, dsec.Call{Code: hello("x")}); err != nil || r.Verdict != dsec.VerdictOK {
			t.Error(r, err)
		}
	}
	wg.Wait()
	if h.w != was || h.w.over() {
		t.Error("the worker of the others has ended")
	}
}

// TestAModuleThatTakesMuchToCompile likewise.
func TestAModuleThatTakesMuchToCompile(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root limits memory; uid", os.Geteuid())
	}
	groups, err := cgroup.Open(fmt.Sprintf("dsec-test-wasm-%d", os.Getpid()))
	if err != nil {
		t.Fatal(err)
	}
	h := New(Options{Cgroups: groups, Memory: ownMemory + 64<<20})
	defer func() {
		if err := errors.Join(h.Close(), groups.RemoveAll(context.Background()), groups.Close()); err != nil {
			t.Error(err)
		}
	}()
	const depth = 14_000
	deep := assemble(1, nil, nil, bytes.Repeat([]byte{0x03, 0x40}, depth), bytes.Repeat([]byte{0x0b}, depth))
	r, err := try(h, dsec.Call{Code: deep, Limits: dsec.CallLimits{Memory: 1 << 20, Compile: 30 * time.Second}})
	if err != nil || r.Verdict != dsec.VerdictCompileError || !strings.Contains(r.Detail, "64 MiB") {
		t.Errorf("%+v %v", r, err)
	}
	if r, err := try(h, dsec.Call{Code: hello("x"), Limits: dsec.CallLimits{Memory: 1 << 20}}); err != nil || r.Verdict != dsec.VerdictOK {
		t.Error(r, err)
	}
	if names, err := groups.List(); err != nil || slices.Contains(names, trialGroup) {
		t.Error(names, err)
	}
}

// TestAnInstanceKeepsNothing: a module that finds what it wrote before traps.
func TestAnInstanceKeepsNothing(t *testing.T) {
	h := newHost(t)
	mark := assemble(2, nil, nil, konst(70000), []byte{0x28, 2, 0}, when(unreachable), konst(70000), konst(1), []byte{0x36, 2, 0})
	for range 200 {
		if r, err := try(h, dsec.Call{Code: mark}); err != nil || r.Verdict != dsec.VerdictOK {
			t.Fatal(r, err)
		}
	}
}

// TestTheWorkerHasNothing looks at it from outside.
func TestTheWorkerHasNothing(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("a worker has rights to lose only if it is started by root; uid", os.Geteuid())
	}
	h := newHost(t)
	if _, err := try(h, dsec.Call{Code: hello("x")}); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join("/proc", strconv.Itoa(h.w.cmd.Process.Pid))
	status, err := os.ReadFile(dir + "/status")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"Uid:\t65531\t65531", "CapEff:\t0000000000000000", "CapPrm:\t0000000000000000", "NoNewPrivs:\t1", "Groups:\t \n"} {
		if !strings.Contains(string(status), want) {
			t.Errorf("%q is not in\n%s", want, status)
		}
	}
	entries, err := os.ReadDir(dir + "/root/")
	if err != nil || len(entries) > 0 {
		t.Errorf("its root has %v %v", entries, err)
	}
	ours, _ := os.Readlink("/proc/self/ns/net")
	if theirs, err := os.Readlink(dir + "/ns/net"); err != nil || theirs == ours {
		t.Errorf("its network is %s %v", theirs, err)
	}
}

// TestAKilledWorkerIsNobodysFault: calls in it are made again by the next one.
func TestAKilledWorkerIsNobodysFault(t *testing.T) {
	h := newHost(t)
	if _, err := try(h, dsec.Call{Code: hello("x")}); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	slow := assemble(1, nil, nil, loop(again))
	for range 4 {
		wg.Go(func() {
			r, err := try(h, dsec.Call{Code: slow, Limits: dsec.CallLimits{Wall: time.Second}})
			if err != nil || r.Verdict != dsec.VerdictTimeLimit {
				t.Error(r, err)
			}
		})
	}
	for busy := 0; busy < 4; { // all have been sent
		h.w.mu.Lock()
		busy = len(h.w.calls)
		h.w.mu.Unlock()
		time.Sleep(time.Millisecond)
	}
	old := h.w
	if err := old.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	wg.Wait()
	if h.w == old {
		t.Error("there is no new worker")
	}
}

func TestCancelEndsAModule(t *testing.T) {
	h := newHost(t)
	if _, err := try(h, dsec.Call{Code: hello("x")}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	c := dsec.Call{Type: dsec.CallWasm, Code: assemble(1, nil, nil, loop(again)), Limits: dsec.CallLimits{Wall: time.Minute}}
	c.Fill()
	if _, err := h.Call(ctx, c); dsec.ClassOf(err) != dsec.Timeout {
		t.Fatal(err)
	}
	if r, err := try(h, dsec.Call{Code: hello("x")}); err != nil || r.Verdict != dsec.VerdictOK { // a processor is free
		t.Fatal(r, err)
	}
}

func FuzzDecodeRequest(f *testing.F) {
	r := &request{id: 1, fuel: 7, module: []byte("m"), args: []string{"a"}, env: []string{"K=V"}, files: []file{{"p", 0o644, []byte("d")}}, stdin: []byte("s")}
	f.Add(r.encode()[13:])
	f.Fuzz(func(t *testing.T, b []byte) {
		if q, err := decodeRequest(1, b); err == nil && !bytes.Equal(q.encode()[13:], b) && q.wall < 1<<62-1 {
			p, err := decodeRequest(1, q.encode()[13:])
			if err != nil || len(p.files) != len(q.files) {
				t.Errorf("%+v, again %+v %v", q, p, err)
			}
		}
	})
}

func FuzzDecodeAnswer(f *testing.F) {
	a := &answer{id: 3, says: saysResult, end: endTrap, detail: "d", stdout: []byte("o"), stderr: []byte("e"), truncated: true, wall: 1, memory: 2, fuel: 3}
	f.Add(a.encode()[4:])
	f.Fuzz(func(t *testing.T, b []byte) {
		if q, err := decodeAnswer(b); err == nil && q.says == saysResult {
			if p, err := decodeAnswer(q.encode()[4:]); err != nil || !bytes.Equal(p.stdout, q.stdout) {
				t.Errorf("%+v, again %+v %v", q, p, err)
			}
		}
	})
}

func BenchmarkHello(b *testing.B) {
	h := newHost(b)
	c := dsec.Call{Code: hello("hi\n")}
	if _, err := try(h, c); err != nil {
		b.Fatal(err)
	}
	b.SetParallelism(4)
	b.ResetTimer()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if _, err := try(h, c); err != nil {
				b.Error(err)
			}
		}
	})
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "calls/s")
}
