package wasm

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"

	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/imports/wasi_snapshot_preview1"

	"github.com/opendsec/dsec/runtime/function/wasm/meter"
)

const (
	keptModules = 256       // compiled
	keptBytes   = 256 << 20 // of what was compiled, together
	perFunction = 512       // bytes that the engine has of each, about
)

// which names a compiled module.
type which struct {
	digest  [32]byte // of what came
	metered bool     // it counts what it executes
}

// module is one that is compiled, or is being.
type module struct {
	ready chan struct{} // closed when the others are set
	m     wazero.CompiledModule
	err   error
	size  int
	users int
	gone  bool // out of the cache; closed by its last user
}

// module finds the compiled module of a call, or compiles what came with it; nil: it
// has to come.
func (w *worker) module(ctx context.Context, r *request) *module {
	k := which{r.digest, r.fuel > 0}
	w.mu.Lock()
	m := w.modules[k]
	if m != nil {
		m.users++
		i := slices.Index(w.order, k)
		w.order = append(slices.Delete(w.order, i, i+1), k)
		w.mu.Unlock()
		return m
	}
	if len(r.module) == 0 || sha256.Sum256(r.module) != r.digest {
		w.mu.Unlock()
		return nil
	}
	m = &module{ready: make(chan struct{}), size: len(r.module), users: 1}
	if k.metered {
		m.size *= 2 // about
	}
	w.modules[k] = m
	w.order = append(w.order, k)
	w.bytes += m.size
	w.trimLocked()
	w.mu.Unlock()
	functions := 0
	m.m, functions, m.err = w.compile(context.WithoutCancel(ctx), r.module, k.metered)
	w.mu.Lock()
	switch {
	case m.err != nil:
		w.dropLocked(k)
	case w.modules[k] == m:
		m.size += functions * perFunction
		w.bytes += functions * perFunction
		w.trimLocked()
	}
	w.mu.Unlock()
	close(m.ready)
	return m
}

// compile makes machine code of a module. A defect of the compiler is the module's
// end and not ours.
func (w *worker) compile(ctx context.Context, b []byte, metered bool) (m wazero.CompiledModule, functions int, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("compile: %v", p)
		}
	}()
	if b, functions, err = meter.Bound(b); err == nil && metered {
		b, err = meter.Inject(b)
	}
	if err != nil {
		return nil, 0, err
	}
	if m, err = w.rt.CompileModule(ctx, b); err != nil {
		return nil, 0, err
	}
	if err := w.check(m); err != nil {
		return nil, 0, errors.Join(err, m.Close(ctx))
	}
	return m, functions, nil
}

// check refuses what would fail when an instance is made or begins.
func (w *worker) check(m wazero.CompiledModule) error {
	there := w.rt.Module(wasi_snapshot_preview1.ModuleName).ExportedFunctionDefinitions()
	for _, f := range m.ImportedFunctions() {
		from, name, _ := f.Import()
		have := there[name]
		switch {
		case from != wasi_snapshot_preview1.ModuleName || have == nil:
			return fmt.Errorf("it imports %s.%s: there is %s only", from, name, wasi_snapshot_preview1.ModuleName)
		case !slices.Equal(have.ParamTypes(), f.ParamTypes()) || !slices.Equal(have.ResultTypes(), f.ResultTypes()):
			return fmt.Errorf("it imports %s.%s with other types than that has", from, name)
		}
	}
	for _, name := range []string{"_start", meter.Start} {
		f := m.ExportedFunctions()[name]
		switch {
		case f == nil && name == "_start":
			return errors.New("it exports no _start")
		case f == nil:
			continue
		}
		// The engine would run one that is imported as if its own module had called it.
		if _, _, imported := f.Import(); imported || len(f.ParamTypes())+len(f.ResultTypes()) > 0 {
			return fmt.Errorf("%s is not a function of its own that takes and gives nothing", name)
		}
	}
	return nil
}

func (w *worker) trimLocked() {
	for len(w.order) > 1 && (len(w.order) > keptModules || w.bytes > keptBytes) {
		w.dropLocked(w.order[0])
	}
}

func (w *worker) dropLocked(k which) {
	m := w.modules[k]
	if m == nil {
		return
	}
	delete(w.modules, k)
	w.order = slices.DeleteFunc(w.order, func(o which) bool { return o == k })
	w.bytes -= m.size
	m.gone = true
	if m.users == 0 && m.m != nil {
		_ = m.m.Close(context.Background())
	}
}

func (w *worker) letGo(m *module) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if m.users--; m.users == 0 && m.gone && m.m != nil {
		_ = m.m.Close(context.Background())
	}
}
