package dsec

import (
	"strings"
	"testing"
	"time"
)

func TestCallsThatCanNeverWork(t *testing.T) {
	exec := func(f func(*Call)) Call {
		c := Call{Type: CallExec, Image: "i", Command: []string{"true"}}
		f(&c)
		return c
	}
	for field, c := range map[string]Call{
		"type":           {Image: "i"},
		"image":          {Type: CallExec, Command: []string{"true"}},
		"command":        {Type: CallExec, Image: "i"},
		"code":           {Type: CallPython, Image: "i"},
		"limits.memory":  exec(func(c *Call) { c.Limits.Memory = 1 }),
		"limits.wall":    exec(func(c *Call) { c.Limits.Wall = time.Hour }),
		"limits.cpu":     exec(func(c *Call) { c.Limits.CPU = -1 }),
		"limits.output":  exec(func(c *Call) { c.Limits.Output = 1 << 40 }),
		"files":          exec(func(c *Call) { c.Files = []CallFile{{Path: "../x"}} }),
		"env":            exec(func(c *Call) { c.Env = map[string]string{"A=B": ""} }),
		"outputs":        exec(func(c *Call) { c.Outputs = []string{strings.Repeat("*", 1000)} }),
		"network":        exec(func(c *Call) { c.Network = "open" }),
		"compare":        exec(func(c *Call) { c.Compare = "nearly" }),
		"call_id":        exec(func(c *Call) { c.CallID = strings.Repeat("x", 300) }),
		"layers":         exec(func(c *Call) { c.Layers = make([]LayerRef, MaxLayers+1) }),
		"limits.pids":    exec(func(c *Call) { c.Limits.Pids = -1 }),
		"limits.compile": exec(func(c *Call) { c.Limits.Compile = -1 }),
	} {
		e, ok := c.Validate().(*Error)
		if !ok || e.Class != Invalid || e.Object != field {
			t.Errorf("%s: %v", field, c.Validate())
		}
	}
	for _, p := range []string{"/a", "a/../b", "a//b", ".", "", "a/..", "..", "a\x00"} {
		if c := exec(func(c *Call) { c.Files = []CallFile{{Path: p}} }); c.Validate() == nil {
			t.Errorf("file %q is accepted", p)
		}
	}
	for _, files := range [][]CallFile{{{Path: "a"}, {Path: "a/b"}}, {{Path: "a/b/c"}, {Path: "a/b"}}, {{Path: strings.Repeat("n", 256)}}, {{Path: strings.Repeat("n", 256) + "/x"}}, {{Path: strings.Repeat("a/", 4<<20) + "a"}}} {
		if err := (&Call{Type: CallExec, Image: "i", Command: []string{"x"}, Files: files}).Validate(); ClassOf(err) != Invalid {
			t.Errorf("%.60q: %v", files[0].Path, err)
		}
	}
	wasm := Call{Type: CallWasm, Code: []byte("m"), Limits: CallLimits{Memory: MinWasmMemory}}
	if err := wasm.Validate(); err != nil {
		t.Error(err)
	}
	if wasm.Limits.Fuel = MaxCallFuel; wasm.Validate() != nil {
		t.Error(wasm.Validate())
	}
	if wasm.Limits.Fuel++; wasm.Validate() == nil {
		t.Error("more fuel than there may be is valid")
	}
	wasm.Limits.Fuel = 0
	if wasm.Image = "i"; wasm.Validate() == nil {
		t.Error("a module with an image is accepted")
	}
}

func TestJudge(t *testing.T) {
	for _, tt := range []struct {
		how        CallCompare
		have, want string
		ok         bool
	}{
		{CompareLines, "1 2  \n3\n\n", "1 2\n3", true},
		{CompareLines, "1  2\n", "1 2\n", false},
		{CompareLines, " 1\n", "1\n", false},
		{CompareLines, "", "\n \n", true},
		{CompareExact, "1\n", "1", false},
		{CompareExact, "1\n", "1\n", true},
		{CompareTokens, "1  2\n\n3", "1 2 3\n", true},
		{CompareTokens, "12 3", "1 2 3", false},
	} {
		c := Call{Compare: tt.how, Expect: []byte(tt.want)}
		if got := c.Judge([]byte(tt.have)); got != tt.ok {
			t.Errorf("%s: %q for %q: %v", tt.how, tt.have, tt.want, got)
		}
	}
	if c := (Call{}); !c.Judge([]byte("anything")) {
		t.Error("what is not expected is judged")
	}
}
