package hold

import (
	"encoding/json"
	"os"
	"sort"
	"time"

	"github.com/opendsec/dsec/process"
)

// The bodies of requests and replies, where the exported types do not travel
// as they are.

type wireHello struct {
	Protocol int
	Version  string
	PID      int
	Started  time.Time
}

type wireName struct{ Name string }

type wireSpawn struct {
	SpawnSpec
	HasNet bool
}

type wireShell struct{ PID int }

type wireEnter struct {
	ID       string
	HasDev   bool
	Hostname string
	ShmSize  int64
	Lo       bool
	Mounts   []wireMount
	Sysctls  []Sysctl
	Masks    []string
	ReadOnly []string
}

type wireMount struct {
	HasSource bool
	Target    string
	Size      int64
	Mode      uint32
	RO, Exec  bool
}

// wireSpec is a process.Spec with its bytes intact and its variables in order.
type wireSpec struct {
	ID         string
	Argv       []raw
	Env        []raw
	Cwd, User  raw
	Stdin      bool
	PTY        *process.Size
	Timeout    time.Duration
	Head, Tail int64
	OnLimit    process.OnLimit
	Main       bool
}

func toWireSpec(s process.Spec) wireSpec {
	w := wireSpec{ID: s.ID, Argv: toRaw(s.Argv), Cwd: raw(s.Cwd), User: raw(s.User), Stdin: s.Stdin, PTY: s.PTY,
		Timeout: s.Timeout, Head: s.Head, Tail: s.Tail, OnLimit: s.OnLimit, Main: s.Main}
	keys := make([]string, 0, len(s.Env))
	for k := range s.Env {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	for _, k := range keys {
		w.Env = append(w.Env, raw(k), raw(s.Env[k]))
	}
	return w
}

func (w wireSpec) spec() process.Spec {
	s := process.Spec{ID: w.ID, Argv: fromRaw(w.Argv), Cwd: string(w.Cwd), User: string(w.User), Stdin: w.Stdin, PTY: w.PTY,
		Timeout: w.Timeout, Head: w.Head, Tail: w.Tail, OnLimit: w.OnLimit, Main: w.Main}
	for i := 0; i+1 < len(w.Env); i += 2 {
		if s.Env == nil {
			s.Env = map[string]string{}
		}
		s.Env[string(w.Env[i])] = string(w.Env[i+1])
	}
	return s
}

func (w wireSpec) equal(v wireSpec) bool {
	a, _ := json.Marshal(w)
	b, _ := json.Marshal(v)
	return string(a) == string(b)
}

type wireExec struct {
	Sandbox     string
	Spec        wireSpec
	Env         []raw
	Cwd         raw
	UID, GID    uint32
	Groups      []uint32
	Caps        Caps
	NoNewPrivs  bool
	Seccomp     []byte
	Rlimits     []Rlimit
	OOMScoreAdj int
	Umask       uint32
	Tasks       []string
	Spool       string
}

func toWireExec(s ExecSpec) wireExec {
	return wireExec{Sandbox: s.Sandbox, Spec: toWireSpec(s.Spec), Env: toRaw(s.Env), Cwd: raw(s.Cwd), UID: s.UID, GID: s.GID,
		Groups: s.Groups, Caps: s.Caps, NoNewPrivs: s.NoNewPrivs, Seccomp: s.Seccomp, Rlimits: s.Rlimits,
		OOMScoreAdj: s.OOMScoreAdj, Umask: s.Umask, Tasks: s.Tasks, Spool: s.Spool}
}

// wireExecInfo is an ExecInfo on its way.
type wireExecInfo struct {
	Sandbox string
	Spec    wireSpec
	PID     int
	Started time.Time
	Spool   string
	Ended   bool
	Acked   bool
	Result  ExecResult
}

func (w wireExecInfo) info() ExecInfo {
	return ExecInfo{Sandbox: w.Sandbox, Spec: w.Spec.spec(), PID: w.PID, Started: w.Started, Spool: w.Spool, Ended: w.Ended,
		Acked: w.Acked, Result: w.Result}
}

type wireSandboxInfo struct {
	SandboxInfo
	Execs []wireExecInfo
}

// wireRef names a command and what is to be done to it.
type wireRef struct {
	Sandbox string
	Exec    string
	Signal  int            `json:",omitempty"`
	Stream  process.Stream `json:",omitempty"`
	Offset  int64          `json:",omitempty"`
	Size    process.Size   `json:",omitzero"`
	Held    bool           `json:",omitempty"`
	Path    raw            `json:",omitempty"`
	Type    EventType      `json:",omitempty"`
}

type wireResult struct{ Result ExecResult }

type wireNames struct{ Names []string }

func closeAll(files []*os.File) {
	for _, f := range files {
		if f != nil {
			_ = f.Close()
		}
	}
}
