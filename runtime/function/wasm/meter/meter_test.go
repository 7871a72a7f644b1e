package meter

import (
	"bytes"
	"context"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
	"github.com/tetratelabs/wazero/imports/wasi_snapshot_preview1"
	"github.com/tetratelabs/wazero/sys"
)

// modules are those of the engine's own tests: the suite of the specification, and what
// compilers make.
func modules(tb testing.TB, under string) (paths []string) {
	tb.Helper()
	dir, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "github.com/tetratelabs/wazero").Output()
	if err != nil {
		tb.Fatal(err)
	}
	paths, err = filepath.Glob(filepath.Join(strings.TrimSpace(string(dir)), under, "*.wasm"))
	if err != nil || len(paths) == 0 {
		tb.Fatalf("no modules below %s/%s: %v", dir, under, err)
	}
	return paths
}

const suite = "internal/integration_test/spectest/v2/testdata"

func engine(tb testing.TB) wazero.Runtime {
	rt := wazero.NewRuntimeWithConfig(tb.Context(), wazero.NewRuntimeConfig().WithCloseOnContextDone(true).WithMemoryLimitPages(1024))
	tb.Cleanup(func() { _ = rt.Close(context.Background()) })
	if _, err := wasi_snapshot_preview1.Instantiate(tb.Context(), rt); err != nil {
		tb.Fatal(err)
	}
	return rt
}

// both compiles a module with and without the counter.
func both(tb testing.TB, rt wazero.Runtime, b []byte) (plain, metered wazero.CompiledModule, why error) {
	plain, _ = rt.CompileModule(tb.Context(), b)
	m, why := Inject(b)
	if why == nil {
		metered, why = rt.CompileModule(tb.Context(), m)
	}
	return plain, metered, why
}

// lenient are modules that only the counter makes valid, to no harm: one has its function in a
// table, one names its own without saying so, and two start with a function that takes or gives
// something, which whoever calls it notices.
var lenient = []string{"call_indirect.36.wasm", "ref_func.5.wasm", "start.1.wasm", "start.2.wasm"}

// TestTheSpecification: every module of the suite is valid with the counter if it is
// without, and its functions do the same.
func TestTheSpecification(t *testing.T) {
	rt := engine(t)
	valid, invalid, calls := 0, 0, 0
	for _, path := range modules(t, suite) {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		plain, metered, why := both(t, rt, b)
		if (plain == nil) != (metered == nil) && !slices.Contains(lenient, filepath.Base(path)) {
			t.Errorf("%s: valid without the counter: %v, with it: %v", filepath.Base(path), plain != nil, why)
		}
		if plain == nil || metered == nil {
			invalid++
			continue
		}
		valid++
		calls += compare(t, rt, filepath.Base(path), plain, metered)
		_ = plain.Close(t.Context())
		_ = metered.Close(t.Context())
	}
	t.Logf("%d modules valid, %d not; %d calls compared", valid, invalid, calls)
	if valid < 500 || invalid < 500 || calls < 5000 {
		t.Error("that is not the suite")
	}
}

// compare calls what both export with the same arguments.
func compare(t *testing.T, rt wazero.Runtime, name string, plain, metered wazero.CompiledModule) (calls int) {
	a, b := instance(t, rt, plain), instance(t, rt, metered)
	if a == nil || b == nil { // it imports what is not there, or begins with a trap
		if a != nil || b != nil {
			t.Errorf("%s: an instance without the counter: %v, with it: %v", name, a != nil, b != nil)
		}
		return 0
	}
	defer a.Close(t.Context())
	defer b.Close(t.Context())
	rnd := rand.New(rand.NewPCG(1, 2))
	for f := range a.ExportedFunctionDefinitions() {
		d := a.ExportedFunction(f).Definition()
		if slices.ContainsFunc(d.ResultTypes(), notNumber) {
			continue // the address of something
		}
		for _, args := range arguments(rnd, d.ParamTypes()) {
			if b.IsClosed() || a.IsClosed() {
				return calls
			}
			left := b.ExportedGlobal(Fuel).(api.MutableGlobal)
			left.Set(1e6)
			have, herr := b.ExportedFunction(f).Call(t.Context(), args...)
			if int64(left.Get()) < 0 {
				if herr == nil && left.Get() > 1e6 {
					continue // its last code was more than was left
				}
				return calls // from here on the two are different
			}
			want, werr := a.ExportedFunction(f).Call(t.Context(), args...)
			calls++
			if !slices.Equal(have, want) || cause(herr) != cause(werr) {
				t.Errorf("%s: %s%x with the counter: %x %s, without: %x %s", name, f, args, have, cause(herr), want, cause(werr))
			}
		}
	}
	return calls
}

