package function

import (
	"context"
	_ "embed" // the zygote
	"errors"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/lifecycle"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/runtime"
)

// box is one container.
type box struct {
	id         dsec.SandboxID
	pool       *pool
	generation int64
	layers     string
	env        []string // of the image
	cells      runtime.Cells
	give       func() // what it has of the budget

	uses  int64     // of who has it
	since time.Time // it waits; of the engine's lock
}

const (
	taskUID    = 65534       // nobody: in every image, and owner of nothing
	boxDisk    = 16 << 20    // of a disk on which only directories are made, once
	boxTasks   = 16          // beside those of a call: what makes cells, and an interpreter with its threads
	destroyIn  = time.Minute //
	makeWithin = time.Minute
)

func layersOf(s layer.Set) string {
	var all []string
	for _, l := range s.Layers {
		all = append(all, string(l.Digest))
	}
	return strings.Join(all, " ")
}

// spec of the container of a call.
func specOf(c *dsec.Call) dsec.Spec {
	return dsec.Spec{Tier: dsec.TierContainer, Image: c.Image, Layers: c.Layers, Hostname: "function", Network: dsec.NetworkNone, Profile: "build", OOM: dsec.OOMExec,
		NoNewPrivs: true, Limits: dsec.Limits{CPU: c.Limits.CPU, CPUWeight: 100, Memory: c.Limits.Memory, Pids: c.Limits.Pids + boxTasks, Disk: boxDisk, Output: 1 << 20},
		Lifetimes: dsec.Lifetimes{Idle: time.Hour, Retention: time.Hour}}
}

// make makes a container for a call that has a place for it, or gives the place back.
func (e *Engine) make(ctx context.Context, p *pool, c *dsec.Call) (_ *box, err error) {
	b := &box{id: dsec.NewSandboxID(e.cfg.Node), pool: p, give: func() {}}
	ctx, cancel := context.WithTimeout(ctx, makeWithin)
	defer cancel()
	spec := specOf(c)
	var set layer.Set
	_, err = lifecycle.Run(ctx, "function.container",
		lifecycle.Step{Name: "budget", Do: func(context.Context) (err error) {
			b.give, err = e.cfg.Source.Admit(spec.Limits)
			return err
		}, Undo: func(context.Context) error { b.give(); return nil }},
		lifecycle.Step{Name: "layers", Do: func(ctx context.Context) (err error) {
			set, err = e.cfg.Source.Acquire(ctx, p.key.project, string(b.id), p.refs)
			return err
		}, Undo: func(ctx context.Context) error { return e.cfg.Source.Release(ctx, string(b.id)) }},
		lifecycle.Step{Name: "container", Do: func(ctx context.Context) error {
			set.Config.Entrypoint = nil // nothing runs in it but calls
			_, err := e.cfg.Mechanism.Create(ctx, runtime.Request{ID: b.id, Spec: spec, Layers: set})
			return err
		}, Undo: func(ctx context.Context) error { return e.cfg.Mechanism.Destroy(ctx, b.id) }},
		lifecycle.Step{Name: "cells", Do: func(ctx context.Context) (err error) {
			b.env = set.Config.Env
			s := runtime.CellSpec{UID: taskUID, GID: taskUID, Loopback: c.Network == dsec.CallLoopback}
			if c.Type == dsec.CallPython {
				s.Interpreter = interpreter(c, b.env)
			}
			b.cells, err = e.cfg.Mechanism.Cells(ctx, b.id, s)
			return err
		}},
	)
	if err != nil {
		e.failed(p)
		return nil, err
	}
	e.made.Add(1)
	b.layers = layersOf(set)
	e.mu.Lock()
	defer e.mu.Unlock()
	e.setLayersLocked(p, b.layers)
	p.made++
	b.generation = p.made
	return b, nil
}

// destroy removes a container; what fails is found when the agent starts the next time.
func (e *Engine) destroy(b *box) {
	ctx, cancel := context.WithTimeout(context.Background(), destroyIn)
	defer cancel()
	err := b.cells.Close()
	if derr := e.cfg.Mechanism.Destroy(ctx, b.id); derr != nil {
		e.cfg.Log.Warn("remove a container of the function tier", "sandbox", b.id, "err", errors.Join(err, derr))
	} else if err := e.cfg.Source.Release(ctx, string(b.id)); err != nil {
		e.cfg.Log.Warn("release layers", "lease", b.id, "err", err)
	}
	b.give()
}

//go:embed zygote.py
var zygote string

// interpreter is the Python of an image, as it waits for calls.
func interpreter(c *dsec.Call, env []string) *runtime.Interpreter {
	i := &runtime.Interpreter{Args: append([]string{"-I", "-B", "-c", zygote, strconv.Itoa(unix.SYS_SETNS), strconv.Itoa(unix.SYS_CLONE)}, c.Preload...),
		Env: append(environment(env, nil), "PYTHONDONTWRITEBYTECODE=1")}
	for dir := range strings.SplitSeq(pathOf(i.Env), ":") {
		if len(i.Programs) < 14 && path.IsAbs(dir) {
			i.Programs = append(i.Programs, path.Join(dir, "python3"))
		}
	}
	return i
}

func pathOf(env []string) (p string) {
	for _, kv := range env {
		if v, ok := strings.CutPrefix(kv, "PATH="); ok {
			p = v
		}
	}
	return p
}

// environment is what a call sees: what nobody says, the image's, and its own.
func environment(image []string, own map[string]string) []string {
	all := map[string]string{"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/task", "LANG": "C.UTF-8", "USER": "nobody"}
	for _, kv := range image {
		if k, v, ok := strings.Cut(kv, "="); ok && k != "" {
			all[k] = v
		}
	}
	for k, v := range own {
		all[k] = v
	}
	list := make([]string, 0, len(all))
	for k, v := range all {
		list = append(list, k+"="+v)
	}
	slices.Sort(list)
	return list
}

// payload is what the zygote is told, in words that end with a NUL: the seconds of CPU
// time, how many arguments and they, how many variables beside its own and they, the code.
func payload(c *dsec.Call) []byte {
	word := func(b []byte, s string) []byte { return append(append(b, s...), 0) }
	b := word(nil, strconv.FormatInt(max(1, int64((c.Limits.CPUTime+time.Second-1)/time.Second)), 10))
	b = word(b, strconv.Itoa(len(c.Command)))
	for _, a := range c.Command {
		b = word(b, a)
	}
	b = word(b, strconv.Itoa(len(c.Env)))
	for _, k := range slices.Sorted(maps.Keys(c.Env)) {
		b = word(b, k+"="+c.Env[k])
	}
	return append(b, c.Code...)
}

// run makes of a call what happens in a cell.
func (b *box) run(c *dsec.Call) runtime.CellRun {
	l := c.Limits
	r := runtime.CellRun{Command: runtime.CellCommand{Wall: l.Wall, CPU: l.CPUTime}, Env: environment(b.env, c.Env), Outputs: c.Outputs, Stdin: c.Stdin,
		Output: l.Output, Disk: l.Disk, Back: l.Files}
	for _, f := range c.Files {
		r.Files = append(r.Files, runtime.CellFile(f))
	}
	if len(c.Compile) > 0 {
		r.Compile = &runtime.CellCommand{Argv: c.Compile, Wall: l.Compile, CPU: l.Compile}
	}
	if c.Type != dsec.CallPython {
		r.Command.Argv = c.Command
		return r
	}
	r.Payload = payload(c)
	return r
}
