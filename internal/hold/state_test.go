package hold

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec/process"
)

var update = flag.Bool("update", false, "write golden files")

// everything is a state in which nothing is left out.
func everything() *holdState {
	began := time.Date(2026, 11, 29, 12, 0, 0, 5, time.UTC)
	spec := process.Spec{ID: "run", Argv: []string{"sh", "-c", "\xff"}, Env: map[string]string{"A": "1"}, Cwd: "/tmp", User: "app", Stdin: true,
		Timeout: time.Minute, Head: 8, Tail: 16, OnLimit: process.Kill, Main: true}
	pty := process.Spec{ID: "shell", Argv: []string{"sh"}, PTY: &process.Size{Rows: 24, Cols: 80}}
	filed := process.SpoolState{Header: process.SpoolHeader{Head: 8, Tail: 16, Total: 100, Dropped: 20}, Filed: true, SeenFrom: 10, SeenTo: 90, LostTo: 5, Followers: []int64{90, 95}}
	small := process.SpoolState{Header: process.SpoolHeader{Head: 8, Tail: 16, Total: 5, EOF: true}, Memory: []byte("hello")}
	return &holdState{Format: stateFormat, Native: 1, At: time.Hour, Started: began, Socket: "/run/dsec/hold", Binary: 4, Lock: 5, Listener: 6,
		Forkers: []forkerState{{PID: 100, Socket: 7}, {PID: 101, Socket: 8}}, Store: map[string]int{"layer/a": 9, "pool": 10},
		Lingering: []string{"/sys/fs/cgroup/x/exec-old"}, Discards: []int{11}, Filters: [][]byte{{6, 0, 0, 0, 1, 0, 0xc0, 0x7f}},
		Batch: refusalBatch{Number: 7, List: []Refusal{{Sandbox: "sb", Exec: "run", Exe: "/bin/mount", PID: 5, UID: 1000, GID: 1000, Call: 165, Errno: 1, Clause: 12, Arg: -1,
			Args: [6]uint64{1, 2, 3, 4, 5, 1 << 63}, Count: 3, First: began, Last: began.Add(time.Second)}}},
		Refusals: []Refusal{{Sandbox: "sb", UID: -1, GID: -1, Call: otherKinds, Arg: -1, Count: 9, First: began, Last: began}},
		Plains: []plainState{
			{Spec: wirePlain{Name: "vm-1", Path: "/usr/bin/qemu", Args: []raw{"-name", "\xff"}, UID: 61440, GID: 61440, Groups: []uint32{105}, Cgroup: "/sys/fs/cgroup/z",
				Tasks: []string{"/sys/fs/cgroup/memory/z/tasks"}, OOMScoreAdj: 300}, PID: 400, Pidfd: 23, Begun: began},
			{Spec: wirePlain{Name: "vm-2", Path: "/bin/false", UID: 1, GID: 1}, PID: 401, Begun: began, Ended: true, Code: 1, Signal: 9}},
		Sandboxes: []sandboxState{
			{ID: "made-ahead", Spec: SpawnSpec{ID: "made-ahead", UIDBase: 65536, GIDBase: 65536, Count: 65536, Cgroup: "/sys/fs/cgroup/y"}, PID: 200, Pidfd: 12,
				Control: 13, Prepared: [3]bool{true, true, false}, Unready: "mount /dev: no space left on device"},
			{ID: "sb", Spec: SpawnSpec{ID: "shell-1", UIDBase: 131072, GIDBase: 131072, Count: 65536, Cgroup: "/sys/fs/cgroup/x", Tasks: []string{"/sys/fs/cgroup/memory/x/tasks"},
				OOMScoreAdj: 100, Account: Account{OOM: "/o", Limit: "/l", Peak: "/p", Throttle: "/t"}, Bare: true, ShmSize: 1 << 20, Lo: true,
				Sysctls: []Sysctl{{"net/ipv4/ping_group_range", "0 0"}}, ReadOnly: []string{"/proc/sys"}, Masks: []string{"/proc/kcore"}}, PID: 300, Pidfd: 14,
				Entered: true, Held: true, Asked: true, Ended: true, Acked: true, Signal: 9, Prepared: [3]bool{true, true, true},
				Helpers: []childState{{PID: 301, Pidfd: 15}}, Listeners: []listenerState{{Exec: "run", File: 22}},
				Execs: []execState{
					{Spec: wireExec{Sandbox: "sb", Spec: toWireSpec(spec), Cwd: "/tmp", UID: 1000, GID: 1000, Spool: "/var/lib/dsec/spool"}, PID: 302, Pidfd: 16, Begun: began,
						Ran: time.Second, Clock: clockState{Running: true, Held: true, Left: 59 * time.Second, Age: time.Millisecond, Hard: 3 * time.Minute, Total: 2},
						OOM: 1, Throttle: 3, Spooled: true, Input: 17, Cause: process.TimedOut,
						Out: []pumpState{{Stage: pumpReads, Pipe: 18, Finished: true, Seen: 103, Pending: []byte("abc"), Spool: filed, File: 19},
							{Stage: pumpDrains, Pipe: 20, Seen: 5, Rest: 7, Spool: small}}},
					{Spec: wireExec{Sandbox: "sb", Spec: toWireSpec(pty), Cwd: "/", Spool: "/var/lib/dsec/spool"}, PID: 303, Begun: began, Ran: time.Second, Ended: true, Acked: true,
						Result: ExecResult{Status: process.Exited, ExitCode: 3, Started: began, Wall: time.Second, CPU: time.Millisecond},
						Out:    []pumpState{{Stage: pumpDiscards, Pipe: 21, Finished: true, Spool: small}}},
				}},
		}}
}

