package guest

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/process"
)

// Version of the protocol.
const Version = 1

const (
	maxRequest = 4 << 20
	maxAnswer  = 4 << 20
	maxText    = 4 << 10 // of an error from the other end
)

// The operations.
const (
	OpResume   = "resume"
	OpFreeze   = "freeze"
	OpMount    = "mount"
	OpExec     = "exec"
	OpFind     = "find"
	OpList     = "list"
	OpStdin    = "stdin"
	OpClose    = "close"
	OpSignal   = "signal"
	OpKill     = "kill"
	OpResize   = "resize"
	OpRelease  = "release"
	OpWait     = "wait"
	OpFollow   = "follow"
	OpKept     = "kept"
	OpFiles    = "files"
	OpDial     = "dial"
	OpStats    = "stats"
	OpEnded    = "ended"
	OpShutdown = "shutdown"
)

// Withheld are the capabilities that no command in a guest gets, bit by bit: with
// them a root could reach the guest's kernel, its devices or the agent. They are
// SYS_MODULE, SYS_RAWIO, SYS_PTRACE, SYS_ADMIN, SYS_BOOT, SYS_TIME, MKNOD,
// AUDIT_CONTROL, MAC_OVERRIDE, MAC_ADMIN, SYSLOG, WAKE_ALARM, BLOCK_SUSPEND,
// PERFMON, BPF and CHECKPOINT_RESTORE.
const Withheld = 1<<16 | 1<<17 | 1<<19 | 1<<21 | 1<<22 | 1<<25 | 1<<27 | 1<<30 | 1<<32 | 1<<33 | 1<<34 | 1<<35 | 1<<36 | 1<<38 | 1<<39 | 1<<40

// Hello begins a session; the guest answers with its own.
type Hello struct {
	Versions []int  `json:"versions,omitempty"` // of the host
	Version  int    `json:"version,omitempty"`  // of the guest: what is spoken
	Program  string `json:"program,omitempty"`
	Boot     string `json:"boot,omitempty"`  // one life of the agent
	State    State  `json:"state,omitempty"` // of the guest, when it answered
	Error    *Fault `json:"error,omitempty"`
}

// State of a guest.
type State string

// The states.
const (
	Fresh   State = "fresh"   // nothing was said to it yet
	Empty   State = "empty"   // resumed, without a sandbox
	Frozen  State = "frozen"  // until the next resume
	Running State = "running" // the sandbox
	Ended   State = "ended"   // the sandbox, which has no process any more
)

// Fault is an error on the wire.
type Fault struct {
	Class  dsec.Class `json:"class"`
	Op     string     `json:"op"`
	Object string     `json:"object,omitempty"`
	Text   string     `json:"text,omitempty"`
}

// NewFault makes one of an error.
func NewFault(err error) *Fault {
	if e, ok := errors.AsType[*dsec.Error](err); ok {
		f := &Fault{Class: e.Class, Op: e.Op, Object: e.Object}
		if e.Err != nil {
			f.Text = e.Err.Error()
		}
		return f
	}
	return &Fault{Class: dsec.ClassOf(err), Op: "serve request", Text: err.Error()}
}

// Err is the error; the class of one that nobody knows is Internal.
func (f *Fault) Err() error {
	if f == nil {
		return nil
	}
	class := f.Class
	if !slices.Contains(dsec.Classes, class) {
		class = dsec.Internal
	}
	var cause error
	if f.Text != "" {
		cause = errors.New(plain(f.Text))
	}
	return dsec.E(class, plain(f.Op), plain(f.Object), cause)
}

// plain bounds a text of the other end.
func plain(s string) string {
	if len(s) > maxText {
		s = s[:maxText] + "…"
	}
	return strings.ToValidUTF8(strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, s), "\ufffd")
}

// Request is the first of a stream; an operation uses the fields that the
// format lists for it.
type Request struct {
	Op string `json:"op"`

	Resume *Resume `json:"resume,omitempty"`
	Mount  *Mount  `json:"mount,omitempty"`
	Exec   *Exec   `json:"exec,omitempty"`
	Sync   bool    `json:"sync,omitempty"`

	ID     string         `json:"id,omitempty"`
	Stream process.Stream `json:"stream,omitempty"`
	Offset int64          `json:"offset,omitempty"`
	Length int64          `json:"length,omitempty"`
	Signal int            `json:"signal,omitempty"`
	Size   process.Size   `json:"size,omitzero"`
	User   string         `json:"user,omitempty"`
	Port   uint16         `json:"port,omitempty"`
	Grace  time.Duration  `json:"grace,omitempty"`
}

