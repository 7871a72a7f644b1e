package hold

import (
	"encoding/binary"
	"encoding/json"
	"os"
	"slices"
	"sort"
	"time"

	"github.com/opendsec/dsec/process"
)

// The bodies of requests and replies, where the exported types do not travel
// as they are.

// wireHello is read by programs of every version: nothing in it may change its
// meaning.
type wireHello struct {
	Protocol int
	Version  string
	PID      int
	Started  time.Time
	Digest   string // SHA-256 of the program, in hex
}

type wireName struct{ Name string }

type wireSpawn struct {
	SpawnSpec
	HasSys bool
}

type wireShell struct{ PID int }

type wireEnter struct {
	ID, As   string
	Hostname string
	Mounts   []wireMount
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

// wireExec is what a hold needs to know of a command; the image that follows it
// in the body of the request is only passed on.
type wireExec struct {
	Sandbox  string
	Spec     wireSpec
	Cwd      raw
	UID, GID uint32
	Spool    string

	image []byte
}

// encodeExec makes the body: length of the description, description, image.
func encodeExec(s *ExecSpec) ([]byte, error) {
	im := execImage{join: joinAll, uid: s.UID, gid: s.GID, groups: s.Groups, caps: s.Caps, seccomp: s.Seccomp, rlimits: s.Rlimits, landlock: s.Landlock,
		umask: s.Umask, cwd: s.Cwd, oom: s.OOMScoreAdj, argv: s.Spec.Argv, env: s.Env, apparmor: s.AppArmor}
	if im.umask == 0 {
		im.umask = 0o022
	}
	if im.cwd == "" {
		im.cwd = "/"
	}
	if s.NoNewPrivs {
		im.flags |= imageNNP
	}
	if s.Notice {
		im.flags |= imageNotice
	}
	if p := s.Spec.PTY; p != nil {
		im.flags, im.rows, im.cols = im.flags|imagePTY, p.Rows, p.Cols
	}
	if len(s.Wrap) > 0 {
		im.argv = slices.Concat(s.Wrap, s.Spec.Argv)
	}
	if len(im.argv) > 0 {
		im.paths = candidates(im.argv[0], im.env)
	}
	meta, err := json.Marshal(wireExec{Sandbox: s.Sandbox, Spec: toWireSpec(s.Spec), Cwd: raw(im.cwd), UID: s.UID, GID: s.GID,
		Spool: s.Spool})
	if err != nil {
		return nil, err
	}
	b := binary.LittleEndian.AppendUint32(nil, uint32(len(meta)))
	return append(append(b, meta...), im.encode()...), nil
}

func decodeExec(b []byte) (wireExec, error) {
	var w wireExec
	if len(b) < 4 || uint64(len(b)-4) < uint64(binary.LittleEndian.Uint32(b)) {
		return w, errTruncated
	}
	n := 4 + int(binary.LittleEndian.Uint32(b))
	if err := json.Unmarshal(b[4:n], &w); err != nil {
		return w, err
	}
	w.image = b[n:]
	return w, nil
}

// wireExecInfo is an ExecInfo on its way.
type wireExecInfo struct {
	Sandbox string
	Spec    wireSpec
	PID     int
	Group   uint64 `json:",omitempty"`
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

// wireEvent is an Event on its way. Kept is all the output of a command that
// said little, stdout and stderr; nil where it has to be asked for.
type wireEvent struct {
	Event
	Kept [][]byte `json:",omitempty"`
}

// wireRefusals asks for what was refused since the batch that was written down.
type wireRefusals struct{ Written uint64 }

type wireNames struct{ Names []string }

func closeAll(files []*os.File) {
	for _, f := range files {
		if f != nil {
			_ = f.Close()
		}
	}
}
