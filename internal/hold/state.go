package hold

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/opendsec/dsec/process"
)

// stateFormat is raised with every change of the state below; a program reads
// its own and, where it says so, older ones. See docs/formats/hold.md.
const (
	stateFormat = 3
	stateOldest = 1 // 1 is without Filters, Listeners, Batch and Refusals, 1 and 2 without Plains
)

// holdState is a hold on its way from one program to the next. Descriptors are
// numbers, which stay the same; 0 is none.
type holdState struct {
	Format    int
	Native    int           // nativeFormat
	At        time.Duration // on the monotonic clock
	Started   time.Time
	Socket    string
	Binary    int // the program itself
	Lock      int
	Listener  int
	Forkers   []forkerState
	Store     map[string]int
	Lingering []string
	Discards  []int    // pipes of commands that are forgotten
	Filters   [][]byte // of listeners
	Batch     refusalBatch
	Refusals  []Refusal // after the batch
	Sandboxes []sandboxState
	Plains    []plainState
}

type plainState struct {
	Spec         wirePlain
	PID          int
	Pidfd        int // until it ended
	Begun        time.Time
	Ended        bool
	Code, Signal int
}

type forkerState struct{ PID, Socket int }

type sandboxState struct {
	ID       string
	Spec     SpawnSpec
	PID      int
	Pidfd    int
	Control  int // until it is entered
	Entered  bool
	Held     bool
	Asked    bool
	Ended    bool
	Acked    bool
	Signal   int
	Prepared [3]bool
	Unready  string // why it could not be prepared
	Helpers  []childState
	Execs    []execState

	Listeners []listenerState
}

type listenerState struct {
	Exec   string
	File   int
	Filter int // index
}

type childState struct{ PID, Pidfd int }

type execState struct {
	Spec     wireExec
	PID      int
	Pidfd    int // until it ended
	Begun    time.Time
	Ran      time.Duration // since it begun
	Clock    clockState
	OOM      int64
	Throttle time.Duration
	Spooled  bool
	Input    int
	Out      []pumpState // stdout, and without a terminal stderr
	Cause    process.Status
	Ended    bool
	Acked    bool
	Result   ExecResult
}

type pumpState struct {
	Stage    pumpStage
	Pipe     int
	Finished bool
	Seen     int64
	Rest     int64
	Pending  []byte
	Spool    process.SpoolState
	File     int
}

func (s *holdState) encode() ([]byte, error) { return json.MarshalIndent(s, "", " ") }

// decodeState reads a state that can be gone on with.
func decodeState(b []byte) (*holdState, error) {
	var v struct{ Format int }
	if err := json.Unmarshal(b, &v); err != nil {
		return nil, fmt.Errorf("read state: %w", err)
	}
	if v.Format < stateOldest || v.Format > stateFormat {
		return nil, fmt.Errorf("read state: format %d, this program reads %d to %d", v.Format, stateOldest, stateFormat)
	}
	var s holdState
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&s); err != nil {
		return nil, fmt.Errorf("read state: %w", err)
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, fmt.Errorf("read state: more than one")
	}
	return &s, s.check()
}

// check finds what would not be understood later, when there is no way back.
func (s *holdState) check() error {
	fds := fdSet{}
	fds.want("binary", s.Binary)
	fds.want("lock", s.Lock)
	fds.want("listener", s.Listener)
	if len(s.Forkers) == 0 || s.Socket == "" {
		return fmt.Errorf("read state: no forker or no socket")
	}
	for _, k := range s.Forkers {
		fds.want("forker", k.Socket)
	}
	for n, fd := range s.Store {
		fds.want("kept "+n, fd)
	}
	for _, fd := range s.Discards {
		fds.want("pipe", fd)
	}
	ids := map[string]bool{}
	for i := range s.Sandboxes {
		sb := &s.Sandboxes[i]
		if !validID(sb.ID) || ids[sb.ID] {
			return fmt.Errorf("read state: sandbox %q", sb.ID)
		}
		ids[sb.ID] = true
		if err := sb.check(fds, len(s.Filters)); err != nil {
			return fmt.Errorf("read state: sandbox %s: %w", sb.ID, err)
		}
	}
	names := map[string]bool{}
	for i := range s.Plains {
		p := &s.Plains[i]
		if names[p.Spec.Name] || p.Spec.check() != nil || p.PID <= 0 {
			return fmt.Errorf("read state: process %q", p.Spec.Name)
		}
		names[p.Spec.Name] = true
		if !p.Ended {
			fds.want("process "+p.Spec.Name, p.Pidfd)
		}
	}
	if len(fds[bad]) > 0 {
		return fmt.Errorf("read state: descriptors: %v", fds[bad])
	}
	return nil
}

func (sb *sandboxState) check(fds fdSet, filters int) error {
	for _, l := range sb.Listeners {
		fds.want("listener of "+sb.ID, l.File)
		if l.Filter < 0 || l.Filter >= filters {
			return fmt.Errorf("filter %d of %d", l.Filter, filters)
		}
	}
	fds.want(sb.ID, sb.Pidfd)
	fds.may(sb.ID, sb.Control)
	for _, h := range sb.Helpers {
		fds.want(sb.ID, h.Pidfd)
	}
	ids := map[string]bool{}
	for i := range sb.Execs {
		e := &sb.Execs[i]
		id := e.Spec.Spec.ID
		if !validID(id) || ids[id] || len(e.Spec.Spec.Argv) == 0 || e.Spec.Sandbox == "" {
			return fmt.Errorf("exec %q", id)
		}
		ids[id] = true
		if err := e.check(fds); err != nil {
			return fmt.Errorf("exec %s: %w", id, err)
		}
	}
	return nil
}

func (e *execState) check(fds fdSet) error {
	pty := e.Spec.Spec.PTY != nil
	if want := map[bool]int{false: 2, true: 1}[pty]; len(e.Out) != want {
		return fmt.Errorf("%d streams, want %d", len(e.Out), want)
	}
	if !e.Ended {
		fds.want("pidfd", e.Pidfd)
	}
	if pty && e.Input != 0 && e.Input != e.Out[0].Pipe {
		return fmt.Errorf("input is not its terminal")
	}
	if !pty {
		fds.may("input", e.Input)
	}
	for i := range e.Out {
		p := &e.Out[i]
		switch p.Stage {
		case pumpReads, pumpDrains, pumpDiscards:
			fds.want("pipe", p.Pipe)
		case pumpDone:
			fds.may("pipe", p.Pipe)
		default:
			return fmt.Errorf("stage %q", p.Stage)
		}
		fds.may("spool", p.File)
		if _, err := process.DecodeSpoolHeader(p.Spool.Header.Encode()); err != nil {
			return err
		}
		if p.Seen < 0 || p.Rest < 0 || !p.Spool.Filed && p.Spool.Lost == "" && int64(len(p.Spool.Memory)) != p.Spool.Header.Total {
			return fmt.Errorf("stream %d: counts", i+1)
		}
	}
	return nil
}

// fdSet knows which descriptors are spoken for; no two things have the same.
type fdSet map[int][]string

const bad = -1 // key of the complaints

func (s fdSet) want(what string, fd int) {
	if fd < readyFD || s[fd] != nil {
		s[bad] = append(s[bad], fmt.Sprintf("%s: %d", what, fd))
		return
	}
	s[fd] = []string{what}
}

func (s fdSet) may(what string, fd int) {
	if fd != 0 {
		s.want(what, fd)
	}
}