// Answer is the guest's.
type Answer struct {
	Error *Fault `json:"error,omitempty"`

	Spec       *Command        `json:"spec,omitempty"`
	Started    time.Time       `json:"started,omitzero"`
	Execs      []string        `json:"execs,omitempty"`
	N          int64           `json:"n,omitempty"`
	Result     *process.Result `json:"result,omitempty"`
	Head       int64           `json:"head,omitempty"`
	Tail       int64           `json:"tail,omitempty"`
	TailOffset int64           `json:"tail_offset,omitempty"`
	Stats      *Stats          `json:"stats,omitempty"`
	Ending     string          `json:"ending,omitempty"` // why the sandbox ended
	State      State           `json:"state,omitempty"`
}

// Resume is told to a guest whenever it starts, cold or from a snapshot.
type Resume struct {
	Time      int64    `json:"time,omitempty"` // unix ns; 0: the clock is left as it is
	Seed      []byte   `json:"seed"`           // 32 bytes that no other guest gets
	Hostname  string   `json:"hostname,omitempty"`
	MachineID string   `json:"machine_id,omitempty"` // 32 hexadecimal digits, for /etc/machine-id
	Network   *Network `json:"network,omitempty"`

	Frozen bool `json:"frozen,omitempty"` // a sandbox that is frozen stays so

	// Files say what the sandbox is called: they are put in place of what is there when it is
	// made, and again whenever this is told.
	Files []NewFile `json:"files,omitempty"`
}

// Network of the guest's only link beside lo.
type Network struct {
	Link    string `json:"link"`    // its name in the guest
	Address string `json:"address"` // IPv4 "10.0.0.2/30"
	Gateway string `json:"gateway,omitempty"`
	MTU     int    `json:"mtu,omitempty"`
	MAC     string `json:"mac,omitempty"` // "02:00:00:00:00:01"; "": as it is
}

// Mount makes the root of the sandbox, and the sandbox.
type Mount struct {
	Mounts   []FileSystem `json:"mounts"`
	Overlay  Overlay      `json:"overlay"`
	Defaults Defaults     `json:"defaults"`
	Limits   Limits       `json:"limits"`
	Dirs     []string     `json:"dirs,omitempty"` // absolute in the sandbox, made where they are missing

	// Machine: the sandbox is the machine itself, as its own init made it; there are no mounts,
	// no overlay and no namespaces. Only an agent that is not PID 1 takes it, and nothing else.
	Machine bool `json:"machine,omitempty"`
}

// NewFile is a file of root's, of mode 0644.
type NewFile struct {
	Dir     string `json:"dir"` // absolute in the sandbox, made if it is missing
	Name    string `json:"name"`
	Content []byte `json:"content,omitempty"` // none: what is there is removed
}

// FileSystem is one mount below the agent's directory.
type FileSystem struct {
	FSType  string   `json:"fstype"` // "bind" binds the source
	Source  string   `json:"source"`
	Target  string   `json:"target"` // relative
	Options []string `json:"options,omitempty"`
	DAX     string   `json:"dax,omitempty"` // "required"
}

// Overlay names directories relative to the agent's.
type Overlay struct {
	Lowers []string `json:"lowers"` // the topmost first
	Upper  string   `json:"upper"`
	Work   string   `json:"work"`
}

// Defaults of commands.
type Defaults struct {
	User     string            `json:"user,omitempty"`
	Cwd      string            `json:"cwd,omitempty"`
	ImageEnv []string          `json:"image_env,omitempty"`
	Env      map[string]string `json:"env,omitempty"`
}

// Limits of the sandbox as a whole; 0: none.
type Limits struct {
	Memory int64 `json:"memory,omitempty"` // bytes
	Pids   int64 `json:"pids,omitempty"`
	Shm    int64 `json:"shm,omitempty"`   // bytes of /dev/shm; 0: 64 MiB
	Spool  int64 `json:"spool,omitempty"` // bytes of kept output of all commands; 0: 64 MiB

	// Where controllers are not in the unified hierarchy: "tasks" files that what
	// starts commands joins, and where to read what they used.
	Tasks   []string `json:"tasks,omitempty"`
	Account Account  `json:"account,omitzero"`
}

// Account names files as internal/hold has them; empty: the sandbox's own group.
type Account struct {
	OOM   string `json:"oom,omitempty"`
	Limit string `json:"limit,omitempty"`
	Peak  string `json:"peak,omitempty"`
}

// Exec starts a command.
type Exec struct {
	Command
	Caps        uint64 `json:"caps"` // most that a command may have, bit by bit
	NoNewPrivs  bool   `json:"no_new_privs,omitempty"`
	OOMScoreAdj int    `json:"oom_score_adj,omitempty"`
}

