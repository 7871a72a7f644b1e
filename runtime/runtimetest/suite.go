package runtimetest

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
)

// Env is what the suite needs of a tier under test.
type Env struct {
	Runtime runtime.Runtime
	// Layers returns a stack that holds what the package comment promises, leased
	// under the name. nil: empty sets, for a tier that needs no layers.
	Layers func(t *testing.T, lease string) layer.Set
	// Spec changes what the suite asks for, before a case does: where a tier has more
	// than one isolation. nil: nothing.
	Spec func(*dsec.Spec)
	// Reopen closes Runtime and opens another over the same state, as a new
	// agent would. nil skips what needs it.
	Reopen func(t *testing.T) runtime.Runtime
	// Listen is the argv of a server that echoes one connection on a port. nil:
	// nc -l -p PORT -e cat.
	Listen func(port string) []string
	// Skip says why a case is not run here; "": it is. nil: all are. It is for runs that must be short, where another
	// has all.
	Skip func(name string) (why string)
	// Small is the memory of a sandbox that is to run out of it. 0: 32 MiB.
	Small int64
	// Hog is the argv of a command that fills its memory. nil: tail /dev/zero.
	Hog []string
}

// patience is how long anything may take that must not hang.
const patience = 20 * time.Second

type suiteCase struct {
	name string
	run  func(t *testing.T, e *Env)
}

// Run runs every case of the contract. Each makes sandboxes of its own on the
// one runtime that factory returns, and must leave none.
func Run(t *testing.T, factory func(t *testing.T) *Env) {
	e := factory(t)
	t.Cleanup(func() { _ = e.Runtime.Close() }) // Close is tested by the reopening cases
	cases := [][]suiteCase{lifecycleCases, execCases, outputCases, endCases, insideCases, phaseCases}
	for _, group := range cases {
		for _, c := range group {
			t.Run(c.name, func(t *testing.T) {
				if e.Skip != nil {
					if why := e.Skip(c.name); why != "" {
						t.Skip(why)
					}
				}
				c.run(t, e)
			})
		}
	}
	t.Run("nothing is left", func(t *testing.T) {
		list, err := e.Runtime.List(t.Context())
		if err != nil || len(list) != 0 {
			t.Fatalf("list: %v %v", list, err)
		}
	})
}

// request is a small sandbox with its defaults filled in.
func (e *Env) request(t *testing.T, change func(*dsec.Spec)) runtime.Request {
	t.Helper()
	id := dsec.NewSandboxID("suite")
	s := dsec.Spec{Tier: e.Runtime.Tier(), Image: "suite", Network: dsec.NetworkNone, Profile: "build", OOM: dsec.OOMExec,
		Limits:    dsec.Limits{CPU: 1, CPUWeight: 100, Memory: 128 << 20, Pids: 128, Disk: 64 << 20, Output: 64 << 20},
		Lifetimes: dsec.Lifetimes{Idle: time.Hour, Retention: time.Hour}}
	if e.Spec != nil {
		e.Spec(&s)
	}
	if change != nil {
		change(&s)
	}
	r := runtime.Request{ID: id, Spec: s}
	if e.Layers != nil {
		r.Layers = e.Layers(t, string(id))
	}
	return r
}

// create makes a sandbox that is destroyed at the end of the test.
func (e *Env) create(t *testing.T, change func(*dsec.Spec)) dsec.SandboxID {
	t.Helper()
	r := e.request(t, change)
	e.destroyAtEnd(t, r.ID)
	steps, err := e.Runtime.Create(t.Context(), r)
	if err != nil {
		t.Fatalf("create: %v", err)
	}
	if len(steps) == 0 {
		t.Fatal("no step times")
	}
	return r.ID
}

func (e *Env) destroyAtEnd(t *testing.T, id dsec.SandboxID) {
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := e.Runtime.Destroy(ctx, id); err != nil {
			t.Errorf("destroy: %v", err)
		}
	})
}

func (e *Env) execer(t *testing.T) runtime.Execer { return ability[runtime.Execer](t, e) }

// ability skips the test if the tier does not have it.
func ability[T any](t *testing.T, e *Env) T {
	t.Helper()
	a, ok := e.Runtime.(T)
	if !ok {
		t.Skipf("the %s tier is no %T", e.Runtime.Tier(), (*T)(nil))
	}
	return a
}

// start runs a command and fails the test if it does not start.
func (e *Env) start(t *testing.T, id dsec.SandboxID, s process.Spec) process.Process {
	t.Helper()
	p, err := e.execer(t).Exec(t.Context(), id, s)
	if err != nil {
		t.Fatalf("exec %q: %v", s.Argv, err)
	}
	return p
}

// wait returns the result, within patience.
func wait(t *testing.T, p process.Process) process.Result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	r, err := p.Wait(ctx)
	if err != nil {
		t.Fatalf("wait for %q: %v", p.Spec().Argv, err)
	}
	return r
}

// kept is the whole of a stream, which must not be truncated.
func kept(t *testing.T, p process.Process, s process.Stream) string {
	t.Helper()
	head, tail, off, err := p.Kept(t.Context(), s)
	if err != nil {
		t.Fatalf("kept output of %q: %v", p.Spec().Argv, err)
	}
	if len(tail) > 0 && off != int64(len(head)) {
		t.Fatalf("kept output of %q has a hole from %d to %d", p.Spec().Argv, len(head), off)
	}
	return string(head) + string(tail)
}

// sh runs a script and returns its result and output.
func (e *Env) sh(t *testing.T, id dsec.SandboxID, script string) (process.Result, string) {
	t.Helper()
	p := e.start(t, id, Shell(script))
	r := wait(t, p)
	out := kept(t, p, process.Stdout)
	release(t, p)
	return r, out
}

func release(t *testing.T, p process.Process) {
	t.Helper()
	if err := p.Release(t.Context()); err != nil {
		t.Errorf("release: %v", err)
	}
}

// follow reads a stream from an offset to its end and returns it with the
// chunks' offsets checked.
func follow(t *testing.T, p process.Process, s process.Stream, offset int64) []byte {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	r, err := p.Follow(ctx, s, offset)
	if err != nil {
		t.Fatalf("follow: %v", err)
	}
	defer r.Close()
	var b bytes.Buffer
	for {
		c, err := r.Next(ctx)
		if err != nil {
			t.Fatalf("follow after %d bytes: %v", b.Len(), err)
		}
		if c.Offset != offset+int64(b.Len()) {
			t.Fatalf("chunk at %d, want %d", c.Offset, offset+int64(b.Len()))
		}
		b.Write(c.Data)
		if c.EOF {
			return b.Bytes()
		}
	}
}

// wantClass fails unless err has one of the classes and its text holds part.
func wantClass(t *testing.T, err error, part string, classes ...dsec.Class) {
	t.Helper()
	for _, c := range classes {
		if errors.Is(err, c.Err()) && strings.Contains(err.Error(), part) {
			return
		}
	}
	t.Fatalf("error %q of class %q, want one of %v that names %q", err, dsec.ClassOf(err), classes, part)
}

// eventually polls until fn is true.
func eventually(t *testing.T, what string, fn func() bool) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for !fn() {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %v", what, patience)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func (e *Env) status(t *testing.T, id dsec.SandboxID) (runtime.Status, bool) {
	t.Helper()
	list, err := e.Runtime.List(t.Context())
	if err != nil {
		t.Fatalf("list: %v", err)
	}
	for _, s := range list {
		if s.ID == id {
			return s, true
		}
	}
	return runtime.Status{}, false
}
