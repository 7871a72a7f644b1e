package daemon

import (
	"log/slog"

	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/function"
	"github.com/opendsec/dsec/runtime/function/wasm"
)

// functions opens the function tier of a node, on its container tier. dir is for nothing: it stays empty.
func (a *agent) functions(dir string, log *slog.Logger) func(runtime.Source) runtime.Caller {
	return func(s runtime.Source) runtime.Caller {
		return function.New(function.Config{Mechanism: a.tier, Source: s, Node: a.id, Log: log,
			Modules: wasm.New(wasm.Options{Exe: self, Dir: dir, Cgroups: a.groups, Log: log})})
	}
}