// Command is a process.Spec on the wire.
type Command struct {
	ID      string            `json:"id"`
	Argv    [][]byte          `json:"argv"`
	Env     map[string][]byte `json:"env,omitempty"`
	Cwd     []byte            `json:"cwd,omitempty"`
	User    string            `json:"user,omitempty"`
	Stdin   bool              `json:"stdin,omitempty"`
	PTY     *process.Size     `json:"pty,omitempty"`
	Timeout time.Duration     `json:"timeout,omitempty"`
	Head    int64             `json:"head,omitempty"`
	Tail    int64             `json:"tail,omitempty"`
	OnLimit process.OnLimit   `json:"on_limit,omitempty"`
	Main    bool              `json:"main,omitempty"`
	Service bool              `json:"service,omitempty"`
}

// NewCommand is the form of a spec on the wire.
func NewCommand(s process.Spec) Command {
	c := Command{ID: s.ID, Cwd: []byte(s.Cwd), User: s.User, Stdin: s.Stdin, PTY: s.PTY, Timeout: s.Timeout, Head: s.Head, Tail: s.Tail,
		OnLimit: s.OnLimit, Main: s.Main, Service: s.Service}
	for _, a := range s.Argv {
		c.Argv = append(c.Argv, []byte(a))
	}
	if s.Env != nil {
		c.Env = map[string][]byte{}
	}
	for k, v := range s.Env {
		c.Env[k] = []byte(v)
	}
	return c
}

// Process is the spec it is the form of.
func (c *Command) Process() process.Spec {
	s := process.Spec{ID: c.ID, Cwd: string(c.Cwd), User: c.User, Stdin: c.Stdin, PTY: c.PTY, Timeout: c.Timeout, Head: c.Head, Tail: c.Tail,
		OnLimit: c.OnLimit, Main: c.Main, Service: c.Service}
	for _, a := range c.Argv {
		s.Argv = append(s.Argv, string(a))
	}
	if c.Env != nil {
		s.Env = map[string]string{}
	}
	for k, v := range c.Env {
		s.Env[k] = string(v)
	}
	return s
}

// Stats is what a sandbox uses, as its guest says.
type Stats struct {
	CPU        time.Duration `json:"cpu"`
	Throttled  time.Duration `json:"throttled"`
	Memory     int64         `json:"memory"`
	MemoryPeak int64         `json:"memory_peak"`
	Pids       int64         `json:"pids"`
	PidsPeak   int64         `json:"pids_peak"`
	PidsDenied int64         `json:"pids_denied"`
	OOMKills   int64         `json:"oom_kills"`
	Disk       int64         `json:"disk"` // bytes used of the file system of the upper directory
	DiskSize   int64         `json:"disk_size"`
}

// bounded is what of it can be so: numbers of a guest are added up, and kept as its highest.
func (s Stats) bounded() Stats {
	const year, bytes, count = 365 * 24 * time.Hour, 1 << 50, 1 << 32
	s.CPU, s.Throttled = min(max(s.CPU, 0), year), min(max(s.Throttled, 0), year)
	for _, n := range []*int64{&s.Memory, &s.MemoryPeak, &s.Disk, &s.DiskSize} {
		*n = min(max(*n, 0), bytes)
	}
	for _, n := range []*int64{&s.Pids, &s.PidsPeak, &s.PidsDenied, &s.OOMKills} {
		*n = min(max(*n, 0), count)
	}
	return s
}

// WriteMessage sends v as JSON with its length.
func WriteMessage(w io.Writer, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if len(b) > maxRequest {
		return fmt.Errorf("message of %d bytes, at most %d", len(b), maxRequest)
	}
	_, err = w.Write(append(binary.LittleEndian.AppendUint32(nil, uint32(len(b))), b...))
	return err
}

// ReadRequest reads what the host asks for.
func ReadRequest(r io.Reader) (q Request, err error) { return q, readMessage(r, maxRequest, &q) }

// readMessage reads JSON of at most so many bytes. Memory is taken as they come.
func readMessage(r io.Reader, most int, v any) error {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return err
	}
	n := int(binary.LittleEndian.Uint32(head[:]))
	if n > most {
		return errProtocol
	}
	b, err := readN(r, int64(n))
	if err != nil {
		return err
	}
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("%w: %w", errProtocol, err)
	}
	return nil
}

// readN reads n bytes, taking memory as they come.
func readN(r io.Reader, n int64) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(r, n))
	if err == nil && int64(len(b)) < n {
		err = io.ErrUnexpectedEOF
	}
	return b, err
}