func TestGoldenState(t *testing.T) {
	b, err := everything().encode()
	must(t, err)
	golden := filepath.Join("testdata", fmt.Sprintf("state-%d.golden", stateFormat))
	if *update {
		must(t, os.WriteFile(golden, b, 0o644))
	}
	want, err := os.ReadFile(golden)
	must(t, err)
	if !bytes.Equal(b, want) {
		t.Fatalf("the state is written in another way than before: raise stateFormat\n%s", b)
	}
	s, err := decodeState(want)
	must(t, err)
	again, err := s.encode()
	must(t, err)
	if !bytes.Equal(again, want) {
		t.Fatalf("reading loses something:\n%s", again)
	}
}

// An upgrade comes from the program before this one.
func TestStateOfAnEarlierFormatIsGoneOnWith(t *testing.T) {
	for format := stateOldest; format < stateFormat; format++ {
		b, err := os.ReadFile(filepath.Join("testdata", fmt.Sprintf("state-%d.golden", format)))
		must(t, err)
		s, err := decodeState(b)
		must(t, err)
		want := everything()
		want.Format, want.Plains = format, nil
		if format < 2 {
			want.Filters, want.Batch, want.Refusals, want.Sandboxes[1].Listeners = nil, refusalBatch{}, nil, nil
		}
		got, err := s.encode()
		must(t, err)
		now, err := want.encode()
		must(t, err)
		if !bytes.Equal(got, now) {
			t.Errorf("%d: %s", format, got)
		}
	}
}

func TestStateThatCannotBeGoneOnWithIsRefused(t *testing.T) {
	for what, change := range map[string]func(*holdState){
		"format 4":    func(s *holdState) { s.Format = 4 },
		"process":     func(s *holdState) { s.Plains[1].Spec.Name = "vm-1" },
		"as root":     func(s *holdState) { s.Plains[1].Spec.UID = 0 },
		"number":      func(s *holdState) { s.Plains[0].PID = 0 },
		"its pidfd":   func(s *holdState) { s.Plains[0].Pidfd = 0 },
		"filter":      func(s *holdState) { s.Sandboxes[1].Listeners[0].Filter = 1 },
		"descriptors": func(s *holdState) { s.Lock = s.Binary },
		"stderr":      func(s *holdState) { s.Listener = 2 },
		"no forker":   func(s *holdState) { s.Forkers = nil },
		"sandbox":     func(s *holdState) { s.Sandboxes[1].ID = "made-ahead" },
		"streams":     func(s *holdState) { s.Sandboxes[1].Execs[0].Out = nil },
		"stage":       func(s *holdState) { s.Sandboxes[1].Execs[0].Out[0].Stage = "later" },
		"terminal":    func(s *holdState) { s.Sandboxes[1].Execs[1].Input = 17 },
		"counts":      func(s *holdState) { s.Sandboxes[1].Execs[0].Out[1].Spool.Memory = nil },
		"spool":       func(s *holdState) { s.Sandboxes[1].Execs[0].Out[0].Spool.Header.Tail = 0 },
	} {
		s := everything()
		change(s)
		b, err := s.encode()
		must(t, err)
		switch what {
		case "stderr":
			what = "listener: 2"
		case "as root", "number":
			what = "process"
		case "its pidfd":
			what = "process vm-1: 0"
		}
		if _, err := decodeState(b); err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("%s: %v", what, err)
		}
	}
	b, err := everything().encode()
	must(t, err)
	later := bytes.Replace(b, []byte(`"Native"`), []byte(`"Later": 1, "Native"`), 1)
	if _, err := decodeState(later); err == nil || !strings.Contains(err.Error(), "Later") {
		t.Error("a field of another time was passed over:", err)
	}
}

func FuzzState(f *testing.F) {
	b, err := everything().encode()
	must(f, err)
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := decodeState(b)
		if err != nil {
			return
		}
		once, err := s.encode()
		must(t, err)
		again, err := decodeState(once)
		if err != nil {
			t.Fatalf("%v\n%s", err, once)
		}
		twice, err := json.MarshalIndent(again, "", " ")
		if err != nil || !bytes.Equal(once, twice) {
			t.Fatalf("%v\n%s\n%s", err, once, twice)
		}
	})
}
