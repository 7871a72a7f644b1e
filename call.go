package dsec

import (
	"path"
	"slices"
	"strings"
	"time"
)

// CallType is a kind of task.
type CallType string

// The types.
const (
	CallExec   CallType = "exec"   // a program of the image, or one that is compiled first
	CallPython CallType = "python" // a snippet, in a child of an interpreter that waits for it
	CallWasm   CallType = "wasm"   // a WebAssembly module, by WASI preview 1
)

// Call is a stateless task: all it needs comes with it, all it makes goes back, and
// nothing of it is there when the next one comes. See docs/formats/function.md.
type Call struct {
	CallID  string            `json:"call_id,omitempty"` // idempotency key
	Type    CallType          `json:"type"`
	Image   LayerRef          `json:"image,omitempty"`   // of exec and python
	Layers  []LayerRef        `json:"layers,omitempty"`  // above it
	Compile []string          `json:"compile,omitempty"` // of exec: runs first, in the same place
	Command []string          `json:"command,omitempty"` // of exec; of the others their arguments
	Code    []byte            `json:"code,omitempty"`    // of python the text, of wasm the module
	Preload []string          `json:"preload,omitempty"` // of python: modules that are imported before the call comes
	Env     map[string]string `json:"env,omitempty"`
	Files   []CallFile        `json:"files,omitempty"`   // below the working directory
	Outputs []string          `json:"outputs,omitempty"` // patterns of files to bring back; "*" stays in a directory, "**" does not
	Stdin   []byte            `json:"stdin,omitempty"`
	Expect  []byte            `json:"expect,omitempty"`  // what stdout has to be; nil: anything
	Compare CallCompare       `json:"compare,omitempty"` // "" is lines
	Network CallNetwork       `json:"network,omitempty"` // "" is none
	Limits  CallLimits        `json:"limits"`
}

// CallCompare says when output is what was expected.
type CallCompare string

// The comparisons.
const (
	CompareLines  CallCompare = "lines"  // white space at the ends of lines and empty lines at the end do not count
	CompareExact  CallCompare = "exact"  // byte for byte
	CompareTokens CallCompare = "tokens" // white space separates and does not count otherwise
)

// CallNetwork is what a call can reach.
type CallNetwork string

// The networks.
const (
	CallNoNetwork CallNetwork = "none"     // AF_UNIX only
	CallLoopback  CallNetwork = "loopback" // a network of its own with nothing but itself
)

// CallFile is a file that comes or goes with a call.
type CallFile struct {
	Path string `json:"path"` // relative and clean
	Mode uint32 `json:"mode"` // permission bits; 0: 0644
	Data []byte `json:"data"`
}

// CallLimits bound one call. Zero is the default of that field.
type CallLimits struct {
	CPU     float64       `json:"cpu"`      // cores; 1
	CPUTime time.Duration `json:"cpu_time"` // of the command; as Wall
	Wall    time.Duration `json:"wall"`     // of the command; 10 s
	Compile time.Duration `json:"compile"`  // wall and CPU time of compiling; 30 s
	Memory  int64         `json:"memory"`   // bytes, files that the call writes included; 256 MiB
	Pids    int64         `json:"pids"`     // processes and threads; 64
	Disk    int64         `json:"disk"`     // bytes in files; a quarter of Memory
	Output  int64         `json:"output"`   // bytes of each of stdout and stderr; 1 MiB
	Files   int64         `json:"files"`    // bytes of files that come back; 4 MiB
	Fuel    int64         `json:"fuel"`     // of wasm: instructions; not counted
}

// Caps on a Call.
const (
	MaxCallBytes   = 24 << 20 // of all that comes with it
	MaxCallFiles   = 1024
	MaxCallArgs    = 1024
	MaxCallOutputs = 32
	MaxCallPattern = 512 // bytes of a pattern and of a path
	MaxCallWall    = 10 * time.Minute
	MaxCallOutput  = 8 << 20
	MaxCallBack    = 16 << 20
	MaxCallPreload = 64
	MinCallMemory  = 16 << 20
	MinWasmMemory  = 64 << 10 // a page
	MaxWasmMemory  = 1 << 30
	MaxCallFuel    = 1 << 50
	MaxNameOfFile  = 255
)

// Fill sets every default.
func (c *Call) Fill() {
	l := &c.Limits
	setCall(&l.CPU, 1)
	setCall(&l.Wall, 10*time.Second)
	setCall(&l.CPUTime, l.Wall)
	setCall(&l.Compile, 30*time.Second)
	setCall(&l.Memory, 256<<20)
	setCall(&l.Pids, 64)
	setCall(&l.Disk, l.Memory/4)
	setCall(&l.Output, 1<<20)
	setCall(&l.Files, 4<<20)
	setCall(&c.Compare, CompareLines)
	setCall(&c.Network, CallNoNetwork)
	for i := range c.Files {
		setCall(&c.Files[i].Mode, 0o644)
	}
}

func setCall[T comparable](p *T, v T) {
	var zero T
	if *p == zero {
		*p = v
	}
}

