package machine

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec"
)

// TestCallsOverAKilledAgent: calls are made again, with the same answer for their
// callers, and of the containers of the killed agent nothing is left.
func TestCallsOverAKilledAgent(t *testing.T) {
	t.Parallel()
	h := start(t)
	module, err := os.ReadFile("../../bench/hello.wasm")
	if err != nil {
		t.Fatal(err)
	}
	call := func(c dsec.Call) dsec.CallResult {
		t.Helper()
		r, err := h.Call(t.Context(), c)
		if err != nil {
			t.Error(err)
		}
		return r
	}
	run := func(script string) dsec.Call {
		return dsec.Call{Type: dsec.CallExec, Image: "box", Command: []string{"sh", "-c", script}}
	}
	if r := call(dsec.Call{Type: dsec.CallWasm, Code: module, Expect: []byte("hello")}); r.Verdict != dsec.VerdictOK {
		t.Fatalf("%+v", r)
	}
	first := call(run("echo $((6*7))"))
	if first.Verdict != dsec.VerdictOK || string(first.Stdout) != "42\n" || first.Use != 1 || first.Generation != 1 {
		t.Fatalf("%+v", first)
	}
	eventually(t, "a container is used again", func() bool { // as soon as it is proved clean
		r := call(run("true"))
		return r.Use > 1
	})
	same := run("cat /proc/self/stat | head -c 0; echo once")
	same.CallID = "k1"
	if a, b := call(same), call(same); a.Use != b.Use || a.Container != b.Container {
		t.Errorf("made twice: %+v %+v", a, b)
	}
	same.Stdin = []byte("other")
	if _, err := h.Call(t.Context(), same); dsec.ClassOf(err) != dsec.Conflict {
		t.Errorf("the id of another call: %v", err)
	}
	var calls sync.WaitGroup
	for range 3 {
		calls.Go(func() {
			if r := call(run("(setsid sleep 600 &) ; sleep 2; echo done")); r.Verdict != dsec.VerdictOK || string(r.Stdout) != "done\n" || r.Container == first.Container {
				t.Errorf("over the kill: %+v", r)
			}
		})
	}
	containers := func() (found []string) {
		_ = filepath.WalkDir(filepath.Join(h.Dir, "data"), func(p string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() && filepath.Base(filepath.Dir(p)) == "sandboxes" && !strings.HasPrefix(d.Name(), ".") {
				found = append(found, d.Name())
			}
			return nil
		})
		return found
	}
	eventually(t, "three containers are there", func() bool { return len(containers()) >= 3 })
	was := containers()
	h.Kill("node")
	calls.Wait()
	for _, id := range was {
		eventually(t, id+" is gone", func() bool {
			for _, now := range containers() {
				if now == id {
					return false
				}
			}
			return true
		})
	}
	if _, err := h.Call(t.Context(), dsec.Call{Type: dsec.CallExec, Image: "nothing", Command: []string{"true"}, Limits: dsec.CallLimits{Wall: time.Second}}); !errors.Is(err, dsec.NotFound.Err()) {
		t.Errorf("a call in no image: %v", err)
	}
}