// cause is an error without the addresses of code.
func cause(err error) string {
	if err == nil {
		return ""
	}
	first, _, _ := strings.Cut(err.Error(), "\n")
	return first
}

func instance(t *testing.T, rt wazero.Runtime, c wazero.CompiledModule) api.Module {
	m, err := rt.InstantiateModule(t.Context(), c, wazero.NewModuleConfig().WithName("").WithStartFunctions())
	if err != nil {
		return nil
	}
	if f := m.ExportedFunction(Start); f != nil {
		m.ExportedGlobal(Fuel).(api.MutableGlobal).Set(1e6)
		if _, err := f.Call(t.Context()); err != nil {
			_ = m.Close(t.Context())
			return nil
		}
	}
	return m
}

func notNumber(ty api.ValueType) bool {
	return !slices.Contains([]api.ValueType{api.ValueTypeI32, api.ValueTypeI64, api.ValueTypeF32, api.ValueTypeF64}, ty)
}

// arguments for a function, if they are numbers.
func arguments(rnd *rand.Rand, types []api.ValueType) (all [][]uint64) {
	if slices.ContainsFunc(types, notNumber) {
		return nil
	}
	for round := range 4 {
		var args []uint64
		for _, ty := range types {
			v := []uint64{0, 1, 0xffffffffffffffff, rnd.Uint64()}[round]
			if ty == api.ValueTypeI32 || ty == api.ValueTypeF32 {
				v = uint64(uint32(v))
			}
			args = append(args, v)
		}
		all = append(all, args)
		if len(types) == 0 {
			break
		}
	}
	return all
}