func badCall(field, format string, args ...any) error {
	return Errorf(Invalid, "validate call", field, format, args...)
}

// Validate reports the first thing in c that can never work, as an Invalid error that
// names the field.
func (c *Call) Validate() error {
	if err := c.validateType(); err != nil {
		return err
	}
	if err := c.validateTexts(); err != nil {
		return err
	}
	if !slices.Contains([]CallCompare{"", CompareLines, CompareExact, CompareTokens}, c.Compare) {
		return badCall("compare", "unknown comparison %s, want lines, exact or tokens", Quote(string(c.Compare)))
	}
	if !slices.Contains([]CallNetwork{"", CallNoNetwork, CallLoopback}, c.Network) {
		return badCall("network", "unknown network %s, want none or loopback; a sandbox has more", Quote(string(c.Network)))
	}
	return c.Limits.validate(c.Type)
}

// validateType is about what each type has, and has not.
func (c *Call) validateType() error {
	switch c.Type {
	case CallExec:
		switch {
		case len(c.Command) == 0 || c.Command[0] == "":
			return badCall("command", "is required")
		case len(c.Code) > 0 || len(c.Preload) > 0:
			return badCall("code", "a call of type exec has its code in files and no preload")
		}
	case CallPython:
		if len(c.Code) == 0 || len(c.Compile) > 0 {
			return badCall("code", "a call of type python has code, and nothing to compile")
		}
	case CallWasm:
		switch {
		case len(c.Code) == 0 || len(c.Compile) > 0 || len(c.Preload) > 0:
			return badCall("code", "a call of type wasm has a module as its code, and nothing to compile or preload")
		case c.Image != "" || len(c.Layers) > 0:
			return badCall("image", "a call of type wasm has none: a module brings all it needs")
		case c.Network == CallLoopback:
			return badCall("network", "a module has none")
		case len(c.Outputs) > 0:
			return badCall("outputs", "a module writes no files")
		}
		return nil
	default:
		return badCall("type", "unknown type %s, want exec, python or wasm", Quote(string(c.Type)))
	}
	if c.Image == "" {
		return badCall("image", "is required")
	}
	return nil
}

// validateTexts bounds each string, each list and the sum of all.
func (c *Call) validateTexts() error {
	total := len(c.Code) + len(c.Stdin) + len(c.Expect)
	for _, l := range []struct {
		field string
		list  []string
		most  int // strings
		size  int // bytes of each
	}{{"compile", c.Compile, MaxCallArgs, MaxSpecBytes}, {"command", c.Command, MaxCallArgs, MaxSpecBytes}, {"preload", c.Preload, MaxCallPreload, MaxNameBytes},
		{"outputs", c.Outputs, MaxCallOutputs, MaxCallPattern}, {"image", []string{string(c.Image)}, 1, MaxRefBytes}, {"call_id", []string{c.CallID}, 1, MaxKeyBytes},
		{"layers", layerTexts(c.Layers), MaxLayers, MaxRefBytes}} {
		if len(l.list) > l.most {
			return badCall(l.field, "%d of them, at most %d", len(l.list), l.most)
		}
		for _, s := range l.list {
			if len(s) > l.size || strings.Contains(s, "\x00") {
				return badCall(l.field, "%s has more than %d bytes or a NUL", Quote(s[:min(len(s), 64)]), l.size)
			}
			total += len(s)
		}
	}
	env := 0
	for k, v := range c.Env {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.Contains(v, "\x00") {
			return badCall("env", "variable %s is not representable", Quote(k))
		}
		env += len(k) + len(v) + 2
	}
	if env > MaxEnvBytes || len(c.Env) > MaxCallArgs {
		return badCall("env", "%d bytes in %d variables, at most %d in %d", env, len(c.Env), MaxEnvBytes, MaxCallArgs)
	}
	if err := validateFiles(c.Files); err != nil {
		return err
	}
	for _, f := range c.Files {
		total += len(f.Path) + len(f.Data)
	}
	if total += env; total > MaxCallBytes {
		return badCall("files", "%d bytes in all, at most %d", total, MaxCallBytes)
	}
	return nil
}

// validateFiles bounds each path before it looks at the directories in it.
func validateFiles(all []CallFile) error {
	if len(all) > MaxCallFiles {
		return badCall("files", "%d files, at most %d", len(all), MaxCallFiles)
	}
	dirs := map[string]bool{}
	for _, f := range all {
		p := f.Path
		if p == "" || p == "." || len(p) > MaxCallPattern || path.IsAbs(p) || path.Clean(p) != p || p == ".." || strings.HasPrefix(p, "../") || strings.Contains(p, "\x00") {
			return badCall("files", "path %s, want one that is relative, clean and stays below", Quote(p[:min(len(p), 64)]))
		}
		for d := p; d != "."; d = path.Dir(d) {
			if len(path.Base(d)) > MaxNameOfFile {
				return badCall("files", "%s has a name of more than %d bytes", Quote(p[:min(len(p), 64)]), MaxNameOfFile)
			}
			dirs[path.Dir(d)] = true
		}
	}
	for _, f := range all {
		if dirs[f.Path] {
			return badCall("files", "%s is the directory of another", Quote(f.Path[:min(len(f.Path), 64)]))
		}
	}
	return nil
}