// TestWhatCompilersMake prints the same with the counter, uses the same fuel each time,
// and has enough of it with what it used and not with one less.
func TestWhatCompilersMake(t *testing.T) {
	rt := engine(t)
	dir := t.TempDir()
	for _, name := range []string{"one", "two", "three"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, of := range []string{"cargo-wasi", "tinygo", "zig-cc", "zig"} {
		t.Run(of, func(t *testing.T) {
			b, err := os.ReadFile(modules(t, "imports/wasi_snapshot_preview1/testdata/"+of)[0])
			if err != nil {
				t.Fatal(err)
			}
			plain, metered, err := both(t, rt, b)
			if err != nil {
				t.Fatal(err)
			}
			if with, err := Inject(b); err != nil || len(with) > 2*len(b) {
				t.Errorf("%d bytes became %d: %v", len(b), len(with), err)
			}
			run := func(c wazero.CompiledModule, fuel int64) (out string, left int64, err error) {
				var stdout bytes.Buffer
				cfg := wazero.NewModuleConfig().WithName("").WithStartFunctions().WithArgs("wasi", "ls", "./.").WithStdout(&stdout).WithStderr(&stdout).
					WithFSConfig(wazero.NewFSConfig().WithReadOnlyDirMount(dir, "/"))
				m, err := rt.InstantiateModule(t.Context(), c, cfg)
				if err != nil {
					t.Fatal(err)
				}
				defer m.Close(t.Context())
				var g api.MutableGlobal
				if fuel > 0 {
					g = m.ExportedGlobal(Fuel).(api.MutableGlobal)
					g.Set(uint64(fuel))
				}
				_, err = m.ExportedFunction("_start").Call(t.Context())
				if e, ok := err.(*sys.ExitError); ok && e.ExitCode() == 0 {
					err = nil
				}
				if g != nil {
					left = int64(g.Get())
				}
				return stdout.String(), left, err
			}
			const much = 1 << 40
			want, _, err := run(plain, 0)
			if err != nil || !strings.Contains(want, "three") {
				t.Fatalf("without the counter: %q %v", want, err)
			}
			have, left, err := run(metered, much)
			if err != nil || have != want {
				t.Fatalf("%q %v, want %q", have, err, want)
			}
			used := int64(much) - left
			if _, left, _ = run(metered, much); much-left != used || used < 1000 {
				t.Errorf("it used %d, then %d", used, much-left)
			}
			if _, left, err = run(metered, used); err != nil || left != 0 {
				t.Errorf("with what it used: %v, %d left", err, left)
			}
			if _, left, _ = run(metered, used/2); left >= 0 || left < -1e6 {
				t.Errorf("with half of what it used %d are left", left)
			}
			t.Logf("ls used %d", used)
		})
	}
}

// one is a module of one function, of so many parameters of i64.
func one(params int, locals []byte, code ...byte) []byte {
	sized := func(b []byte) []byte { return append(unsigned(nil, uint64(len(b))), b...) }
	typ := append(unsigned([]byte{1, 0x60}, uint64(params)), bytes.Repeat([]byte{typeI64}, params)...)
	body := sized(append(append(locals, code...), opEnd))
	return slices.Concat([]byte(header), []byte{idType}, sized(append(typ, 0)), []byte{idFunction, 2, 1, 0}, []byte{idCode}, sized(append([]byte{1}, body...)))
}

// TestWhatTheEngineReadsOtherwise is refused: what is an instruction for one and a part of one for
// the other could run for nothing, or reach the counter.
func TestWhatTheEngineReadsOtherwise(t *testing.T) {
	none := []byte{0}
	if _, err := Inject(one(0, none, 0x41, 0, 0x1a)); err != nil {
		t.Fatal(err)
	}
	for what, b := range map[string][]byte{
		"a vector's number that is longer than it needs to be": one(0, none, 0xfd, 0x8c, 0x00, opUnreachable),
		"a block of a reference":                               one(0, none, opBlock, 0x63, 0x0e, opEnd),
		"a block of another":                                   one(0, none, opLoop, 0x64, 0x70, opEnd),
		"a block of one in more bytes":                         one(0, none, opIf, 0xe3, 0x7f, 0x0e, opEnd),
		"a variable that is a reference":                       one(126, []byte{1, 1, 0x63, 1}, 0x23, 0x41, 66),
		"a choice between references":                          one(0, none, 0x1c, 1, 0x63, 0x0e),
		"a reference to a type":                                one(0, none, 0xd0, 0, 0x1a),
		"the counter":                                          one(0, none, opI64Const, 0, opGlobalSet, 0),
		"the counter in more bytes":                            one(0, none, opI64Const, 0, opGlobalSet, 0x80, 0),
		"the counter's function":                               one(0, none, 0x41, 0, opCall, 1, 0x1a),
		"a call that ends nowhere":                             one(0, none, opCall, 0x80),
	} {
		if _, err := Inject(b); err == nil {
			t.Errorf("%s is taken", what)
		}
	}
	dense := one(0, none, bytes.Repeat([]byte{opLoop, 0x40, opEnd}, 1<<16)...)
	if _, err := Inject(dense); err == nil || !strings.Contains(err.Error(), "jumps") {
		t.Errorf("a module of nothing but loops: %v", err)
	}
}

// TestOnceIsEnough: a module that exports what a metered one does is refused.
func TestOnceIsEnough(t *testing.T) {
	b, err := Inject([]byte(header))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Inject(b); err == nil || !strings.Contains(err.Error(), Fuel) {
		t.Errorf("it got a second counter: %v", err)
	}
}

// FuzzInject: whatever comes, what comes out is not much larger and can be taken apart again. The engine
// is not asked: it makes room for as many of anything as a module says that it has.
func FuzzInject(f *testing.F) {
	for i, path := range modules(f, suite) {
		if b, err := os.ReadFile(path); err == nil && i%20 == 0 && len(b) < 4096 {
			f.Add(b)
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		with, err := Inject(b)
		if err != nil {
			return
		}
		if most := growth*(len(b)+1<<10) + 1<<10; len(with) > most {
			t.Errorf("%d bytes became %d", len(b), len(with))
		}
		m, err := split(with)
		if err == nil {
			err = m.count()
		}
		if err == nil {
			err = m.bodies()
		}
		if err != nil {
			t.Errorf("what was made cannot be taken apart: %v", err)
		}
	})
}

// BenchmarkCounting is what counting costs a loop that does little, and calls.
func BenchmarkCounting(b *testing.B) {
	path := modules(b, suite)
	i := slices.IndexFunc(path, func(p string) bool { return filepath.Base(p) == "fac.0.wasm" })
	src, err := os.ReadFile(path[i])
	if err != nil {
		b.Fatal(err)
	}
	rt := engine(b)
	plain, metered, err := both(b, rt, src)
	if err != nil {
		b.Fatal(err)
	}
	for name, c := range map[string]wazero.CompiledModule{"without": plain, "with": metered} {
		for of, rounds := range map[string]uint64{"fac-iter": 1e6, "fac-rec": 1000} {
			b.Run(of+"/"+name, func(b *testing.B) {
				m, err := rt.InstantiateModule(b.Context(), c, wazero.NewModuleConfig().WithName(""))
				if err != nil {
					b.Fatal(err)
				}
				defer m.Close(b.Context())
				for b.Loop() {
					if g := m.ExportedGlobal(Fuel); g != nil {
						g.(api.MutableGlobal).Set(1 << 50)
					}
					if _, err := m.ExportedFunction(of).Call(b.Context(), rounds); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