func layerTexts(refs []LayerRef) (out []string) {
	for _, r := range refs {
		out = append(out, string(r))
	}
	return out
}

func (l *CallLimits) validate(t CallType) error {
	least, most := int64(MinCallMemory), int64(MaxBytes)
	if t == CallWasm {
		least, most = MinWasmMemory, MaxWasmMemory
	}
	for _, f := range []struct {
		field       string
		is          int64
		least, most int64
	}{{"limits.memory", l.Memory, least, most}, {"limits.pids", l.Pids, 1, MaxPids}, {"limits.disk", l.Disk, 4 << 10, MaxBytes},
		{"limits.fuel", l.Fuel, 1, MaxCallFuel}, {"limits.output", l.Output, 1, MaxCallOutput}, {"limits.files", l.Files, 1, MaxCallBack},
		{"limits.wall", int64(l.Wall), int64(time.Millisecond), int64(MaxCallWall)}, {"limits.cpu_time", int64(l.CPUTime), int64(time.Millisecond), int64(MaxCallWall)},
		{"limits.compile", int64(l.Compile), int64(time.Millisecond), int64(MaxCallWall)}} {
		if f.is != 0 && (f.is < f.least || f.is > f.most) {
			return badCall(f.field, "%d, want %d to %d", f.is, f.least, f.most)
		}
	}
	if l.Fuel != 0 && t != CallWasm {
		return badCall("limits.fuel", "a call of type %s has none: only instructions of a module are counted", t)
	}
	if !(l.CPU == 0 || l.CPU >= 0.01 && l.CPU <= MaxCPU) {
		return badCall("limits.cpu", "%v, want 0.01 to %d cores", l.CPU, MaxCPU)
	}
	return nil
}

// Verdict says what became of a call.
type Verdict string

// The verdicts. What is the platform's fault is an error and no verdict.
const (
	VerdictOK           Verdict = "ok"
	VerdictRuntimeError Verdict = "runtime_error" // an exit code, a signal, an exception or a trap
	VerdictTimeLimit    Verdict = "time_limit"    // of the clock or of CPU time
	VerdictMemoryLimit  Verdict = "memory_limit"
	VerdictOutputLimit  Verdict = "output_limit"
	VerdictFuelLimit    Verdict = "fuel_limit" // of instructions
	VerdictCompileError Verdict = "compile_error"
	VerdictWrongAnswer  Verdict = "wrong_answer"
)

// CallResult is what a call came to.
type CallResult struct {
	Verdict   Verdict    `json:"verdict"`
	Detail    string     `json:"detail,omitempty"` // why, for people
	ExitCode  int        `json:"exit_code"`        // of the command, else of the compiler; 128+signal when one ended it
	Signal    int        `json:"signal,omitempty"`
	Stdout    []byte     `json:"stdout,omitempty"`
	Stderr    []byte     `json:"stderr,omitempty"` // what the compiler said comes first
	Truncated bool       `json:"truncated,omitempty"`
	Files     []CallFile `json:"files,omitempty"`
	LeftOut   bool       `json:"left_out,omitempty"` // files that match are missing
	Usage     CallUsage  `json:"usage"`
	Backend   string     `json:"backend"` // "cell", "zygote" or "wazero"
	// Container is the sandbox it ran in, Generation how many its pool had had, this one
	// included, and Use how many calls had run in it. None for wasm.
	Container  SandboxID     `json:"container,omitempty"`
	Generation int64         `json:"generation,omitempty"`
	Use        int64         `json:"use,omitempty"`
	Queued     time.Duration `json:"queued"` // it waited for a container
	Node       NodeID        `json:"node,omitempty"`
}

// CallUsage is what a call used.
type CallUsage struct {
	CPU     time.Duration `json:"cpu"`  // of a module: not known
	Wall    time.Duration `json:"wall"` // of the command; with a compile error, of the compiler
	Compile time.Duration `json:"compile,omitempty"`
	Memory  int64         `json:"memory"`         // most bytes at one time
	Fuel    int64         `json:"fuel,omitempty"` // instructions, if they were limited
}

// Judge compares stdout with what was expected.
func (c *Call) Judge(stdout []byte) bool {
	if c.Expect == nil {
		return true
	}
	have, want := string(stdout), string(c.Expect)
	switch c.Compare {
	case CompareExact:
		return have == want
	case CompareTokens:
		return slices.Equal(strings.Fields(have), strings.Fields(want))
	}
	return slices.Equal(judgedLines(have), judgedLines(want))
}

func judgedLines(s string) []string {
	lines := strings.Split(s, "\n")
	for i := range lines {
		lines[i] = strings.TrimRight(lines[i], " \t\r\v\f")
	}
	for len(lines) > 0 && lines[len(lines)-1] == "" {
		lines = lines[:len(lines)-1]
	}
	return lines
}
